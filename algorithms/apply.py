"""Applying an update to flat float32 parameters: bit-equal on every device (rules B2, B8, B10)."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from algorithms.base_updates import BASE_UPDATES
from algorithms.decode import Inverse, Method
from algorithms.eager import eager
from algorithms.layout import ParameterLayout
from algorithms.settings import BaseUpdateName
from algorithms.tensor_update import ShapeUpdate, TensorUpdate
from algorithms.updates import AggregateUpdate

__all__ = ["apply_update"]


@eager
def apply_update(
    update: AggregateUpdate,
    layout: ParameterLayout,
    parameters: Mapping[int, Tensor],
    lr: Sequence[float],
    decay: Sequence[float],
    exact: Callable[[torch.device], bool],
    *,
    base_update: BaseUpdateName = "signum",
    beta2: float = 0.99,
    state: Mapping[int, dict[str, Tensor]] | None = None,
    step: int = 0,
) -> None:
    """Moves every tensor that is not absent, in place, by a base update: `X <- X * decay - lr * direction`.

    `parameters` maps tensor positions to contiguous float32 (elements,); `lr` and `decay` have one number per group,
    float32-representable. `exact(device)` says whether a device may use the float32 forms; the others use float64.
    `step` is that of the entry, on which the transform `random` depends.
    `state` maps tensor positions to dicts that are kept from step to step, which only `adam`, with `beta2`, needs.
    """
    updates = {shape: ShapeUpdate.of(part) for shape, part in update.shapes.items()}
    for index, tensor in enumerate(layout.tensors):
        if index in update.absent:
            continue
        flat = parameters[index]
        method: Method = "auto" if exact(flat.device) else "float64"
        BASE_UPDATES[base_update].apply(
            TensorUpdate(
                shape=tensor.shape,
                blocks=layout.tensor_blocks[index],
                updates=updates,
                parameters=flat,
                state={} if state is None else state[index],
                lr=lr[tensor.group],
                decay=decay[tensor.group],
                beta2=beta2,
                inverse=Inverse(layout.transform, step, flat.device, method),
            )
        )
