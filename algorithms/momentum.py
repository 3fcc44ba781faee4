"""The momentum of the chunks that a rank owns: update it, pick from it, subtract from it. All in the transform domain.

Dense chunks, of which every coefficient is sent, are not transformed: the transform serves only to find few large
coefficients, and one sign for each of many unequal ones would bury the large (measured: docs/log.md).

Momentum is one flat float32 tensor per parameter: the coefficients of its owned chunks, block after block. A parameter
that never had a gradient has none. Source: the design, section 5, steps 1-4.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from algorithms.codec import quantise
from algorithms.grid import Block, Tile
from algorithms.layout import ParameterLayout, is_dense, kept
from algorithms.sparsify import forward_dct, top_k
from algorithms.updates import AggregateUpdate, Codec, Coefficients, Shape, SparseUpdate, UpdateCoefficients

__all__ = ["Ownership", "encode", "subtract_sent", "subtract_update", "tile_limit", "tile_view"]


def tile_limit(device: torch.device) -> int:
    """Chunks worked on at a time: on a CPU so few that they stay in cache."""
    return 128 if device.type == "cpu" else 4096


def tile_view(flat: Tensor, tile: Tile) -> Tensor:
    """The chunks of a tile as a view (batch, grid rows, grid cols, rows, cols) of a contiguous flat tensor."""
    return flat.as_strided(tile.size, tile.strides, flat.storage_offset() + tile.offset)


class OwnedBlock(NamedTuple):
    """The chunks at positions `start` to `stop` of a block, which lie at `offset` in the momentum of its tensor."""

    block: Block
    start: int
    stop: int
    offset: int

    def rows(self, momentum: Mapping[int, Tensor]) -> Tensor:
        """The momentum of these chunks, a view (stop - start, elements)."""
        elements = self.block.elements
        size = (self.stop - self.start) * elements
        return momentum[self.block.tensor].narrow(0, self.offset, size).view(-1, elements)


@dataclass(frozen=True)
class Ownership:
    """Which part of the momentum a rank keeps: a contiguous range of chunk numbers."""

    layout: ParameterLayout
    chunks: range

    @cached_property
    def blocks(self) -> tuple[OwnedBlock, ...]:
        """In layout order; blocks of which nothing is owned are left out."""
        owned = []
        sizes = [0] * len(self.layout.tensors)
        for block in self.layout.blocks:
            start, stop = block.within(self.chunks)
            if start < stop:
                owned.append(OwnedBlock(block, start, stop, sizes[block.tensor]))
                sizes[block.tensor] += (stop - start) * block.elements
        return tuple(owned)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements of the momentum of each tensor."""
        sizes = [0] * len(self.layout.tensors)
        for owned in self.blocks:
            sizes[owned.block.tensor] += (owned.stop - owned.start) * owned.block.elements
        return tuple(sizes)

    def of_shape(self, shape: Shape, momentum: Mapping[int, Tensor]) -> list[OwnedBlock]:
        """The owned blocks of a chunk shape whose tensors have a momentum."""
        return [owned for owned in self.blocks if owned.block.shape == shape and owned.block.tensor in momentum]


def encode(
    ownership: Ownership,
    momentum: Mapping[int, Tensor],
    gradients: Mapping[int, Tensor],
    *,
    beta: float,
    k: int,
    codec: Codec,
    unscale: float = 1.0,
) -> SparseUpdate:
    """`M <- beta*M + (1-beta)*T(G)` in place, then the k largest coefficients of each owned chunk, quantised.

    Both mappings are by tensor position; gradients have the shapes of their tensors and are finite, and are multiplied
    by `unscale` on the way into M. A tensor with a momentum but without a gradient counts as having gradient 0.
    Raises ValueError if k is out of range.
    """
    layout = ownership.layout
    flat = {tensor: gradient.contiguous().view(-1) for tensor, gradient in gradients.items()}
    shapes = {}
    for shape in layout.shapes:
        blocks = ownership.of_shape(shape, momentum)
        if not blocks:
            continue
        elements = shape[0] * shape[1]
        count = kept(k, elements, layout.chunk)
        picked = [_pick(owned, momentum, flat.get(owned.block.tensor), beta, count, unscale) for owned in blocks]
        values = np.concatenate([values for values, _ in picked])
        quantised, scales = quantise(values, codec)
        shapes[shape] = Coefficients(
            chunks=np.concatenate([owned.block.chunks[owned.start : owned.stop] for owned in blocks]),
            indices=np.concatenate([indices for _, indices in picked]),
            values=quantised,
            scales=scales,
        )
    absent = frozenset(range(len(layout.tensors))) - momentum.keys()
    return SparseUpdate(shapes, absent, codec)


