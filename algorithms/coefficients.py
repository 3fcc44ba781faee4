"""The values that a sparse update stands for, in exact integers and without torch: the same bits wherever it is read.

The integer inverse of at most 128 x 128 coefficients of magnitude up to 127 is below 2^35, so that float64 holds every
sum exactly (`decode.py`); one product with `scale * unit` and one rounding to float32 follow.
"""

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from algorithms.grid import Block
from algorithms.layout import ParameterLayout, is_dense
from algorithms.transforms import basis
from algorithms.updates import Coefficients, Shape, SparseUpdate

__all__ = ["fragment_layout", "write_values"]

TILE_CHUNKS = 128
"""Chunks worked on at a time: 4 MiB of coefficients in float64."""


def fragment_layout(layout: ParameterLayout, tensors: range) -> ParameterLayout:
    """The tensors of a fragment as a layout of their own, whose chunks are transformed by DCT."""
    return ParameterLayout((layout.tensors[index] for index in tensors), layout.chunk, layout.groups, "dct")


def write_values(update: SparseUpdate, layout: ParameterLayout, flat: NDArray[np.float32]) -> None:
    """Sets flat parameters (parameter_count,), which may be mapped from a file, to what an update with values of at
    most 8 bits says of them; those of absent tensors to 0. The transform must not depend on the step.

    Raises ValueError unless `flat` has that size.
    """
    if flat.shape != (layout.parameter_count,):
        raise ValueError(f"the layout has {layout.parameter_count} elements, got {flat.shape}")
    for index in update.absent:
        flat[layout.offsets[index] : layout.offsets[index] + layout.tensors[index].elements] = 0
    for shape, blocks in layout.shapes.items():
        if shape in update.shapes:
            sent = update.shapes[shape]
            for block in blocks:
                if block.tensor not in update.absent:
                    _write_block(sent, block, layout, flat[layout.offsets[block.tensor] :])


def _write_block(sent: Coefficients, block: Block, layout: ParameterLayout, flat: NDArray[np.float32]) -> None:
    """`flat` begins with the tensor of the block."""
    first = int(np.searchsorted(sent.chunks, block.chunks[0]))
    for tile in block.tiles(0, len(block), TILE_CHUNKS):
        rows = slice(first + tile.start, first + tile.stop)
        strides = [flat.itemsize * step for step in tile.strides]
        view = as_strided(flat[tile.offset :], tile.size, strides)
        part = Coefficients(sent.chunks[rows], sent.indices[rows], sent.values[rows], sent.scales[rows])
        view[...] = _chunk_values(part, block.shape, layout).reshape(tile.size)


def _chunk_values(part: Coefficients, shape: Shape, layout: ParameterLayout) -> NDArray[np.float32]:
    """(m, rows, cols)."""
    count = len(part.chunks)
    flat = np.zeros((count, shape[0] * shape[1]))
    np.put_along_axis(flat, part.indices.astype(np.intp), part.values, axis=1)
    chunks = flat.reshape(count, *shape)
    factors = part.scales.astype(np.float64)
    if not is_dense(shape[0] * shape[1]):
        left, right = (basis(layout.transform, length) for length in shape)
        chunks = left.integers.T.astype(np.float64) @ chunks @ right.integers.astype(np.float64)
        factors *= float(np.float32(1 / (left.scale * right.scale)))
    return (chunks * factors[:, None, None]).astype(np.float32)
