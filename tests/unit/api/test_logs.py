"""What is printed when something goes wrong."""

import pytest
import structlog

from api.logs import log_to_stderr


@pytest.fixture(autouse=True)
def _as_before():
    before = structlog.get_config()
    yield
    structlog.configure(**before)


def fail(secret):
    raise ValueError("it does not go")


def test_a_traceback_shows_no_values(capsys):
    log_to_stderr()
    try:
        fail("a-secret" + "-token")
    except ValueError as error:
        structlog.get_logger().error("it failed", run="r", exc_info=error)
    printed = capsys.readouterr().err
    assert "it failed" in printed
    assert printed.endswith("ValueError: it does not go\n")
    assert 'fail("a-secret" + "-token")' in printed, "the lines of the program"
    assert "a-secret-token" not in printed
    assert len(printed.splitlines()) < 12