def _pick(
    owned: OwnedBlock, momentum: Mapping[int, Tensor], gradient: Tensor | None, beta: float, count: int, unscale: float
) -> tuple[NDArray[np.float32], NDArray[np.uint16]]:
    """Values and indices (chunks, count) of one block, tile by tile."""
    rows = owned.rows(momentum)
    block = owned.block
    values, indices = [], []
    for tile in block.tiles(owned.start, owned.stop, tile_limit(rows.device)):
        part = rows[tile.start - owned.start : tile.stop - owned.start]
        if gradient is None:
            part.mul_(beta)
        else:
            coefficients = tile_view(gradient, tile).reshape(-1, *block.shape).float()
            dense = is_dense(block.elements)
            coefficients = coefficients.reshape(len(coefficients), -1) if dense else forward_dct(coefficients)
            if unscale != 1:
                coefficients = coefficients * unscale
            part.lerp_(coefficients, 1 - beta)
        if not is_dense(block.elements):
            places = top_k(part, count)
            indices.append(places.to(torch.int16))
            part = part.gather(1, places)
        values.append(part)
    found = torch.cat(values).cpu().numpy()
    if is_dense(block.elements):
        return found, np.broadcast_to(np.arange(count, dtype=np.uint16), found.shape)
    return found, torch.cat(indices).cpu().numpy().view(np.uint16)


def subtract_sent(
    ownership: Ownership, momentum: Mapping[int, Tensor], sent: SparseUpdate, update: AggregateUpdate, alpha: float
) -> None:
    """`M <- M - alpha * (value as sent)` in place, for those coefficients that are not zero in the update (rule B4)."""
    for shape, part in sent.shapes.items():
        if shape not in update.shapes:
            continue
        elements = shape[0] * shape[1]
        used = update.shapes[shape]
        nonzero = used.values != 0
        keys = np.repeat(part.chunks, part.indices.shape[1]) * elements + part.indices.reshape(-1)
        used_keys = (np.repeat(used.chunks, used.counts) * elements + used.indices)[nonzero]
        places = np.searchsorted(used_keys, keys)
        listed = np.searchsorted(used_keys, keys, side="right") > places
        amounts = (part.values * part.scales[:, None]).reshape(-1)[listed]
        _subtract(ownership, momentum, shape, keys[listed], amounts * np.float32(alpha))


def subtract_update(
    ownership: Ownership, momentum: Mapping[int, Tensor], update: AggregateUpdate, alpha: float
) -> None:
    """`M <- M - alpha * update` in place, for the owned chunks of tensors that have a momentum."""
    for shape, part in update.shapes.items():
        keys = np.repeat(part.chunks, part.counts) * (shape[0] * shape[1]) + part.indices
        _subtract(ownership, momentum, shape, keys, _values(part) * np.float32(alpha))


def _values(part: UpdateCoefficients) -> NDArray[np.float32]:
    """`values * 2^exponents`, float32 (sum of counts,)."""
    return np.ldexp(part.values.astype(np.float64), np.repeat(part.exponents, part.counts)).astype(np.float32)


def _subtract(
    ownership: Ownership,
    momentum: Mapping[int, Tensor],
    shape: Shape,
    keys: NDArray[np.int64],
    amounts: NDArray[np.floating[Any]],
) -> None:
    """Subtracts amounts (t,) at keys `chunk * elements + index` (t,), ascending and distinct."""
    elements = shape[0] * shape[1]
    for owned in ownership.of_shape(shape, momentum):
        chunks = owned.block.chunks[owned.start : owned.stop]
        mine = slice(*np.searchsorted(keys, (chunks[0] * elements, (chunks[-1] + 1) * elements)))
        numbers, indices = np.divmod(keys[mine], elements)
        rows = owned.rows(momentum).view(-1)
        places = torch.from_numpy(np.searchsorted(chunks, numbers) * elements + indices)
        rows.index_add_(0, places.to(rows.device), torch.from_numpy(-amounts[mine]).to(rows.device))
