"""A site of a region without rounds: an optimizer of its own, and its steps from one outer round to the next."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import structlog
import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from algorithms import DeMo
from algorithms.flat import FlatParameters
from algorithms.gradients import all_finite
from algorithms.layout import ParameterLayout, TensorSpec, canonical_name
from algorithms.masters import read_flat
from algorithms.muon import MuonAndAdamW
from algorithms.schedule import learning_rate
from api.errors import IsthmusError
from api.specs import OptimizerSpec, RunSpec
from site_agent.replica import Replica

__all__ = ["Factory", "InnerParameters", "LocalSteps", "inner_optimizer"]

Group = Mapping[str, Any]
Factory = Callable[[list[dict[str, Any]]], Optimizer]
"""Makes an optimizer of parameter groups, whose `lr` the run's spec sets at every step."""

_DECAY_BY_THEMSELVES = ("demo", "adamw", "muon")

log = structlog.get_logger()


def inner_optimizer(spec: OptimizerSpec, groups: Sequence[Group], factory: Factory | None) -> Optimizer:
    """The optimizer of the kind that the spec names, over named parameters in groups with a `name`.

    Raises:
        IsthmusError: a factory is missing, or not asked for; this torch has no Muon; or parameters are not float32.
    """
    if (spec.kind == "custom") != (factory is not None):
        wanted = "pass inner= to site.optimizer()" if factory is None else "inner= needs optimizer.kind = custom"
        raise IsthmusError(f"the run's spec has optimizer.kind = {spec.kind}: {wanted}")
    if spec.kind == "demo":
        return DeMo(_decayed(spec, groups), lr=spec.lr, **spec.settings())
    low = [
        f"{name} ({value.dtype})" for group in groups for name, value in group["params"] if value.dtype != torch.float32
    ]
    if low:
        raise IsthmusError(
            f"optimizer.kind = {spec.kind} trains float32 parameters, but of this model {', '.join(low[:5])} are not: "
            "keep them in float32 and use torch.autocast, or use optimizer.kind = demo, which keeps float32 masters"
        )
    try:
        return _made(spec, _decayed(spec, groups), factory)
    except ImportError as error:
        raise IsthmusError(str(error)) from error


def _made(spec: OptimizerSpec, groups: list[dict[str, Any]], factory: Factory | None) -> Optimizer:
    if factory is not None:
        return factory(groups)
    if spec.kind == "adamw":
        return AdamW(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps)
    if spec.kind == "sgd":
        return SGD(groups, lr=spec.lr, momentum=spec.momentum, nesterov=spec.nesterov and spec.momentum > 0)
    return MuonAndAdamW(
        groups, lr=spec.lr, momentum=spec.momentum, nesterov=spec.nesterov, betas=spec.betas, eps=spec.eps
    )


def _decayed(spec: OptimizerSpec, groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Groups of their own, which say how they decay: not at all, where `LocalSteps` does it."""
    own = spec.weight_decay if spec.kind in _DECAY_BY_THEMSELVES else 0.0
    decays = (0.0 if group["name"] == "no_decay" else own for group in groups)
    return [
        {**group, "params": list(group["params"]), "lr": spec.lr, "weight_decay": decay}
        for group, decay in zip(groups, decays, strict=True)
    ]


class InnerParameters(FlatParameters):
    """The float32 parameters behind an optimizer of torch's, whose state is what may be forgotten."""

    def __init__(self, groups: Sequence[Group], optimizer: Optimizer, spec: OptimizerSpec) -> None:
        self.steps = 0
        self._optimizer = optimizer
        named = {canonical_name(name): value for group in groups for name, value in group["params"]}
        specs = [
            TensorSpec(canonical_name(name), tuple(value.shape), number)
            for number, group in enumerate(groups)
            for name, value in group["params"]
        ]
        self.layout = ParameterLayout(specs, spec.chunk, [group["name"] for group in groups], spec.transform)
        self._parameters = tuple(named[tensor.name] for tensor in self.layout.tensors)

    def _flat(self, index: int) -> Tensor:
        return read_flat(self._parameters[index], {})

    def reset_momentum(self) -> None:
        self._optimizer.state.clear()


class LocalSteps:
    """What a site with rounds has an `Exchange` for: steps of its own, at the rates of the run's spec or, from a change
    on, of the log.

    Attributes:
        ended: whether the run has ended at the coordinator.
        evaluates: whether this site runs the held-out evaluation.
        tokens: of this rank since the last copies.
        skipped: steps in which the gradients were not finite.
    """

    def __init__(self, spec: RunSpec) -> None:
        self.ended = False
        self.evaluates = False
        self.tokens = 0
        self.skipped = 0
        self.wait_s = 0.0
        self._spec = spec

    def attach(self, replica: Replica, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._replica = replica

    @torch.no_grad()
    def begin(self) -> None:
        """Before the optimizer's step: its rate and weight decay; gradients that are not finite are dropped (A7)."""
        spec, step = self._spec.optimizer, self._replica.step + 1
        peak = self._replica.lr or spec.lr
        lr = learning_rate(step, lr=peak, steps=self._spec.steps, warmup=spec.warmup, schedule=spec.schedule)
        groups = self._optimizer.param_groups
        moved = [value for group in groups for value in group["params"] if value.grad is not None]
        if spec.kind != "demo" and not all_finite(value.grad for value in moved if value.grad is not None):
            self.skipped += 1
            log.warning("a gradient is not finite: this step changes nothing", step=step)
            self._optimizer.zero_grad()
            moved = []
        for group in groups:
            group["lr"] = lr
        if spec.kind not in _DECAY_BY_THEMSELVES:
            for value in moved:
                if value.ndim >= 2:
                    value.mul_(1.0 - lr * spec.weight_decay)

    def end(self) -> None:
        self._replica.advance()
