"""A coordinator with its Redis and three agents, each behind a link of its own, and the ways to break them."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import psutil

import api
from api.client import CoordinatorClient
from api.errors import IsthmusError
from api.processes import Service
from site_agent.chaos.links import Links
from site_agent.chaos.schedule import Fault, Kind, Plan

__all__ = ["LEASE_S", "TASK", "Stage", "wait_until"]

TASK = "chaos"
_MODULE = "site_agent.chaos.task"
_PATIENCE_S = 90.0
_QUIET = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
_CHECKOUT = Path(api.__path__[0]).parent
LEASE_S = 3.0
_LEASES = ("--lease-s", str(LEASE_S), "--heartbeat-s", "0.5", "--tick-s", "0.25")

T = TypeVar("T")


def wait_until(condition: Callable[[], T | None], what: str, seconds: float = _PATIENCE_S) -> T:
    """What `condition` returns once that is true."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise IsthmusError(f"waited {seconds:g} s for {what}")
        time.sleep(0.05)
    return value


class Stage:
    """A context manager around all processes; at its end it raises IsthmusError if one of them is left.

    Attributes:
        client: talks to the coordinator directly, with an administrator's token.
    """

    def __init__(self, plan: Plan, folder: Path) -> None:
        self._plan = plan
        self._folder = folder
        self._data = folder / "coordinator"
        self._services: dict[str, Service] = {}
        self._starts = 0
        self._resources = ExitStack()

    def __enter__(self) -> Self:
        self._data.mkdir(parents=True)
        with ExitStack() as resources:
            resources.callback(self._end, "coordinator")
            self._start_coordinator(port=0)
            self.url = self._services["coordinator"].wait_for_file(self._data / "url")
            self._port = int(self.url.rpartition(":")[2])
            self.client = resources.enter_context(CoordinatorClient(self.url, self.token, patience=_PATIENCE_S))
            self.links = resources.enter_context(Links(self._plan.regions, self._port))
            resources.callback(self._end, *self._plan.regions)
            for site in self._plan.regions:
                self._start_agent(site)
            self._resources = resources.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._resources.close()
        if kind is None:
            wait_until(lambda: not self.processes(), f"the end of {self.processes()}", 20.0)

    def _end(self, *names: str) -> None:
        services = [self._services[name] for name in names if name in self._services]
        for service in services:
            service.interrupt()
        for service in services:
            service.join()

    @property
    def token(self) -> str:
        return (self._data / "admin-token").read_text().strip()

    def site(self, name: str) -> Path:
        return self._folder / f"site-{name}"

    def processes(self) -> list[psutil.Process]:
        """All live processes that know a path below the folder."""
        return [process for process in psutil.process_iter() if _knows(process, self._folder)]

    # --- processes ----------------------------------------------------------------------------------------------------

    def _start(self, name: str, module: str, options: tuple[str, ...]) -> None:
        self._starts += 1
        log = self._folder / f"{self._starts:02}-{name}.log"
        self._services[name] = Service(module, list(options), log, _CHECKOUT, _QUIET)

    def _start_coordinator(self, port: int) -> None:
        workers = ("--workers", str(self._plan.workers))
        self._start(
            "coordinator", "coordinator", ("--port", str(port), "--data-dir", str(self._data), *workers, *_LEASES)
        )

    def _start_agent(self, site: str) -> None:
        options = {
            "--name": site,
            "--region": self._plan.regions[site],
            "--coordinator": f"http://127.0.0.1:{self.links.ports[site]}",
            "--join-token-file": str(self._data / "join-token"),
            "--site-dir": str(self.site(site)),
            "--ranks": str(self._plan.ranks[site]),
            "--task": f"{TASK}=python -m {_MODULE}",
            "--finish-s": "20",
            "--grace-s": "3",
        }
        self._start(site, "site_agent", tuple(word for option in options.items() for word in option))

    # --- faults -------------------------------------------------------------------------------------------------------

    def strike(self, fault: Fault) -> None:
        """Lets it happen; what was killed is back, or on its way back, at the end."""
        match fault.kind:
            case Kind.KILL_COORDINATOR:
                self._services["coordinator"].kill()
                time.sleep(fault.seconds)
                self._start_coordinator(self._port)
            case Kind.KILL_REDIS:
                wait_until(self._kill_redis, "a Redis to kill")
            case Kind.KILL_AGENT:
                self._services[fault.site].kill()
                time.sleep(fault.seconds)
                self._start_agent(fault.site)
            case Kind.KILL_RANK:
                wait_until(lambda: self._kill_rank(fault), f"a rank of {fault.site} to kill")
            case _:
                self.links.arm(fault)

    def _kill_redis(self) -> bool:
        """False while none runs: the coordinator has been killed, too, or has not noticed yet that Redis has."""
        folder = self._data / "redis"
        with suppress(ValueError, psutil.NoSuchProcess):
            server = psutil.Process(int((folder / "server.pid").read_text()))
            if server.cwd() == str(folder) and server.status() != psutil.STATUS_ZOMBIE:
                server.kill()
                return True
        return False

    def _kill_rank(self, fault: Fault) -> bool:
        ranks = [process for process in psutil.process_iter() if _is_rank(process, self.site(fault.site))]
        if not ranks:
            return False
        ranks.sort(key=lambda process: process.pid)
        with suppress(ProcessLookupError):
            os.kill(ranks[int(fault.place * len(ranks))].pid, signal.SIGKILL)
            return True
        return False


def _is_rank(process: psutil.Process, folder: Path) -> bool:
    """torchrun, which is not one, has the same variables and more arguments."""
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        return process.cmdline()[1:] == ["-m", _MODULE] and _knows(process, folder)
    return False


def _knows(process: psutil.Process, folder: Path) -> bool:
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        words = [*process.cmdline(), process.environ().get("ISTHMUS_SESSION_FILE", "")]
        return any(word.startswith(f"{folder}/") for word in words)
    return False
