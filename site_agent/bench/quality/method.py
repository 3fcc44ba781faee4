"""The one interface of all methods, and what they have in common."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn, optim

__all__ = ["Loss", "Method", "Sites", "set_rate"]

Loss = Callable[[nn.Module, Tensor], Tensor]

_GRADIENT_NORM = 1.0


class Method(Protocol):
    """A way of training one model at several sites."""

    @property
    def sent(self) -> int:
        """Bytes that one site has sent so far, as the method's docstring counts them; what it receives is not."""
        ...

    def step(self, batches: Sequence[Tensor], lr: float) -> None:
        """One inner step at all sites, with one batch for each. After the last one the model has the result."""
        ...


@dataclass(frozen=True)
class Sites:
    """What a method is given: the model to train, in place, its loss, and how many sites train it for how long."""

    model: nn.Module
    loss: Loss
    count: int
    steps: int

    def replicas(self) -> list[nn.Module]:
        """One model per site; the first is `model` itself."""
        return [self.model, *(copy.deepcopy(self.model) for _ in range(self.count - 1))]

    def backward(self, model: nn.Module, batch: Tensor) -> None:
        """Leaves the gradients of a batch in the model."""
        model.zero_grad()
        self.loss(model, batch).backward()  # type: ignore[no-untyped-call]

    @staticmethod
    def clip(model: nn.Module) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), _GRADIENT_NORM)


def set_rate(optimizers: Sequence[optim.Optimizer], lr: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
