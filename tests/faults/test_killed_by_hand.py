"""A real coordinator killed with -9 at two points of an outer round and its snapshot; its sites are driven by hand."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from api.processes import Service
from api.schemas import Manifest, RunStatus
from api.specs import OuterSpec, SnapshotsSpec
from tests.conftest import ROOT, LiveCoordinator, wait_until
from tests.contract.by_hand import LAYOUT, RunByHand
from tests.faults.points import OF_OUTER_ROUNDS
from tests.faults.traps import Traps


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], LiveCoordinator]]:
    """Starts the coordinator, again if need be, once the one before is gone."""
    data = tmp_path / "coordinator"
    data.mkdir()
    started: list[Service] = []

    def start() -> LiveCoordinator:
        for service in started:
            service.join()
        port = (data / "url").read_text().strip().rpartition(":")[2] if started else "0"
        (data / "url").unlink(missing_ok=True)
        options = [str(tmp_path), "--port", port, "--data-dir", str(data), "--lease-s", "36000", "--tick-s", "0.1"]
        started.append(Service("tests.faults.killed_coordinator", options, tmp_path / "log", ROOT, {}))
        return LiveCoordinator(data, started[-1], started[-1].wait_for_file(data / "url"))

    yield start
    started[-1].interrupt()
    started[-1].join()


def hold_outer_round(run: RunByHand, number: int, copies: list[np.ndarray]) -> None:
    for site in run.sites:
        site.contribute(number)
    for site, copy in zip(run.sites, copies, strict=True):
        site.announce(number, 0, copy.tobytes())


def test_a_killed_coordinator_goes_on_where_it_was(tmp_path: Path, start: Callable[[], LiveCoordinator]) -> None:
    points = {point.name: point for point in OF_OUTER_ROUNDS}
    traps = Traps(tmp_path)
    outer = OuterSpec(every=1, optimizer="average")
    run = RunByHand(start(), ("east", "west"), steps=2, outer=outer, snapshots=SnapshotsSpec(every=1))
    copies = [np.random.default_rng(seed).standard_normal(LAYOUT.parameter_count).astype("<f4") for seed in (1, 2)]
    mean = ((copies[0].astype(np.float64) + copies[1]) / 2).astype("<f4")

    for number, name in enumerate(("an anchor: before the commit", "half a manifest is written"), 1):
        traps.arm(points[name], "coordinator", "")
        with ThreadPoolExecutor(1) as pool:
            held = pool.submit(hold_outer_round, run, number, copies)
            wait_until(lambda: traps.sprung, name)
            start()
            held.result()
        wait_until(lambda: len(run.admin.snapshots(run.id).items) == number, f"snapshot {number}")  # noqa: B023
        manifest = Manifest.model_validate_json(run.admin.get_blob(run.admin.snapshots(run.id).items[-1].manifest))
        assert (manifest.number, manifest.step) == (number, number)
        assert run.admin.get_blob(manifest.parameters[0]) == mean.tobytes()
        assert [entry["kind"] for entry in run.admin.log(run.id, "west", 0).items].count("anchor") == number
    assert not list((tmp_path / "coordinator" / "blobs" / "incoming").iterdir())
    for site in run.sites:
        site.report_final("f" * 64)
    assert run.view.status is RunStatus.SUCCEEDED
