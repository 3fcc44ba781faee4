"""What happens at an inner step: its learning rate, and whether an outer step follows. Standard library only."""

import math
import struct
from typing import Literal

__all__ = ["FLOOR", "Schedule", "learning_rate", "outer_due", "outer_number", "outer_step"]

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


def outer_number(step: int, every: int) -> int:
    """The outer round that follows inner step `step`, or the next one if none does."""
    return -(-step // every)


def _float32(value: float) -> float:
    """Nearest float32, as the double it equals."""
    (rounded,) = struct.unpack("<f", struct.pack("<f", value))
    return float(rounded)
