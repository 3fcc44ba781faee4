"""Parameters as flat float32: themselves, or the masters of which they are a cast (rule B7)."""

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["read_flat", "write_flat"]


def read_flat(parameter: Tensor, state: MutableMapping[Tensor, dict[str, Any]]) -> Tensor:
    """The float32 values (elements,), row-major: a view of a contiguous float32 parameter, a copy of any other float32
    one, or the master in its state, which is made when it is first needed.
    """
    values = parameter.detach()
    if values.dtype == torch.float32:
        return values.contiguous().view(-1)
    if "master" not in state[parameter]:
        state[parameter]["master"] = values.float().contiguous().view(-1)
    master: Tensor = state[parameter]["master"]
    return master


def write_flat(parameter: Tensor, flat: Tensor) -> None:
    """Writes what `read_flat` gave back into the parameter, unless it is the parameter's own memory."""
    values = parameter.detach()
    if values.dtype != torch.float32 or not values.is_contiguous():
        values.copy_(flat.view(values.shape))
