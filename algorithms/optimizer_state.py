"""Reading what `DeMo.state_dict()` saved: checked before anything is changed, every tensor in its own dtype."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from algorithms.layout import canonical_name

__all__ = ["DTYPES", "check_groups", "check_identity", "restored"]

Groups = Sequence[Mapping[str, Any]]

DTYPES = {
    "momentum": torch.float32,  # of the owned chunks
    "master": torch.float32,  # of a parameter that is not float32
    "second_moment": torch.float32,  # of the update, with adam
    "unseen": torch.float64,  # 0-d, on the CPU: beta2 to the power of the entries in which the tensor was present
}
"""What the state of one parameter may hold; flat unless noted."""


def check_groups(saved: Mapping[str, Any], groups: Groups) -> None:
    """Raises ValueError if the groups differ in number, in size or in the names of their parameters."""
    counts, saved_counts = ([len(group["params"]) for group in each] for each in (groups, saved["param_groups"]))
    if counts != saved_counts:
        raise ValueError(f"saved groups have {saved_counts} parameters, ours {counts}")
    for ours, theirs in zip(groups, saved["param_groups"], strict=True):
        names, saved_names = (list(map(canonical_name, group.get("param_names", ()))) for group in (ours, theirs))
        if names and saved_names and names != saved_names:
            raise ValueError(f"saved parameters differ from ours: {sorted(set(names) ^ set(saved_names))[:5]}")


def check_identity(saved: Mapping[str, Any], identity: Mapping[str, str]) -> None:
    """Raises ValueError unless the saved state means what ours does."""
    theirs = saved.get("demo")
    if theirs is None:
        raise ValueError("the saved state is not of a DeMo optimizer: it has no 'demo'")
    for name, value in identity.items():
        if theirs[name] != value:
            hint = " (names, shapes, groups, chunk and transform)" if name == "layout" else ""
            raise ValueError(f"the saved state has {name} {theirs[name]!r}{hint}, ours is {value!r}")


def restored(saved: Mapping[str, Any], groups: Groups, owned: Mapping[Tensor, int]) -> dict[Tensor, dict[str, Tensor]]:
    """The state of each parameter, copied, on its device. `owned` says how many elements its momentum has.

    Raises ValueError on unknown state or a wrong size.
    """
    state: dict[Tensor, dict[str, Tensor]] = {}
    for ours, theirs in zip(groups, saved["param_groups"], strict=True):
        names = ours.get("param_names", range(len(ours["params"])))
        for name, key, parameter in zip(names, theirs["params"], ours["params"], strict=True):
            for field, value in saved["state"].get(key, {}).items():
                if field not in DTYPES:
                    raise ValueError(f"parameter {name!r} has unknown state {field!r}")
                size = () if field == "unseen" else (owned[parameter] if field == "momentum" else parameter.numel(),)
                if value.shape != size:
                    raise ValueError(f"{field} of {name!r} has shape {tuple(value.shape)}, not {size}")
                device = parameter.device if value.ndim else "cpu"
                copy = value.detach().to(device, DTYPES[field], copy=True)
                state.setdefault(parameter, {})[field] = copy
    return state
