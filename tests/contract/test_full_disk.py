"""A coordinator whose disk is full: a real file system of one megabyte, real HTTP, a real outer round."""

import subprocess
from contextlib import suppress

import pytest

from api.schemas import Abstention, RunStatus
from api.specs import OuterSpec
from tests.conftest import start_coordinator, wait_until
from tests.contract.by_hand import WAIT_S, RunByHand, problem


@pytest.fixture(scope="module")
def blobs(tmp_path_factory):
    """Where the coordinator `live` keeps its blobs."""
    folder = tmp_path_factory.mktemp("small") / "blobs"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.fixture(scope="module")
def live(blobs):
    live = start_coordinator(blobs.parent, "--lease-s", "36000")
    yield live
    live.service.interrupt()
    live.service.join()


@pytest.fixture
def ballast(blobs):
    """Fills the disk when called; it is free again when the file is gone."""
    path = blobs / "ballast"

    def fill():
        with path.open("wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(4096)):
                pass
        return path

    yield fill
    path.unlink(missing_ok=True)


def test_an_upload_pauses_the_run_and_fits_once_there_is_room(live, ballast):
    run = RunByHand(live)
    site = run.sites[0]
    fill = ballast()
    for _ in range(2):
        answer = site.put_blob(b"new bytes")
        assert "free some space on it" in problem(answer, 507, "storage_full")["detail"]
        assert run.view.status is RunStatus.PAUSED
        assert run.view.reason.startswith("paused: the disk under the blob directory ")
        assert run.view.alarms == []
    fill.unlink()
    run.admin.resume_run(run.id)
    assert site.put_blob(b"new bytes").status_code == 201
    assert run.view.status is RunStatus.RUNNING


def test_work_that_finds_no_room_pauses_once_and_is_done_after_the_resume(live, ballast):
    run = RunByHand(live, steps=2, outer=OuterSpec(every=1))
    fill = ballast()
    for site in run.sites:
        abstention = Abstention(position=site.position(), reason="no data")
        site.ranks.abstain(run.id, "west", 1, site.name, abstention, 0.0)
    for site in run.sites:
        assert not site.announce(1, 0, run.parameters.tobytes())  # the copy is that of entry 0
    wait_until(lambda: run.view.status is RunStatus.PAUSED, "the pause", WAIT_S)
    assert "averaging fragment 0 of outer round 1 failed: the disk under" in run.view.paused_because
    run.admin.resume_run(run.id)
    wait_until(lambda: run.view.status is RunStatus.PAUSED, "the next pause", WAIT_S)
    assert (run.view.alarms, run.view.outer_rounds) == ([], 0)
    fill.unlink()
    run.admin.resume_run(run.id)
    wait_until(lambda: run.view.outer_rounds == 1, "the outer round", WAIT_S)
    assert (run.view.status, run.view.paused_because) == (RunStatus.RUNNING, "")
