"""DeMo as a torch optimizer: decoupled momentum with an `exchange` callable, or none.

Source: Peng et al., "DeMo: Decoupled Momentum Optimization", and the design, section 5. The work is done by pure
functions (`encode`, `subtract_sent`, `subtract_update`, `apply_update`); the class keeps the state between steps.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from algorithms.aggregate import aggregate
from algorithms.apply import apply_update
from algorithms.codec import parameters_digest
from algorithms.decode import known_answer
from algorithms.layout import ParameterLayout, TensorSpec, canonical_name, kept
from algorithms.momentum import Ownership, encode, subtract_sent, subtract_update
from algorithms.updates import AggregateUpdate, Codec, SparseUpdate

__all__ = ["DeMo", "Exchange", "StepEntry", "apply_update", "encode", "subtract_sent", "subtract_update"]

GRADIENT_LIMIT = 2.0**100
"""Gradients beyond this count as not finite: their transform could overflow float32."""

CHECK_EVERY = 1000
"""Entries between two known-answer checks of a device (rule B9)."""


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


Exchange = Callable[["DeMo", SparseUpdate | None], StepEntry]
"""Takes the optimizer and this rank's contribution, None to abstain, and returns the entry of the step."""


class DeMo(torch.optim.Optimizer):
    """DeMo with signum, bit-exact on every device.

    `params` are named parameters (`model.named_parameters()`), groups of them, or plain ones, which are then called
    `{group}.{index}`. The momentum of a parameter is allocated when it first has a gradient; without a gradient in a
    later step it counts as having gradient 0. `owned` is (rank, ranks): this rank keeps and sends that part of the
    chunks. Parameters that are not float32 have a float32 master, of which they are a cast (rule B7). Options other
    than `lr` and `weight_decay` belong to the object, not to its groups, and are not in `state_dict`.

    Without an `exchange` the optimizer makes its own entries, from its groups' `lr` and `weight_decay`; a step whose
    gradients are not finite is skipped and counted in `skipped_steps`.
    Raises ValueError on an option out of range, or on a parameter that is not real floating point.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        beta: float = 0.99,
        k: int = 32,
        chunk: int = 64,
        codec: Codec = "sign",
        alpha: float = 1.0,
        subtract: Literal["local", "aggregate"] = "local",
        weight_decay: float = 0.0,
        exchange: Exchange | None = None,
        owned: tuple[int, int] = (0, 1),
    ) -> None:
        if not (math.isfinite(lr) and lr >= 0 and math.isfinite(weight_decay) and weight_decay >= 0):
            raise ValueError(f"lr and weight_decay must not be negative, got {lr} and {weight_decay}")
        if not 0 <= beta < 1:
            raise ValueError(f"beta must be at least 0 and below 1, got {beta}")
        if not 0 <= alpha <= 1:
            raise ValueError(f"alpha must be 0 to 1, got {alpha}")
        if codec not in get_args(Codec) or subtract not in ("local", "aggregate"):
            raise ValueError(f"unknown codec {codec!r} or subtraction {subtract!r}")
        if exchange is None and owned[1] != 1:
            raise ValueError(f"rank {owned[0]} of {owned[1]} needs an exchange")
        kept(k, chunk * chunk, chunk)
        self.beta, self.k, self.chunk, self.codec, self.alpha, self.subtract = beta, k, chunk, codec, alpha, subtract
        self.owned = owned
        self.steps = 0
        """Entries applied."""
        self.skipped_steps = 0
        """Steps in which this rank's gradients were not finite."""
        self.applied_lr: tuple[float, ...] = ()
        """Per group, of the last entry applied; `group["lr"]` is never written (rule A8)."""
        self.float32_is_exact: dict[torch.device, bool] = {}
        """Result of the last known-answer check of each device; float64 is used where it failed."""
        self._exchange = exchange
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group and rebuilds the layout; momentum is kept.

        Raises ValueError if the momentum is sharded and not empty: its shards would move to other ranks.
        """
        if self.owned[1] > 1 and any("momentum" in state for state in self.state.values()):
            raise ValueError("groups must be added before the first step when the momentum is sharded")
        super().add_param_group(param_group)
        specs, parameters = [], {}
        for number, group in enumerate(self.param_groups):
            names = group.get("param_names") or [f"{number}.{index}" for index in range(len(group["params"]))]
            for name, parameter in zip(names, group["params"], strict=True):
                if not parameter.is_floating_point():
                    raise ValueError(f"parameter {name!r} is {parameter.dtype}, not real floating point")
                specs.append(TensorSpec(name, tuple(parameter.shape), number))
                parameters[canonical_name(name)] = parameter
        names = [str(group.get("name", number)) for number, group in enumerate(self.param_groups)]
        self.layout = ParameterLayout(specs, self.chunk, names)
        self._parameters: tuple[Tensor, ...] = tuple(parameters[tensor.name] for tensor in self.layout.tensors)
        self._ownership = Ownership(self.layout, self.layout.shard(*self.owned))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Contributes, obtains the entry and applies it. Returns what the closure, evaluated first, returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        sent = self._contribution()
        if sent is None:
            self.skipped_steps += 1
        entry = self._alone(sent) if self._exchange is None else self._exchange(self, sent)
        if self.subtract == "local" and entry.listed and sent is not None and entry.update is not None:
            subtract_sent(self._ownership, self._momentum(), sent, entry.update, self.alpha, self.steps + 1)
        self.apply(entry)
        return loss

    @torch.no_grad()
    def apply(self, entry: StepEntry) -> None:
        """Applies an entry to the parameters, whether or not this site contributed to it.

        Raises ValueError unless the entry has one learning rate and one decay per group.
        """
        if not len(entry.lr) == len(entry.decay) == len(self.param_groups):
            raise ValueError(f"{len(entry.lr)} rates, {len(entry.decay)} decays, {len(self.param_groups)} groups")
        if entry.update is not None:
            if self.steps % CHECK_EVERY == 0:
                self.float32_is_exact.clear()
            present = [index for index in range(len(self._parameters)) if index not in entry.update.absent]
            flat = {index: self._flat(index) for index in present}
            apply_update(entry.update, self.layout, flat, entry.lr, entry.decay, self._is_exact)
            for index in present:
                self._store(index, flat[index])
            if self.subtract == "aggregate":
                subtract_update(self._ownership, self._momentum(), entry.update, self.alpha, self.steps + 1)
        self.steps += 1
        self.applied_lr = entry.lr

    def masters(self) -> list[Tensor]:
        """Every parameter as flat float32, in layout order: itself if contiguous float32, its master, or a copy."""
        return [self._flat(index) for index in range(len(self._parameters))]

    def read_parameters(self, tensors: range) -> NDArray[np.float32]:
        """The float32 values of consecutive tensors of the layout, concatenated."""
        parts = [self._flat(index).cpu().numpy() for index in tensors]
        return np.concatenate([np.empty(0, np.float32), *parts])

    @torch.no_grad()
    def write_parameters(self, tensors: range, data: NDArray[np.float32]) -> None:
        """Sets consecutive tensors of the layout, masters and casts. Raises ValueError unless data has their size."""
        expected = self.layout.fragment_elements(tensors)
        if data.dtype != np.float32 or data.shape != (expected,):
            raise ValueError(f"tensors {tensors} have {expected} float32 elements, got {data.dtype} {data.shape}")
        start = 0
        for index in tensors:
            flat = self._flat(index)
            flat.copy_(torch.from_numpy(data[start : start + flat.numel()].copy()))
            self._store(index, flat)
            start += flat.numel()

    def parameters_digest(self) -> str:
        """SHA-256 (hex) of the float32 parameters in layout order (rule C3)."""
        return parameters_digest(flat.cpu().numpy() for flat in self.masters())

    def state_dict(self) -> dict[str, Any]:
        """Momentum, masters and groups as torch keeps them, and the counters under `demo`."""
        return {**super().state_dict(), "demo": {"steps": self.steps, "skipped_steps": self.skipped_steps}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what `state_dict` saved; momentum and masters stay float32 whatever the parameters are.

        Raises ValueError if number or names of the parameters or the size of a momentum or master differ.
        """
        saved_groups, state = state_dict["param_groups"], state_dict["state"]
        counts, saved_counts = (
            [len(group["params"]) for group in groups] for groups in (self.param_groups, saved_groups)
        )
        if counts != saved_counts:
            raise ValueError(f"saved groups have {saved_counts} parameters, ours {counts}")
        tensors: dict[int, dict[str, Tensor]] = {}
        for ours, saved in zip(self.param_groups, saved_groups, strict=True):
            names, saved_names = (list(map(canonical_name, group.get("param_names", ()))) for group in (ours, saved))
            if names and saved_names and names != saved_names:
                raise ValueError(f"saved parameters differ from ours: {sorted(set(names) ^ set(saved_names))[:5]}")
            for key, parameter in zip(saved["params"], ours["params"], strict=True):
                tensors[id(parameter)] = {
                    name: value.detach().to(parameter.device, torch.float32, copy=True)
                    for name, value in state.get(key, {}).items()
                }
        for index, parameter in enumerate(self._parameters):
            sizes = {"momentum": self._ownership.sizes[index], "master": parameter.numel()}
            for name, value in tensors[id(parameter)].items():
                if value.shape != (sizes.get(name),):
                    tensor = self.layout.tensors[index].name
                    raise ValueError(f"{name} of {tensor!r} has shape {tuple(value.shape)}, not ({sizes.get(name)},)")
        super().load_state_dict(state_dict)
        for parameter in self._parameters:
            if values := tensors[id(parameter)]:
                self.state[parameter] = values
        counters: Mapping[str, int] = state_dict.get("demo", {})
        self.steps = counters.get("steps", 0)
        self.skipped_steps = counters.get("skipped_steps", 0)

    def _contribution(self) -> SparseUpdate | None:
        """Takes the gradients into the momentum and picks from it; None if a gradient is not finite."""
        found_inf, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        gradients = {index: p.grad for index, p in enumerate(self._parameters) if p.grad is not None}
        for index, gradient in gradients.items():
            if gradient.is_sparse:
                raise ValueError(f"parameter {self.layout.tensors[index].name!r} has a sparse gradient")
        if (found_inf is not None and bool(found_inf)) or not _all_finite(gradients.values()):
            return None
        for index in gradients:
            state = self.state[self._parameters[index]]
            if "momentum" not in state:
                device = self._parameters[index].device
                state["momentum"] = torch.zeros(self._ownership.sizes[index], dtype=torch.float32, device=device)
        unscale = 1.0 if scale is None else 1.0 / float(scale)
        return encode(
            self._ownership,
            self._momentum(),
            gradients,
            beta=self.beta,
            k=self.k,
            codec=self.codec,
            unscale=unscale,
            step=self.steps + 1,
        )

    def entry(self, contributions: Sequence[SparseUpdate], listed: bool) -> StepEntry:
        """The entry of a round without a coordinator: the mean of the contributions, the rates of our own groups.

        It is empty if there is no contribution. `listed` says whether this rank's is among them.
        """
        rates = [float(group["lr"]) for group in self.param_groups]
        decays = [1 - lr * group["weight_decay"] for lr, group in zip(rates, self.param_groups, strict=True)]
        lr, decay = (tuple(float(np.float32(number)) for number in numbers) for numbers in (rates, decays))
        update = aggregate(contributions, self.layout, [0] * len(contributions)) if contributions else None
        return StepEntry(update, lr, decay, listed)

    def _alone(self, sent: SparseUpdate | None) -> StepEntry:
        return self.entry([] if sent is None else [sent], listed=sent is not None)

    def _momentum(self) -> dict[int, Tensor]:
        states = enumerate(self.state.get(parameter, {}) for parameter in self._parameters)
        return {index: state["momentum"] for index, state in states if "momentum" in state}

    def _flat(self, index: int) -> Tensor:
        """The flat float32 values of a tensor; its master is made when it is first needed."""
        parameter = self._parameters[index].detach()
        if parameter.dtype == torch.float32:
            return parameter.contiguous().view(-1)
        state = self.state[self._parameters[index]]
        if "master" not in state:
            state["master"] = parameter.float().contiguous().view(-1)
        master: Tensor = state["master"]
        return master

    def _store(self, index: int, flat: Tensor) -> None:
        """Writes flat values back into the parameter, unless they are its own memory."""
        parameter = self._parameters[index].detach()
        if parameter.dtype != torch.float32 or not parameter.is_contiguous():
            parameter.copy_(flat.view(parameter.shape))

    def _is_exact(self, device: torch.device) -> bool:
        if device not in self.float32_is_exact:
            self.float32_is_exact[device] = known_answer(device, self.layout.transformed)
        return self.float32_is_exact[device]


def _all_finite(gradients: Iterable[Tensor]) -> bool:
    """Whether all elements are finite and not absurdly large; one answer is fetched per device."""
    bounds: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        if gradient.numel():
            bounds.setdefault(gradient.device, []).extend(bound.float() for bound in gradient.aminmax())
    return all(bool((torch.stack(values).abs() <= GRADIENT_LIMIT).all()) for values in bounds.values())
