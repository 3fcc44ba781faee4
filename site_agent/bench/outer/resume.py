"""Runs whose sites and coordinator are all stopped, and started again with the same membership.

What was before the newest snapshot is trimmed from the log, so that those that come back enter there.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from api.client import CoordinatorClient
from api.errors import IsthmusError
from api.export import export_model
from api.simulate import Check, Simulation, agents, wait_for_sites
from api.specs import OptimizerSpec, OuterSpec, RunSpec, SnapshotsSpec
from site_agent.bench.outer.trained import Lines, lines_of
from site_agent.bench.rounds.host import running, scratch

__all__ = ["agree", "bench_resume"]

T = TypeVar("T")

_SITES = ("a", "b", "c")
_OPTIONS = ("--log-recent", "2", "--log-keep", "1")
_LOOK_EVERY_S = 0.1
_PATIENCE_S = 120.0
_STEPS = 10**6
_MORE = 2
"""Steps after the snapshot, and after the resumption."""


def bench_resume(say: Callable[[str], None]) -> dict[str, bool]:
    """By kind of run: whether the bits are those of before."""
    kinds = {"resume_from_a_site": None, "resume_from_anchors": OuterSpec(every=2, fragments=2)}
    equal = {}
    for name, outer in kinds.items():
        say(f"measuring: {name}, {len(_SITES)} sites")
        equal[name] = _Resumed(outer).is_equal()
    return equal


class _Resumed:
    def __init__(self, outer: OuterSpec | None) -> None:
        self._spec = RunSpec(
            name="bench",
            task="bench",
            steps=_STEPS,
            sites=list(_SITES),
            optimizer=OptimizerSpec(k=16),
            outer=outer,
            snapshots=SnapshotsSpec(every=4),
        )

    def is_equal(self) -> bool:
        with scratch() as directory:
            self._folder = directory / "seen"
            self._folder.mkdir()
            with self._everything(directory) as (admin, check):
                number, step = self._before(admin, check)
                snapshot = [(step, export_model(admin, self._run, directory / "exported", number))]
            before = self._seen()
            with self._everything(directory) as (admin, check):
                self._after(admin, check, before)
            after = {path: lines for path, lines in self._seen().items() if path not in before}
            return agree([snapshot, *before.values()], list(after.values()))

    @contextmanager
    def _everything(self, directory: Path) -> Iterator[tuple[CoordinatorClient, Check]]:
        simulation = Simulation(self._spec, dict.fromkeys(_SITES, "west"), module=f"{__package__}.trained")
        with (
            running(directory, *_OPTIONS) as there,
            there.admin() as admin,
            agents(simulation, there.url, directory) as check,
        ):
            yield admin, check

    def _before(self, admin: CoordinatorClient, check: Check) -> tuple[int, int]:
        """Trains until a snapshot is some steps behind, and pauses; its number and step."""
        wait_for_sites(admin, list(_SITES), check)
        folder = {"folder": str(self._folder)}
        self._run = admin.start_run(admin.create_run(self._spec.model_copy(update={"params": folder})).id).id

        def behind() -> tuple[int, int] | None:
            made = admin.snapshots(self._run).items
            step = admin.run(self._run).step
            return (made[-1].number, made[-1].step) if made and step >= made[-1].step + _MORE else None

        _until(behind, check, "a snapshot that is some steps behind")
        admin.pause_run(self._run)

        def still() -> tuple[int, int] | None:
            last = [lines[-1][0] for lines in self._seen().values()]
            newest = admin.snapshots(self._run).items[-1]
            return (newest.number, newest.step) if last == [admin.run(self._run).step] * len(_SITES) else None

        return _until(still, check, "all sites to have paused")

    def _after(self, admin: CoordinatorClient, check: Check, before: dict[Path, Lines]) -> None:
        """Until every site has made some steps more."""
        wait_for_sites(admin, list(_SITES), check)
        admin.resume_run(self._run)

        def gone_on() -> bool:
            new = [lines for path, lines in self._seen().items() if path not in before]
            return len(new) >= len(_SITES) and all(len(lines) > _MORE for lines in new)

        _until(gone_on, check, "all sites to go on")
        admin.stop_run(self._run)

    def _seen(self) -> dict[Path, Lines]:
        """By process, of those that have begun."""
        found = {path: lines_of(path) for path in sorted(self._folder.iterdir())}
        return {path: lines for path, lines in found.items() if lines}


def agree(before: Sequence[Lines], after: Sequence[Lines]) -> bool:
    """Whether all hold the same at every step that several have seen, and somebody has gone on from one of before."""
    known: dict[int, str] = {}
    equal = all(known.setdefault(step, digest) == digest for lines in before for step, digest in lines)
    goes_on = any(lines[0][0] in known for lines in after)
    return (
        equal and goes_on and all(known.setdefault(step, digest) == digest for lines in after for step, digest in lines)
    )


def _until(found: Callable[[], T | None], check: Check, what: str) -> T:
    """What it gives, once that is something."""
    deadline = time.monotonic() + _PATIENCE_S
    while not (result := found()):
        check()
        if time.monotonic() > deadline:
            raise IsthmusError(f"the bench has waited {_PATIENCE_S:.0f} s for {what}")
        time.sleep(_LOOK_EVERY_S)
    return result
