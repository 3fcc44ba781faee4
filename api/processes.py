"""Processes that we start: each in a session of its own, its output in a file, gone when we are."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from api.errors import IsthmusError

__all__ = ["Service", "end_with_parent"]

_GRACE_S = 20.0


def end_with_parent() -> list[str]:
    """A command prefix that has the kernel send SIGTERM when this process is killed; Linux with util-linux only.

    The kernel counts the *thread* that started the child as its parent, so only the main thread may ask for it.
    """
    setpriv = shutil.which("setpriv")
    if not setpriv or sys.platform != "linux" or threading.current_thread() is not threading.main_thread():
        return []
    prefix = [setpriv, "--pdeathsig", "TERM"]
    supported = subprocess.run([*prefix, setpriv, "--version"], capture_output=True, check=False).returncode == 0
    return prefix if supported else []


class Service:
    """`python -m MODULE ARGUMENTS`, its output in `log`."""

    def __init__(self, module: str, arguments: list[str], log: Path, cwd: Path, environment: Mapping[str, str]) -> None:
        self.module = module
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [*end_with_parent(), sys.executable, "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=cwd,
                env={**os.environ, **environment},  # noqa: TID251 - passed on, not read
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def check(self) -> None:
        """Raises IsthmusError, with the end of its log, if the process has ended."""
        code = self._process.poll()
        if code is not None:
            tail = "\n".join(self._log.read_text(errors="replace").strip().splitlines()[-15:])
            raise IsthmusError(f"{self.module} ended with exit code {code}; the end of {self._log}:\n{tail}")

    def wait_for_file(self, path: Path, seconds: float = 60.0) -> str:
        """What the process writes into `path`, once it has."""
        deadline = time.monotonic() + seconds
        while not path.exists():
            self.check()
            if time.monotonic() > deadline:
                raise IsthmusError(f"{self.module} did not start within {seconds:.0f} s; see {self._log}")
            time.sleep(0.05)
        return path.read_text().strip()

    def interrupt(self) -> None:
        """Asks the process to end; it ends what it started itself."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to this process alone, as an accident would."""
        self._process.kill()
        self._process.wait()

    def join(self) -> None:
        """Waits for the end; after the grace, kills whatever is left of its session."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
