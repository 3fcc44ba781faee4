"""Applying an update to flat float32 parameters: bit-equal on every device (rules B2, B8, B10)."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from algorithms.base_updates import signum
from algorithms.decode import SINGLE_PASS_L1, Method, signs
from algorithms.grid import Block
from algorithms.layout import ParameterLayout, is_dense
from algorithms.momentum import tile_limit, tile_view
from algorithms.updates import AggregateUpdate, UpdateCoefficients

__all__ = ["apply_update"]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def apply_update(
    update: AggregateUpdate,
    layout: ParameterLayout,
    parameters: Mapping[int, Tensor],
    lr: Sequence[float],
    decay: Sequence[float],
    exact: Callable[[torch.device], bool],
) -> None:
    """`X <- X * decay - lr * sign(inverse(update))` in place for every tensor that is not absent.

    Dense chunks are their own inverse.

    `parameters` maps tensor positions to contiguous float32 (elements,); `lr` and `decay` have one number per group,
    float32-representable. `exact(device)` says whether a device may use the float32 forms; the others use float64.
    """
    for shape, part in update.shapes.items():
        ends = np.concatenate([[0], np.cumsum(part.counts)])
        sums = np.concatenate([[0], np.cumsum(np.abs(part.values.astype(np.int64)))])
        norms = np.diff(sums[ends])
        for block in layout.shapes[shape]:
            if block.tensor not in update.absent:
                group = layout.tensors[block.tensor].group
                flat = parameters[block.tensor]
                _apply_block(block, part, ends, norms, flat, lr[group], decay[group], exact(flat.device))


def _apply_block(
    block: Block,
    part: UpdateCoefficients,
    ends: NDArray[np.int64],
    norms: NDArray[np.int64],
    flat: Tensor,
    lr: float,
    decay: float,
    exact: bool,
) -> None:
    """Updates one block. `ends` (chunks + 1,) delimits the coefficients of each chunk, `norms` (chunks,) is its L1."""
    first = int(np.searchsorted(part.chunks, block.chunks[0]))
    for tile in block.tiles(0, len(block), tile_limit(flat.device)):
        rows = slice(first + tile.start, first + tile.stop)
        mine = slice(ends[rows.start], ends[rows.stop])
        places = np.repeat(np.arange(tile.stop - tile.start) * block.elements, part.counts[rows]) + part.indices[mine]
        dense = torch.zeros((tile.stop - tile.start) * block.elements, dtype=torch.float32, device=flat.device)
        dense[torch.from_numpy(places).to(flat.device)] = torch.from_numpy(part.values[mine].astype(np.float32)).to(
            flat.device
        )
        if is_dense(block.elements):  # not transformed
            directions = torch.sign(dense)
        else:
            method: Method = "float64"
            if exact:
                method = "single" if norms[rows].max() <= SINGLE_PASS_L1 else "split"
            directions = signs(dense.view(-1, *block.shape), method)
        signum(tile_view(flat, tile), directions.view(tile.size), lr, decay)
