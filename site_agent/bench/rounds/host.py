"""A coordinator to measure: `python -m coordinator` with its own Redis in a directory that is gone afterwards.

How often that Redis calls fsync is changed while it runs, on its socket.
"""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import redis

from api.client import CoordinatorClient
from api.processes import Service
from site_agent.bench.resident import forget_peak, peak, resident
from site_agent.bench.timing import rounded

__all__ = ["Fsync", "Host", "Usage", "host", "megabytes", "running", "scratch"]

Fsync = Literal["everysec", "always"]
_TICKS = 100
"""Of CPU time per second, in /proc: USER_HZ is 100 on every Linux."""


@dataclass(frozen=True)
class Usage:
    """Of the coordinator's process and its Redis, up to now."""

    cpu_s: float
    redis_cpu_s: float
    resident: int
    redis_held: int
    redis_received: int
    redis_sent: int


@dataclass(frozen=True)
class Host:
    directory: Path
    service: Service
    url: str
    redis: Any

    def token(self, scope: str) -> str:
        return (self.directory / f"{scope}-token").read_text().strip()

    def admin(self) -> CoordinatorClient:
        return CoordinatorClient(self.url, self.token("admin"))

    def set_fsync(self, when: Fsync) -> None:
        self.redis.config_set("appendfsync", when)

    def usage(self) -> Usage:
        info = self.redis.info()
        return Usage(
            cpu_s=self._cpu_s(),
            redis_cpu_s=info["used_cpu_user"] + info["used_cpu_sys"],
            resident=resident(self.service.pid),
            redis_held=info["used_memory"],
            redis_received=info["total_net_input_bytes"],
            redis_sent=info["total_net_output_bytes"],
        )

    def forget_peak(self) -> None:
        """The high-water mark of the coordinator's resident set begins anew."""
        forget_peak(self.service.pid)

    def peak(self) -> int:
        """Bytes: the most that was resident at once."""
        return peak(self.service.pid)

    def _cpu_s(self) -> float:
        fields = Path(f"/proc/{self.service.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def pretend_blob(self, size: int) -> str:
        """A blob of zeros that takes no room, under a name that is not its digest: the start of a run nobody reads."""
        digest = "0" * 64
        path = self.directory / "blobs" / digest[:2] / digest
        path.parent.mkdir(exist_ok=True)
        with path.open("wb") as file:
            file.truncate(size)
        return digest


@contextlib.contextmanager
def host() -> Iterator[Host]:
    with scratch() as directory, running(directory) as there:
        yield there


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A directory for a coordinator's data."""
    directory = Path(tempfile.mkdtemp(prefix="isthmus-"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def running(directory: Path, *options: str) -> Iterator[Host]:
    """A coordinator whose data an earlier one may have left. Sites are not given up for want of heartbeats."""
    (directory / "url").unlink(missing_ok=True)
    with _process(directory, options) as service:
        url = service.wait_for_file(directory / "url")
        with redis.Redis(unix_socket_path=str(directory / "redis" / "redis.sock")) as client:
            yield Host(directory, service, url, client)


@contextlib.contextmanager
def _process(directory: Path, options: Sequence[str]) -> Iterator[Service]:
    arguments = ["--port", "0", "--data-dir", str(directory), "--lease-s", "86400", *options]
    service = Service("coordinator", arguments, directory / "coordinator.log", Path.cwd(), {})
    try:
        yield service
    finally:
        service.interrupt()
        service.join()


def megabytes(size: float) -> float:
    return rounded(size / 1e6)
