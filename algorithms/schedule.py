"""What happens at an inner step: its learning rate, and which outer steps follow. Standard library only."""

import math
import struct
from dataclasses import dataclass
from typing import Literal

__all__ = ["FLOOR", "OuterSchedule", "Schedule", "learning_rate", "outer_due", "outer_step"]

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


def outer_step(number: int, every: int, steps: int) -> int:
    """The inner step that outer round 1, 2, ... follows; the last one there is for any number after it."""
    return min(number * every, steps)


@dataclass(frozen=True, kw_only=True)
class OuterSchedule:
    """Which fragments outer-step together, after which inner step, and when their anchors are applied.

    Every fragment is due once in `every` steps, with `stagger` each at a step of its own as far as there are enough;
    after the last step, all are. Source: docs/decisions/0005-outer.md, section 4.

    Raises ValueError if a number is out of range, or if an anchor would be applied after the next copy was taken.
    """

    every: int
    fragments: int
    steps: int
    stagger: bool = False
    delay: int = 0

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
        """The fewest steps between two outer rounds, but for the last one."""
        return max(self.every // self.fragments, 1) if self.stagger else self.every

    def due(self, step: int) -> tuple[int, ...]:
        """The fragments, ascending, of the outer round after inner step `step`; empty if none follows."""
        if not 1 <= step <= self.steps:
            return ()
        return tuple(f for f in range(self.fragments) if step == self.steps or step % self.every == self._offset(f))

    def number(self, step: int) -> int:
        """How many outer rounds follow the inner steps up to `step`: the number of the one after it, if there is one.

        They are numbered from 1 by their order.
        """
        step = min(step, self.steps)
        cycles, rest = divmod(step, self.every)
        offsets = {self._offset(fragment) for fragment in range(self.fragments)}
        whole = cycles * len(offsets) + sum(0 < offset <= rest for offset in offsets)
        return whole + (step == self.steps and rest not in offsets)

    def step_of(self, number: int) -> int:
        """The inner step that outer round 1, 2, ... follows; 0 for 0, the last step for any number too large."""
        offsets = sorted({self._offset(fragment) or self.every for fragment in range(self.fragments)})
        cycles, rest = divmod(max(number, 1) - 1, len(offsets))
        return 0 if number < 1 else min(cycles * self.every + offsets[rest], self.steps)

    def applied(self, step: int) -> int:
        """How many outer rounds' anchors have been applied before the inner step after `step`."""
        return self.number(step if step >= self.steps else max(step - self.delay, 0))

    def concerns(self, step: int) -> bool:
        """Whether copies are taken or anchors applied after inner step `step`."""
        return bool(self.due(step)) or (step > 0 and self.applied(step) > self.applied(step - 1))

    def applied_after(self, step: int) -> int:
        """The inner step after which the anchors of the outer round after `step` are applied.

        `delay` steps later, but never after the last one.
        """
        return min(step + self.delay, self.steps)

    def _offset(self, fragment: int) -> int:
        """The fragment is due after the steps that leave this remainder."""
        return (fragment + 1) * self.every // self.fragments % self.every if self.stagger else 0


def _float32(value: float) -> float:
    """Nearest float32, as the double it equals."""
    (rounded,) = struct.unpack("<f", struct.pack("<f", value))
    return float(rounded)
