"""Groups of ranks under torchrun: start, watch, stop. It knows processes, not runs or coordinators.

torchrun gives every rank a session of its own, so that the processes of a group have no process group in common. They
have an environment variable in common, and are found by it.
"""

import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from api.processes import end_with_parent

__all__ = ["Exit", "RankGroup"]

_TAIL_LINES = 20
_TAIL_BYTES = 1 << 14
_MARK = "ISTHMUS_RANK_GROUP"
_ROOT_CAUSE = re.compile(r"Root Cause.*?rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", re.DOTALL)


@dataclass(frozen=True)
class Exit:
    """How a group ended: the exit code of the first rank that failed, or 0; and the end of that rank's log."""

    code: int
    rank: int | None = None
    detail: str = ""


class RankGroup:
    """The ranks of one run at this site: torchrun in a session of its own, one log per rank.

    Args:
        command: what each rank runs.
        ranks: how many.
        logs: an existing folder for the logs; `torchrun.log` and one folder per rank appear in it.
        environment: added to the agent's own.
    """

    def __init__(self, command: Sequence[str], ranks: int, logs: Path, environment: dict[str, str]) -> None:
        self._logs = logs
        self._mark = secrets.token_hex(16)
        launcher = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        options = ["--nproc-per-node", str(ranks), "--max-restarts", "0", "--redirects", "3", "--log-dir", str(logs)]
        with (logs / "torchrun.log").open("wb") as output:
            self._process = subprocess.Popen(
                [*end_with_parent(), *launcher, *options, "--no-python", *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**_inherited(), **_network(), **environment, _MARK: self._mark},
            )

    def poll(self) -> Exit | None:
        """None while the group runs."""
        code = self._process.poll()
        if code is None:
            return None
        if code == 0:
            return Exit(0)
        return self._failure(code)

    def stop(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL after the grace. Returns when nothing of the group is left."""
        self.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_s)
        self.kill()

    def terminate(self) -> None:
        """SIGTERM to torchrun, which passes it on; does not wait."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to whatever is left of the group; returns when nothing is."""
        while left := self._processes():
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=1.0)
        self._process.wait()

    def _processes(self) -> list[psutil.Process]:
        """torchrun, the ranks and what they started, also if whoever started them is gone."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if process.environ().get(_MARK) == self._mark:
                    found.append(process)
        return found

    def _failure(self, code: int) -> Exit:
        launcher_log = _tail(self._logs / "torchrun.log", lines=200)
        found = _ROOT_CAUSE.search(launcher_log)
        if found is None:
            return Exit(code, detail=_last_lines(launcher_log))
        rank = int(found[1])
        logs = sorted(self._logs.glob(f"*/attempt_*/{rank}/stderr.log"))
        detail = _tail(logs[-1], lines=_TAIL_LINES) if logs else _last_lines(launcher_log)
        return Exit(int(found[2]), rank, detail)


def _inherited() -> dict[str, str]:
    """The agent's own environment without its settings, among which is the join token."""
    return {name: value for name, value in os.environ.items() if not name.startswith("ISTHMUS_")}


def _network() -> dict[str, str]:
    """All ranks of a standalone group are on this host: gloo uses loopback and needs no DNS."""
    return {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}


def _tail(path: Path, lines: int) -> str:
    with path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - _TAIL_BYTES))
        text = file.read().decode(errors="replace")
    return _last_lines(text, lines)


def _last_lines(text: str, lines: int = _TAIL_LINES) -> str:
    return "\n".join(text.strip().splitlines()[-lines:])
