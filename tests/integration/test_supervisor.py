"""Real torchrun processes, of scripts that need no torch: how groups of ranks end, and that nothing of them is left."""

import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from site_agent.supervisor import Exit, RankGroup
from tests.conftest import wait_until
from tests.processes import processes_of

PROLOGUE = """
import os, pathlib, signal, subprocess, sys
rank, folder = int(os.environ["RANK"]), pathlib.Path(sys.argv[0]).parent
"""
SCRIPTS = {
    "fine": "print(os.environ['ISTHMUS_SESSION_FILE'], os.environ['GLOO_SOCKET_IFNAME'])",
    "broken": """
if rank == 1:
    print("starting", file=sys.stderr)
    import no_such_library
signal.pause()
""",
    "killed": "(folder / 'ready').touch()\nsignal.pause()",
    "stubborn": """
if rank == 1:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
command = [sys.executable, "-c", "import signal; signal.pause()", folder / "child"]
subprocess.Popen(command, start_new_session=rank == 1)
(folder / f"ready{rank}").touch()
signal.pause()
""",
    "orphaned": "(folder / 'ready').touch()\nsignal.pause()",
}
RANKS = {"broken": 2, "stubborn": 2}


@dataclass(frozen=True)
class Started:
    folder: Path
    group: RankGroup

    def end(self) -> Exit:
        return wait_until(self.group.poll, "the end of the group", seconds=60)

    def ready(self, *names: str) -> None:
        wait_until(lambda: all((self.folder / name).exists() for name in names), f"{names} in {self.folder}")

    def launcher(self) -> psutil.Process:
        (launcher,) = (process for process in processes_of(self.folder) if "torch.distributed.run" in process.cmdline())
        return launcher


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Started]]:
    """All groups at once: what takes time is torchrun's start."""
    groups = {}
    for name, body in SCRIPTS.items():
        folder = tmp_path_factory.mktemp(name)
        script, logs = folder / "script.py", folder / "logs"
        script.write_text(PROLOGUE + body)
        logs.mkdir()
        environment = {"ISTHMUS_SESSION_FILE": "of this group"}
        groups[name] = Started(folder, RankGroup([sys.executable, str(script)], RANKS.get(name, 1), logs, environment))
    yield groups
    for each in groups.values():
        each.group.stop(grace_s=0.0)


def test_a_group_that_is_done(started):
    fine = started["fine"]
    assert fine.end() == Exit(0)
    (output,) = fine.folder.glob("logs/*/attempt_0/0/stdout.log")
    assert output.read_text() == "of this group lo\n"
    fine.group.stop(grace_s=0.0)
    assert fine.group.poll() == Exit(0)


def test_an_import_error_names_the_rank_and_shows_its_log(started):
    end = started["broken"].end()
    assert (end.code, end.rank) == (1, 1)
    assert "ModuleNotFoundError: No module named 'no_such_library'" in end.detail
    assert end.detail.startswith("starting\n")
    assert not processes_of(started["broken"].folder)


def test_a_killed_rank_is_told_from_one_that_failed(started):
    killed = started["killed"]
    killed.ready("ready")
    (rank,) = (process for process in processes_of(killed.folder) if process != killed.launcher())
    rank.kill()
    end = killed.end()
    assert (end.code, end.rank) == (-signal.SIGKILL, 0)


def test_stop_leaves_nothing_of_ranks_that_do_not_want_to_end(started):
    """One rank ignores SIGTERM for longer than the grace, and has a child in a session of its own."""
    stubborn = started["stubborn"]
    stubborn.ready("ready0", "ready1")
    assert stubborn.group.poll() is None
    assert len(processes_of(stubborn.folder)) >= 5  # the launcher, two ranks and a child of each
    begin = time.monotonic()
    stubborn.group.stop(grace_s=0.5)
    assert time.monotonic() - begin < 10
    assert not processes_of(stubborn.folder)
    assert stubborn.group.poll() is not None


def test_stop_leaves_nothing_when_the_launcher_was_killed(started):
    orphaned = started["orphaned"]
    orphaned.ready("ready")
    orphaned.launcher().kill()
    assert orphaned.end().code == -signal.SIGKILL
    assert processes_of(orphaned.folder)
    orphaned.group.stop(grace_s=10.0)
    assert not processes_of(orphaned.folder)


def test_a_command_that_does_not_exist(tmp_path):
    group = RankGroup([str(tmp_path / "no-such-program")], 1, tmp_path, {})
    end = wait_until(group.poll, "the end of the group", seconds=60)
    assert end.code not in (None, 0)
    assert "no-such-program" in end.detail
    group.stop(0.0)
