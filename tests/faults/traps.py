"""Kills real processes at exact points of a program: a trap is a function, and what has to be true when it is called.

The programs are the real ones, with their functions wrapped (`install`). A trap is armed by a file; it springs once,
whichever process comes by first, and nothing of it is left for whoever is started again.
"""

import functools
import importlib
import inspect
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from tests.processes import processes_of

__all__ = ["Call", "Point", "Traps", "called_by"]

Victim = Literal["coordinator", "redis", "site"]


@dataclass(frozen=True)
class Call:
    """`result` is what it returned; None before."""

    args: tuple[Any, ...]
    result: Any = None


@dataclass(frozen=True)
class Point:
    """`function`: "MODULE:NAME" or "MODULE:CLASS.NAME", as its callers look it up; `halfway`: one that writes bytes."""

    name: str
    function: str
    when: Literal["before", "halfway", "after"] = "before"
    holds: Callable[[Call], bool] = field(default=lambda _: True)


def called_by(name: str) -> bool:
    """Whether a function or coroutine of this name is under way here."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == name:
            return True
        frame = frame.f_back
    return False


class Traps:
    """`folder` has `coordinator`, the data directory of one, and `site-NAME` for each site."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._armed, self._sprung = folder / "armed", folder / "sprung"

    # --- in the test --------------------------------------------------------------------------------------------------

    def arm(self, point: Point, victim: Victim, site: str) -> None:
        """`site` is killed where no site comes by itself."""
        self._sprung.unlink(missing_ok=True)
        draft = self._folder / "draft-of-armed"
        draft.write_text(json.dumps([point.name, victim, site]))
        draft.rename(self._armed)

    @property
    def sprung(self) -> bool:
        """Whether the victim is dead, or about to be."""
        return self._sprung.exists()

    @property
    def killed_site(self) -> str:
        return self._sprung.read_text()

    # --- in the program -----------------------------------------------------------------------------------------------

    def install(self, points: Sequence[Point], site: str | None = None) -> None:
        """`site`: whose process this is; None: the coordinator's."""
        for function in dict.fromkeys(point.function for point in points):
            there = [point for point in points if point.function == function]
            passed = functools.partial(self._pass, there, site)
            _wrap(function, passed, in_halves=any(point.when == "halfway" for point in there))

    def _pass(self, points: Sequence[Point], site: str | None, when: str, call: Call) -> None:
        with suppress(FileNotFoundError):
            name, victim, other = json.loads(self._armed.read_text())
            if any((point.name, point.when) == (name, when) and point.holds(call) for point in points):
                self._armed.rename(self._folder / "springing")  # fails for all but the first
                self._spring(victim, site or other)

    def _spring(self, victim: Victim, site: str) -> None:
        doomed = self._processes(victim, site)
        own = [process for process in doomed if process.pid == os.getpid()]
        if own:  # which may end with the others
            self._sprung_at(site)
        _kill([process for process in doomed if process not in own])
        if own:
            os.kill(os.getpid(), signal.SIGKILL)
        self._sprung_at(site)

    def _sprung_at(self, site: str) -> None:
        draft = self._folder / "draft-of-sprung"  # not the file that was armed, which others may be reading
        draft.write_text(site)
        draft.rename(self._sprung)

    def _processes(self, victim: Victim, site: str) -> list[psutil.Process]:
        if victim == "site":
            return processes_of(self._folder / f"site-{site}")
        name = {"coordinator": "coordinator", "redis": "server"}[victim]
        return [psutil.Process(int((self._folder / f"coordinator/redis/{name}.pid").read_text()))]


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    while any(_alive(process) for process in processes):
        time.sleep(0.001)


def _alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def _wrap(function: str, passed: Callable[[str, Call], None], *, in_halves: bool) -> None:
    module, _, path = function.partition(":")
    *owners, name = path.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **others: Any) -> Any:
        passed("before", Call(args))
        if in_halves:
            itself, data = args
            original(itself, data[: len(data) // 2])
            passed("halfway", Call(args))
            args = itself, data[len(data) // 2 :]
        result = original(*args, **others)
        passed("after", Call(args, result))
        return result

    @functools.wraps(original)
    async def wrapped_coroutine(*args: Any, **others: Any) -> Any:
        passed("before", Call(args))
        result = await original(*args, **others)
        passed("after", Call(args, result))
        return result

    setattr(owner, name, wrapped_coroutine if inspect.iscoroutinefunction(original) else wrapped)
