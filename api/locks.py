"""Directories that one process at a time may use: it holds a lock on a file in it, which names the process."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from api.errors import IsthmusError

__all__ = ["only_process", "read_pid", "try_lock", "write_pid"]


@contextlib.contextmanager
def only_process(pid_file: Path, what: str, remedy: str) -> Iterator[None]:
    """Holds the lock. Raises IsthmusError, that `what` is in use and what to do, if another process does."""
    with pid_file.open("a+") as file:
        if not try_lock(file):
            raise IsthmusError(f"{what} is in use by process {read_pid(file) or 'unknown'}: {remedy}")
        write_pid(file, os.getpid())
        yield


def try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def read_pid(file: IO[str]) -> int | None:
    file.seek(0)
    text = file.read().strip()
    return int(text) if text.isdecimal() else None


def write_pid(file: IO[str], pid: int) -> None:
    file.seek(0)
    file.truncate()
    file.write(f"{pid}\n")
    file.flush()
