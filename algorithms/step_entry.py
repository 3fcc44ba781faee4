"""What passes between the optimizer and whatever exchanges its contributions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from algorithms.updates import AggregateUpdate, SparseUpdate

if TYPE_CHECKING:
    from algorithms.demo import DeMo

__all__ = ["Exchange", "StepEntry"]


@dataclass(frozen=True)
class StepEntry:
    """What the log says about one inner step."""

    update: AggregateUpdate | None
    """None: an empty entry, which changes nothing, not even by weight decay."""
    lr: tuple[float, ...]
    """Per group, float32-representable."""
    decay: tuple[float, ...]
    """`1 - lr * weight_decay` per group, float32-representable."""
    listed: bool
    """Whether the entry lists this site's contribution."""


Exchange = Callable[["DeMo", SparseUpdate | None], StepEntry | Callable[[], StepEntry]]
"""Takes the optimizer and this rank's contribution, None to abstain, and returns the entry of the step; or what waits
for it, and then the step is still on its way when `step` returns (rule A9)."""
