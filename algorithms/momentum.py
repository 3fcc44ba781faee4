"""The momentum of the chunks that a rank owns: update it, pick from it, subtract from it.

Momentum is one flat float32 tensor per parameter: its owned chunks, block after block. They hold coefficients, since
an orthonormal transform and an average commute; only with `random`, whose basis changes at every step, they hold
elements. A parameter that never had a gradient has no momentum. Dense chunks, of which every coefficient is sent, are
not transformed: the transform serves only to find few large coefficients, and one sign for each of many unequal ones
would bury the large (measured: docs/log.md).

Memory beside the momentum: two tiles per device, what is picked, and a copy of a gradient that is not contiguous, one
at a time. Source: the design, section 5, steps 1-4; docs/decisions/0002-algorithms.md, section 2.
"""

from collections.abc import Mapping
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from algorithms.codec import quantise
from algorithms.layout import kept
from algorithms.ownership import OwnedTile, Ownership, Scratch, tile_limit, tile_view
from algorithms.sparsify import Sides, add_forward, add_inverse, candidates, largest
from algorithms.updates import AggregateUpdate, Codec, Coefficients, Shape, SparseUpdate, UpdateCoefficients

__all__ = ["Ownership", "Picks", "encode", "pick", "subtract_sent", "subtract_update", "tile_limit", "tile_view"]

LINE = 8
"""Chunks in a row of the grid from which on a CPU multiplies them where they lie, without gathering them first."""

MARKS = 1 << 20
"""Coefficients of an update marked at a time: 1 MiB."""


class Picks(NamedTuple):
    """The k largest coefficients of m chunks of one shape; of dense chunks, all."""

    chunks: NDArray[np.int64]
    """(m,) ascending chunk numbers."""
    indices: NDArray[np.uint16]
    """(m, k) positions, ascending."""
    values: NDArray[np.float32]
    """(m, k)."""


def encode(
    ownership: Ownership,
    momentum: Mapping[int, Tensor],
    gradients: Mapping[int, Tensor],
    *,
    beta: float,
    k: int,
    codec: Codec,
    unscale: float = 1.0,
    step: int = 0,
) -> SparseUpdate:
    """What `pick` picks, quantised. Tensors without a momentum are absent."""
    picked = pick(ownership, momentum, gradients, beta=beta, k=k, unscale=unscale, step=step)
    shapes = {
        shape: Coefficients(picks.chunks, picks.indices, *quantise(picks.values, codec))
        for shape, picks in picked.items()
    }
    return SparseUpdate(shapes, frozenset(range(len(ownership.layout.tensors))) - momentum.keys(), codec)


def pick(
    ownership: Ownership,
    momentum: Mapping[int, Tensor],
    gradients: Mapping[int, Tensor],
    *,
    beta: float,
    k: int,
    unscale: float = 1.0,
    step: int = 0,
) -> dict[Shape, Picks]:
    """`M <- beta*M + (1-beta)*G` in place, then the k largest coefficients of each owned chunk of M.

    Both mappings are by tensor position; gradients have the shapes of their tensors and are finite, and are multiplied
    by `unscale` on the way into M. A tensor with a momentum but without a gradient counts as having gradient 0. `step`
    is that of the entry to which the picks will contribute. Raises ValueError if k is out of range.
    """
    scratch, weight = Scratch(ownership), (1 - beta) * unscale
    picked: dict[Shape, list[Picks]] = {}
    for tensor, blocks in groupby(ownership.blocks, lambda owned: owned.block.tensor):
        if tensor not in momentum:
            continue
        gradient = gradients[tensor].contiguous().view(-1) if tensor in gradients else None
        for owned in blocks:
            rows, block = owned.rows(momentum), owned.block
            both = ownership.sides(block.shape, step, rows.device)
            early, late = (None, both) if ownership.holds_elements else (both, None)
            count = kept(k, block.elements, ownership.layout.chunk)
            found = []
            for tile in scratch.tiles(owned, rows.device):
                part = rows[tile.rows].view(tile.one.shape)
                view = None if gradient is None else tile_view(gradient, tile.view)
                _average(part, view, early, tile, beta, weight)
                found.append(_candidates(part, late, tile, count))
            places, values = map(np.concatenate, zip(*found, strict=True))
            picks = Picks(block.chunks[owned.start : owned.stop], *largest(places, values, rows.shape, count))
            picked.setdefault(block.shape, []).append(picks)
    return {shape: Picks(*map(np.concatenate, zip(*picked[shape], strict=True))) for shape in sorted(picked)}


def _average(
    part: Tensor, gradient: Tensor | None, both: Sides | None, tile: OwnedTile, beta: float, weight: float
) -> None:
    """`part <- beta * part + weight * T(gradient)`.

    `part` (chunks, rows, cols) is of the momentum, the gradient a view (batch, grid rows, grid cols, rows, cols).
    """
    if gradient is None:
        part.mul_(beta)
    elif both is None:
        part.view(gradient.shape).mul_(beta).add_(gradient, alpha=weight)
    elif gradient.shape[2] >= LINE and gradient.dtype == torch.float32 and gradient.device.type == "cpu":
        add_forward(part, gradient.flatten(0, 1), both, tile.one, beta=beta, alpha=weight)
    else:
        tile.two.view(gradient.shape).copy_(gradient)
        add_forward(part, tile.two[None], both, tile.one, beta=beta, alpha=weight)


