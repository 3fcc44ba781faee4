"""A coordinator for runs driven by hand, whose sites send no heartbeats."""

from collections.abc import Iterator

import pytest

from tests.conftest import LiveCoordinator, start_coordinator


@pytest.fixture(scope="package")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCoordinator]:
    """Leases last for hours, and wrong tokens are as welcome as others."""
    options = ["--lease-s", "36000", "--failure-limit", "1000000"]
    live = start_coordinator(tmp_path_factory.mktemp("patient"), *options)
    yield live
    live.service.interrupt()
    live.service.join()
