"""`isthmus chaos`, the command: real processes that are really killed, and real proxies. Nothing may come of it."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.processes import processes_of


def chaos(keep: Path, *options: str, seconds: float) -> dict[str, object]:
    """The report; everything is well, nothing was kept, and no process is left."""
    command = [sys.executable, "-m", "site_agent.chaos", "--json", "--keep", str(keep), *options]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=seconds, check=False)
    assert ended.returncode == 0, ended.stderr[-8000:]
    assert not processes_of(keep)
    assert not list(keep.glob("*"))
    report: dict[str, object] = json.loads(ended.stdout)
    for run in report.pop("runs"):  # type: ignore[attr-defined]
        assert run["wrong"] == []
    return report


@pytest.fixture
def keep() -> Path:
    """In a folder with a short name: unix sockets have no long ones."""
    return Path(tempfile.mkdtemp(prefix="chaos-"))


@pytest.mark.timeout(300)
def test_a_run_survives_one_fault_of_each_kind(keep: Path) -> None:
    """A seed of few steps, with outer rounds, overlap, a cut that outlasts the lease, and one rank at each site."""
    report = chaos(keep, "--seeds", "1", "--seed", "11", "--faults", "13", seconds=280)
    report.pop("wall_s")
    assert report == {
        "seeds": 1,
        "faults": 13,
        "succeeded": 1,
        "digests_equal": True,
        "replay_equal": True,
        "lost_contributions": 0,
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_runs_survive_twenty_faults_each(keep: Path) -> None:
    report = chaos(keep, "--seeds", "3", seconds=880)
    assert (report["seeds"], report["succeeded"]) == (3, 3)
    assert report["faults"] == 60
    assert report["wall_s"] < 600
