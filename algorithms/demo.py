"""DeMo as a torch optimizer: decoupled momentum with an `exchange` callable, or none.

Source: Peng et al., "DeMo: Decoupled Momentum Optimization", and the design, section 5. The work is done by pure
functions (`encode`, `subtract_sent`, `subtract_update`, `apply_update`); the class keeps the state between steps.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from algorithms.aggregate import aggregate, norm, outlier_halvings
from algorithms.apply import apply_update
from algorithms.decode import known_answer
from algorithms.flat import FlatParameters
from algorithms.gradients import all_finite, trainable_gradients
from algorithms.layout import ParameterLayout, TensorSpec, canonical_name
from algorithms.masters import read_flat, write_flat
from algorithms.momentum import Ownership, encode, subtract_sent, subtract_update
from algorithms.optimizer_state import check_groups, check_identity, restored
from algorithms.settings import Settings, SettingsDict
from algorithms.step_entry import Exchange, StepEntry
from algorithms.updates import AggregateUpdate, SparseUpdate

__all__ = ["DeMo", "Exchange", "StepEntry", "apply_update", "encode", "subtract_sent", "subtract_update"]

CHECK_EVERY = 1000
"""Entries between two known-answer checks of a device (rule B9)."""


@dataclass(frozen=True)
class _Step:
    """What this rank has sent, None if it abstained; and the entry, or what waits for it."""

    sent: SparseUpdate | None
    entry: StepEntry | Callable[[], StepEntry]


class DeMo(FlatParameters, torch.optim.Optimizer):
    """DeMo, bit-exact on every device for every base update but `muon`.

    `params` are named parameters (`model.named_parameters()`), groups of them, or plain ones, which are then called
    `{group}.{index}`. The groups have `lr` and `weight_decay`; `settings` are those of `Settings`, belong to the object
    and are read as `optimizer.settings`. `preset(name)` has some of them.

    The momentum of a parameter is allocated when it first has a gradient; without a gradient in a later step it counts
    as having gradient 0. A frozen parameter (`requires_grad` False) sends nothing; its momentum, if it has one, waits.
    `owned` is (rank, ranks): this rank keeps and sends that part of the chunks. Parameters that are not float32 have a
    float32 master, of which they are a cast (rule B7).

    Without an `exchange` the optimizer makes its own entries, from its groups' `lr` and `weight_decay`; a step whose
    gradients are not finite is skipped and counted in `skipped_steps`.
    Raises ValueError on a setting out of range, or on a parameter that is not real floating point.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        weight_decay: float = 0.0,
        *,
        exchange: Exchange | None = None,
        owned: tuple[int, int] = (0, 1),
        **settings: Unpack[SettingsDict],
    ) -> None:
        if exchange is None and owned[1] != 1:
            raise ValueError(f"rank {owned[0]} of {owned[1]} needs an exchange")
        self.settings = Settings(**settings)
        self.owned = owned
        self.steps = 0  # entries applied
        self.skipped_steps = 0
        """Steps in which this rank's gradients were not finite."""
        self.applied_lr: tuple[float, ...] = ()
        """Per group, of the last entry applied; `group["lr"]` is never written (rule A8)."""
        self.float32_is_exact: dict[torch.device, bool] = {}
        """Result of the last known-answer check of each device; float64 is used where it failed."""
        self._exchange = exchange
        self._on_its_way: _Step | None = None
        self._warned = False
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group and rebuilds the layout; momentum is kept.

        Raises ValueError if the momentum is sharded and not empty: its shards would move to other ranks. A group that
        is refused is not added.
        """
        if self.owned[1] > 1 and any("momentum" in state for state in self.state.values()):
            raise ValueError("groups must be added before the first step when the momentum is sharded")
        super().add_param_group(param_group)
        try:
            self._build()
        except ValueError:
            del self.param_groups[-1]
            raise

    def _build(self) -> None:
        """The layout of all groups. A tensor that is there twice counts once, by its first name."""
        parameters: dict[Tensor, TensorSpec] = {}
        for number, group in enumerate(self.param_groups):
            for option in ("lr", "weight_decay"):
                if not (math.isfinite(group[option]) and group[option] >= 0):
                    raise ValueError(f"{option} must be finite and not negative, got {group[option]}")
            names = group.get("param_names") or [f"{number}.{index}" for index in range(len(group["params"]))]
            for name, parameter in zip(names, group["params"], strict=True):
                if not parameter.is_floating_point():
                    raise ValueError(f"parameter {name!r} is {parameter.dtype}, not real floating point")
                parameters.setdefault(parameter, TensorSpec(canonical_name(name), tuple(parameter.shape), number))
        names = [str(group.get("name", number)) for number, group in enumerate(self.param_groups)]
        self.layout = ParameterLayout(parameters.values(), self.settings.chunk, names, self.settings.transform)
        by_name = {spec.name: parameter for parameter, spec in parameters.items()}
        self._parameters: tuple[Tensor, ...] = tuple(by_name[tensor.name] for tensor in self.layout.tensors)
        self._ownership = Ownership(self.layout, self.layout.shard(*self.owned))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Contributes, obtains the entry and applies it. Returns what the closure, evaluated first, returned.

        If the exchange does not wait for the entry, the next step does, before it looks into its gradients.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.settle()
        sent = self._contribution()
        if sent is None:
            self.skipped_steps += 1
        entry = self._alone(sent) if self._exchange is None else self._exchange(self, sent)
        self._on_its_way = _Step(sent, entry)
        if isinstance(entry, StepEntry):
            self.settle()
        return loss

    @property
    def settled(self) -> bool:
        """Whether the entry of the last step has been applied."""
        return self._on_its_way is None

    @torch.no_grad()
    def settle(self) -> None:
        """Waits for the entry of the last step, if it is still on its way, and applies it."""
        if self._on_its_way is None:
            return
        sent, entry = self._on_its_way.sent, self._on_its_way.entry
        entry = entry if isinstance(entry, StepEntry) else entry()
        self._on_its_way = None
        self.take(sent, entry)

    @torch.no_grad()
    def take(self, sent: SparseUpdate | None, entry: StepEntry) -> None:
        """Applies the entry of a step to which this rank has sent that, or has abstained; what is listed leaves M."""
        if self.settings.subtract == "local" and entry.listed and sent is not None and entry.update is not None:
            subtract_sent(self._ownership, self._momentum(), sent, entry.update, self.settings.alpha, self.steps + 1)
        self.apply(entry)

    @torch.no_grad()
    def apply(self, entry: StepEntry) -> None:
        """Applies an entry to the parameters, whether or not this site contributed to it.

        Raises ValueError unless the entry has one learning rate and one decay per group.
        """
        if not len(entry.lr) == len(entry.decay) == len(self.param_groups):
            raise ValueError(f"{len(entry.lr)} rates, {len(entry.decay)} decays, {len(self.param_groups)} groups")
        if entry.update is not None:
            self._apply_update(entry, entry.update)
        self.steps += 1
        self.applied_lr = entry.lr

    def _apply_update(self, entry: StepEntry, update: AggregateUpdate) -> None:
        if self.steps % CHECK_EVERY == 0:
            self.float32_is_exact.clear()
        settings, step = self.settings, self.steps + 1
        present = [index for index in range(len(self._parameters)) if index not in update.absent]
        flat = {index: self._flat(index) for index in present}
        apply_update(
            update,
            self.layout,
            flat,
            entry.lr,
            entry.decay,
            self._is_exact,
            base_update=settings.base_update,
            beta2=settings.beta2,
            state={index: self.state[self._parameters[index]] for index in present},
            step=step,
        )
        for index in present:
            write_flat(self._parameters[index], flat[index])
        if settings.subtract == "aggregate":
            subtract_update(self._ownership, self._momentum(present), update, settings.alpha, step)

    def reset_momentum(self) -> None:
        """Forgets all momentum, as if no parameter had had a gradient."""
        for state in self.state.values():
            state.pop("momentum", None)

    def entry(
        self, contributions: Sequence[SparseUpdate], listed: bool, tokens: Sequence[int] | None = None
    ) -> StepEntry:
        """The entry of a round without a coordinator: by our own settings and the rates of our own groups.

        `tokens` has one number per contribution, for the average `tokens`. `listed` says whether this rank's
        contribution is among them. The entry is empty if there is no contribution.
        """
        settings, count = self.settings, len(contributions)
        if settings.subtract == "aggregate" and settings.alpha * count > 1 and not self._warned:
            self._warned = True
            warnings.warn(
                f"alpha = {settings.alpha} with subtract='aggregate' and {count} sites: what one site sent leaves the "
                f"momentum of all of them; use alpha at most 1/{count}, or subtract='local'",
                stacklevel=2,
            )
        rates = [float(group["lr"]) for group in self.param_groups]
        decays = [1 - lr * group["weight_decay"] for lr, group in zip(rates, self.param_groups, strict=True)]
        lr, decay = (tuple(float(np.float32(number)) for number in numbers) for numbers in (rates, decays))
        halve = settings.outliers == "halve" and count > 1
        halvings = outlier_halvings(list(map(norm, contributions))) if halve else [0] * count
        update = None
        if contributions:
            update = aggregate(
                contributions,
                self.layout,
                halvings,
                average=settings.average,
                tokens=tokens,
                largest=settings.largest,
            )
        return StepEntry(update, lr, decay, listed)

    def momentum(self) -> dict[str, Tensor]:
        """This rank's part of the momentum, by canonical name: of the tensors that have one, flat, float32."""
        states = (
            (tensor, self.state.get(p, {})) for tensor, p in zip(self.layout.tensors, self._parameters, strict=True)
        )
        return {tensor.name: state["momentum"] for tensor, state in states if "momentum" in state}

    def set_momentum(self, momentum: Mapping[str, Tensor]) -> None:
        """Replaces all of it by what `momentum()` gave.

        Raises ValueError, and changes nothing, if a name or a size is not ours.
        """
        sizes = {tensor.name: size for tensor, size in zip(self.layout.tensors, self._ownership.sizes, strict=True)}
        wrong = [name for name, values in momentum.items() if tuple(values.shape) != (sizes.get(name),)]
        if wrong:
            raise ValueError(f"the momentum is of another model or another number of ranks: {', '.join(wrong[:5])}")
        self.reset_momentum()
        for tensor, parameter in zip(self.layout.tensors, self._parameters, strict=True):
            if tensor.name in momentum:
                values = momentum[tensor.name].to(parameter.device, torch.float32, copy=True)
                self.state[parameter]["momentum"] = values

    def state_dict(self) -> dict[str, Any]:
        """State and groups as torch keeps them; under `demo` the counters, and what gives the state its meaning.

        Waits for an entry that is on its way.
        """
        self.settle()
        counters = {"steps": self.steps, "skipped_steps": self.skipped_steps}
        return {**super().state_dict(), "demo": {**self._identity(), **counters}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what `state_dict` saved; all state keeps its own dtype whatever the parameters are.

        Raises ValueError, and changes nothing, if the state is not that of a DeMo with this layout and base update.
        """
        check_groups(state_dict, self.param_groups)
        check_identity(state_dict, self._identity())
        state = restored(state_dict, self.param_groups, dict(zip(self._parameters, self._ownership.sizes, strict=True)))
        super().load_state_dict(state_dict)
        self.state.update(state)
        self.steps = state_dict["demo"]["steps"]
        self.skipped_steps = state_dict["demo"]["skipped_steps"]

    def __getstate__(self) -> dict[str, Any]:
        """What a copy takes along: as ever with torch's optimizers, neither hooks nor what a scheduler has attached."""
        mine = ("settings", "owned", "steps", "skipped_steps", "applied_lr", "float32_is_exact", "layout")
        private = ("_exchange", "_on_its_way", "_warned", "_parameters", "_ownership")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in (*mine, *private)}}

    def _identity(self) -> dict[str, str]:
        return {"layout": self.layout.digest, "base_update": self.settings.base_update}

    def _contribution(self) -> SparseUpdate | None:
        """Takes the gradients into the momentum and picks from it; None if a gradient is not finite."""
        found_inf, scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        gradients = trainable_gradients(self.layout, self._parameters)
        if (found_inf is not None and bool(found_inf)) or not all_finite(gradients.values()):
            return None
        return encode(
            self._ownership,
            self._momentum(gradients),
            gradients,
            beta=self.settings.beta,
            k=self.settings.k,
            codec=self.settings.codec,
            unscale=1.0 if scale is None else 1.0 / float(scale),
            step=self.steps + 1,
        )

    def _alone(self, sent: SparseUpdate | None) -> StepEntry:
        return self.entry([] if sent is None else [sent], listed=sent is not None)

    def _momentum(self, also: Iterable[int] = ()) -> dict[int, Tensor]:
        """The momentum of each trainable tensor that has one, zeros for those in `also` that have none so far."""
        for index in also:
            parameter = self._parameters[index]
            if parameter.requires_grad and "momentum" not in self.state[parameter]:
                zeros = torch.zeros(self._ownership.sizes[index], dtype=torch.float32, device=parameter.device)
                self.state[parameter]["momentum"] = zeros
        states = ((index, self.state.get(p, {})) for index, p in enumerate(self._parameters) if p.requires_grad)
        return {index: state["momentum"] for index, state in states if "momentum" in state}

    def _flat(self, index: int) -> Tensor:
        return read_flat(self._parameters[index], self.state)

    def _is_exact(self, device: torch.device) -> bool:
        if device not in self.float32_is_exact:
            self.float32_is_exact[device] = known_answer(device, self.layout.transformed, self.layout.transform)
        return self.float32_is_exact[device]
