"""Where a site, or another reader of a log, is in the outer rounds. Pure: it knows steps and headers, no parameters."""

from dataclasses import replace
from typing import Any

from algorithms.schedule import OuterSchedule

__all__ = ["Progress"]


class Progress:
    """The outer round that has begun last: the copies that it is of have been there.

    Attributes:
        number, step: of it, and the inner step that it follows; 0 before the first one.
        missing: its fragments whose anchors are still to be applied.
        has_buffers: whether the model has buffers, which are one more fragment, due with the last of the others.
    """

    def __init__(self, schedule: OuterSchedule | None) -> None:
        self.number = 0
        self.step = 0
        self.missing: set[int] = set()
        self.has_buffers = False
        self._schedule = schedule

    def begins(self, step: int) -> bool:
        """Whether one follows this step, the last one done, and has not begun."""
        schedule = self._schedule
        return schedule is not None and not self.missing and schedule.following(self.step) == step

    def begin(self, step: int) -> None:
        assert self._schedule is not None
        self._set(self.number + 1, step, self._schedule)

    def _set(self, number: int, step: int, schedule: OuterSchedule) -> None:
        self.number, self.step, self.missing = number, step, set(schedule.due(step))
        if self.has_buffers and schedule.fragments - 1 in self.missing:
            self.missing.add(schedule.fragments)

    @property
    def ends(self) -> int:
        """The inner step after which its anchors are applied."""
        return self.step if self._schedule is None else self._schedule.applied_after(self.step)

    def is_held(self, step: int) -> bool:
        """Whether its anchors are to be applied now, after this step, and have not all been."""
        return bool(self.missing) and step >= self.ends

    def concerns(self, step: int) -> bool:
        """Whether copies are taken or anchors applied after this step, before the next one."""
        following = None if self._schedule is None else self._schedule.following(self.step)
        return step == following or (bool(self.missing) and step == self.ends)

    def take(self, header: dict[str, Any]) -> None:
        """An anchor is applied. A region that was taken along may not have been at the step of its outer round."""
        if (header["outer_round"], header["taken_after"]) != (self.number, self.step):
            assert self._schedule is not None
            there = replace(self._schedule, every=header["every"], changes=())
            self._set(header["outer_round"], header["taken_after"], there)
        self.missing.discard(header["fragment"])

    def enter(self, number: int, step: int, every: int | None) -> None:
        """The log is entered behind outer round `number`, which followed `step`; H is `every` there."""
        self.number, self.step, self.missing = number, step, set()
        if self._schedule is not None and every is not None:
            self._schedule = replace(self._schedule, every=every, changes=())

    def change(self, step: int, every: int | None) -> None:
        """From this step on H is `every` (rule A21)."""
        if self._schedule is not None and every is not None:
            self._schedule = replace(self._schedule, changes=(*self._schedule.changes, (step, every)))