def _candidates(
    part: Tensor, both: Sides | None, tile: OwnedTile, count: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Flat positions in the owned block, ascending, and values of the `count` largest of `T(part)` and few more."""
    if both is not None:
        add_forward(tile.two, part[None], both, tile.one, beta=0.0, alpha=1.0)
        part = tile.two
    rows = len(part)
    places, values = candidates(part.view(rows, -1), count, tile.one.view(rows, -1))
    return places + tile.rows.start * (part.numel() // rows), values


def subtract_sent(
    ownership: Ownership,
    momentum: Mapping[int, Tensor],
    sent: SparseUpdate,
    update: AggregateUpdate,
    alpha: float,
    step: int = 0,
) -> None:
    """`M <- M - alpha * (value as sent)` in place, for those coefficients that are not zero in the update (rule B4).

    `step` is that of the contribution.
    """
    scratch = Scratch(ownership)
    for shape, part in sent.shapes.items():
        if shape in update.shapes:
            listed = _listed(part, update.shapes[shape], shape[0] * shape[1])
            values = (part.values * part.scales[:, None])[listed] * np.float32(alpha)
            amounts = _Amounts(part.chunks, listed.sum(axis=1), part.indices[listed], values)
            _subtract(ownership, momentum, shape, amounts, step, scratch)


def subtract_update(
    ownership: Ownership, momentum: Mapping[int, Tensor], update: AggregateUpdate, alpha: float, step: int = 0
) -> None:
    """`M <- M - alpha * update` in place, for the owned chunks of tensors that have a momentum.

    `step` is that of the entry.
    """
    scratch = Scratch(ownership)
    for shape, part in update.shapes.items():
        values = np.ldexp(part.values.astype(np.float64), np.repeat(part.exponents, part.counts)).astype(np.float32)
        amounts = _Amounts(part.chunks, part.counts, part.indices, values * np.float32(alpha))
        _subtract(ownership, momentum, shape, amounts, step, scratch)


class _Amounts(NamedTuple):
    """What to subtract from coefficients of m chunks of one shape, of each chunk its own number of them."""

    chunks: NDArray[np.int64]
    """(m,) ascending chunk numbers."""
    counts: NDArray[np.int64]
    """(m,)."""
    indices: NDArray[np.uint16]
    """(sum of counts,) positions, distinct within a chunk."""
    values: NDArray[np.float32]
    """(sum of counts,)."""


def _listed(sent: Coefficients, used: UpdateCoefficients, elements: int) -> NDArray[np.bool_]:
    """Which coefficients of a contribution, (m, k), are not zero in the update.

    Those of the update are marked in a map, some of its chunks at a time, and ours looked up.
    """
    rows = np.searchsorted(used.chunks, sent.chunks)
    ends = np.concatenate([[0], np.cumsum(used.counts)])
    listed = np.zeros(sent.indices.shape, np.bool_)
    limit = max(MARKS // elements, 1)
    firsts = np.arange(limit) * elements
    marks = np.zeros(limit * elements, np.bool_)
    for start in range(0, used.chunks.size, limit):
        some = slice(start, min(start + limit, used.chunks.size))
        part = slice(ends[some.start], ends[some.stop])
        places = np.repeat(firsts[: some.stop - start], used.counts[some]) + used.indices[part]
        marks[places] = used.values[part] != 0
        ours = slice(*np.searchsorted(rows, (start, some.stop)))
        listed[ours] = marks[firsts[rows[ours] - start, None] + sent.indices[ours]]
        marks[places] = False
    listed &= np.isin(sent.chunks, used.chunks, assume_unique=True)[:, None]
    return listed


def _subtract(
    ownership: Ownership,
    momentum: Mapping[int, Tensor],
    shape: Shape,
    amounts: _Amounts,
    step: int,
    scratch: Scratch,
) -> None:
    """Subtracts the amounts from M, or, if M is of elements, their inverse transform."""
    ends = np.concatenate([[0], np.cumsum(amounts.counts)])
    for owned in ownership.of_shape(shape, momentum):
        rows = owned.rows(momentum)
        chunks = owned.block.chunks[owned.start : owned.stop]
        mine = slice(*np.searchsorted(amounts.chunks, (chunks[0], chunks[-1] + 1)))
        part = slice(ends[mine.start], ends[mine.stop])
        firsts = np.searchsorted(chunks, amounts.chunks[mine]) * owned.block.elements
        places = np.repeat(firsts, amounts.counts[mine]) + amounts.indices[part]
        both = ownership.sides(shape, step, rows.device)
        if both is None or not ownership.holds_elements:
            _subtract_at(rows, places, amounts.values[part])
            continue
        for tile in scratch.tiles(owned, rows.device):
            first, last = (bound * owned.block.elements for bound in (tile.rows.start, tile.rows.stop))
            some = slice(*np.searchsorted(places, (first, last)))
            _subtract_at(tile.two.zero_(), places[some] - first, amounts.values[part][some])
            add_inverse(rows[tile.rows].view(tile.one.shape), tile.two[None], both, tile.one, alpha=1.0)


def _subtract_at(total: Tensor, places: NDArray[np.int64], values: NDArray[np.float32]) -> None:
    """Subtracts values (t,) at flat positions (t,), distinct and ascending by chunk."""
    where, what = (torch.from_numpy(array).to(total.device) for array in (places, values))
    total.view(-1).index_add_(0, where, what, alpha=-1)
