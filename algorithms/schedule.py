"""What happens at an inner step: its learning rate, and which outer steps follow. Standard library only."""

import math
import struct
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

__all__ = ["FLOOR", "OuterSchedule", "Schedule", "learning_rate", "outer_due"]

Schedule = Literal["constant", "cosine", "linear"]

FLOOR = 0.1
"""Decaying schedules end at this fraction of the peak."""


def learning_rate(step: int, *, lr: float, steps: int, warmup: int, schedule: Schedule) -> float:
    """The learning rate of step 1..steps, rounded to a float32-representable number (rule A8).

    Linear warm-up reaches `lr` at step `warmup`; then the rate is constant, or falls to 0.1 * lr at step `steps` and
    stays there. Raises ValueError on a step below 1 or an unknown schedule.
    """
    if step < 1:
        raise ValueError(f"steps count from 1, got {step}")
    if step < warmup:
        return _float32(lr * step / warmup)
    progress = min((step - warmup) / max(steps - warmup, 1), 1.0)
    if schedule == "constant":
        factor = 1.0
    elif schedule == "cosine":
        factor = FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * progress)) / 2
    elif schedule == "linear":
        factor = 1 - (1 - FLOOR) * progress
    else:
        raise ValueError(f"schedule must be constant, cosine or linear, got {schedule!r}")
    return _float32(lr * factor)


def outer_due(step: int, every: int | None, steps: int) -> bool:
    """Whether an outer step follows inner step `step`: every `every` steps, and after the last one (rule A19)."""
    return every is not None and (step % every == 0 or step == steps)


@dataclass(frozen=True, kw_only=True)
class OuterSchedule:
    """Which fragments outer-step together, after which inner step, and when their anchors are applied.

    Every fragment is due once in `every` steps, with `stagger` each at a step of its own as far as there are enough;
    after the last step, all are. No outer round begins while the anchors of another are on their way, `delay` steps: a
    turn that comes then, after a change, is left out. Source: docs/decisions/0005-outer.md, section 4.

    Args:
        changes: of `every`, as (the first step with it, the new number), in the order of these steps.

    Raises ValueError if a number is out of range, or if an anchor would be applied after the next copy was taken.
    """

    every: int
    fragments: int
    steps: int
    stagger: bool = False
    delay: int = 0
    changes: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        for name in ("every", "fragments", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.delay < self.distance:
            raise ValueError(
                f"delay must be at least 0 and below {self.distance}, the fewest steps between two outer rounds, got "
                f"{self.delay}"
            )

    @property
    def distance(self) -> int:
        """The fewest steps between two outer rounds, but for changes and the last one."""
        return max(self.every // self.fragments, 1) if self.stagger else self.every

    def every_at(self, step: int) -> int:
        return next((every for since, every in reversed(self.changes) if since <= step), self.every)

    def due(self, step: int) -> tuple[int, ...]:
        """The fragments, ascending, whose turn is after inner step `step`; empty if there are none."""
        if not 1 <= step <= self.steps:
            return ()
        every = self.every_at(step)
        turn = step % every
        return tuple(f for f in range(self.fragments) if step == self.steps or turn == self._offset(f, every))

    def following(self, step: int) -> int | None:
        """The inner step that an outer round follows, if the one before followed `step` (0: there was none before).

        None if that was the last.
        """
        if step >= self.steps:
            return None
        first = step + self.delay + 1
        for (since, every), (until, _) in pairwise(((1, self.every), *self.changes, (self.steps, 0))):
            turn = self._turn(max(first, since), every)
            if turn < until:
                return turn
        return self.steps

    def has_turn(self, step: int) -> bool:
        """Whether some fragment has its turn after this step, whatever is on its way."""
        return self._turn(step, self.every_at(step)) == step

    def turn_before(self, step: int) -> int:
        """The last step before this one after which there is a turn, by the H in force at this one; 0 if none is."""
        every = self.every_at(step)
        rest = (step - 1) % every
        turns = -(-(rest + 1) * self.fragments // every) - 1 if self.stagger else 0
        return step - 1 - rest + turns * every // self.fragments

    def turn_after(self, step: int) -> int:
        """The first one after this one, by the H in force at this one."""
        return self._turn(step + 1, self.every_at(step))

    def _turn(self, step: int, every: int) -> int:
        """The first step from this one on after which there is a turn."""
        rest = step % every
        if rest == 0 or not self.stagger:
            return step + -step % every
        turns = -(-rest * self.fragments // every)
        return step - rest + turns * every // self.fragments

    def applied_after(self, step: int) -> int:
        """The inner step after which the anchors of the outer round after `step` are applied.

        `delay` steps later, but never after the last one.
        """
        return min(step + self.delay, self.steps)

    def _offset(self, fragment: int, every: int) -> int:
        """The fragment is due after the steps that leave this remainder."""
        return (fragment + 1) * every // self.fragments % every if self.stagger else 0


def _float32(value: float) -> float:
    """Nearest float32, as the double it equals."""
    (rounded,) = struct.unpack("<f", struct.pack("<f", value))
    return float(rounded)
