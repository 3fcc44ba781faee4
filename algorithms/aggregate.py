"""The aggregate of the contributions of a round, bit for bit the same in whatever order they come. numpy only.

Source: docs/decisions/0002-algorithms.md, section 5; rules B3, B4, B12.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from algorithms.averages import FRACTION_BITS, SentChunks, Tile, average_tiles
from algorithms.layout import ParameterLayout, is_dense
from algorithms.outliers import MAX_HALVINGS, norm, outlier_halvings
from algorithms.requantise import keep_largest, requantise, requantise_sparse
from algorithms.settings import Average
from algorithms.updates import CODEC_LIMITS, AggregateUpdate, Shape, SparseUpdate, UpdateCoefficients, restrict

__all__ = ["MAX_HALVINGS", "aggregate", "join", "norm", "outlier_halvings", "without_empty_tensors"]

MAX_EXPONENT = 120
"""Largest E that readers of an update accept; only very uneven weights of many sites lead to a larger one."""

NO_EXPONENT = -(1 << 15)
"""Below every exponent: that of a chunk which nobody sent."""

MAX_TOKENS = 2**63 - 1


def aggregate(
    contributions: Iterable[SparseUpdate],
    layout: ParameterLayout,
    halvings: Sequence[int],
    *,
    average: Average = "contributors",
    tokens: Sequence[int] | None = None,
    largest: int | None = None,
    chunks: range | None = None,
) -> AggregateUpdate:
    """The average of the contributions, requantised with a power of two per chunk.

    `halvings[i]` scales site i by `2^-halvings[i]`; `tokens[i]` are the tokens of site i, for `average="tokens"`. A
    chunk with scale 0 is not a contribution. `largest` bounds the coefficients of a chunk that is not dense. Tensors
    without a non-zero result are absent. With `chunks`, a contiguous range of chunk numbers, the update is of those
    alone, and keeps tensors without a non-zero result: it is to be given to `join`, or `without_empty_tensors`.

    Contributions are taken one by one; the arrays of each are kept, 3 bytes per coefficient (4 for int16).
    Raises ValueError if lengths differ, a number is out of bounds, or a contribution does not fit codec or layout.
    """
    sent = [update if chunks is None else restrict(update, chunks) for update in contributions]
    if largest is not None and largest < 1:
        raise ValueError(f"largest must be at least 1, got {largest}")
    weights = _weights(average, tokens, len(sent))
    _check(halvings, "halvings", MAX_HALVINGS, len(sent))
    unsent = frozenset(range(len(layout.tensors))).intersection(*(update.absent for update in sent))
    parts = {}
    for shape in layout.shapes:
        numbers = layout.select(shape, unsent, chunks)
        sites = [
            _sent_chunks(update, shape, numbers, weight, halving)
            for update, weight, halving in zip(sent, weights, halvings, strict=True)
            if shape in update.shapes
        ]
        exponents = np.full(numbers.size, NO_EXPONENT, np.int32)
        for site, own in sites:
            exponents[site.rows] = np.maximum(exponents[site.rows], own)
        scaled = [
            replace(site, scales=np.ldexp(site.scales, FRACTION_BITS - exponents[site.rows])) for site, _ in sites
        ]
        elements = shape[0] * shape[1]
        tiles = average_tiles(scaled, numbers.size, elements, average, len(sent))
        parts[shape] = _concatenate([_finish(tile, elements, numbers, exponents, largest) for tile in tiles])
    update = AggregateUpdate(parts, unsent)
    return without_empty_tensors(update, layout) if chunks is None else update


def join(updates: Sequence[AggregateUpdate], layout: ParameterLayout) -> AggregateUpdate:
    """The update of a round, of those of consecutive chunk ranges that together are all chunks of the layout.

    Raises ValueError if they are not, or are out of order.
    """
    if not updates:
        raise ValueError("nothing to join")
    absent = frozenset.intersection(*(update.absent for update in updates))
    parts = {}
    for shape in layout.shapes:
        parts[shape] = _concatenate([update.shapes[shape] for update in updates if shape in update.shapes])
        if not np.array_equal(parts[shape].chunks, layout.select(shape, absent)):
            raise ValueError(f"the ranges are not all chunks of shape {shape} in order")
    return without_empty_tensors(AggregateUpdate(parts, absent), layout)


def _weights(average: Average, tokens: Sequence[int] | None, count: int) -> list[float]:
    """The factor of each site's scales, rounded once; 0 if there are no tokens at all."""
    if average not in get_args(Average):
        raise ValueError(f"average must be one of {get_args(Average)}, got {average!r}")
    if tokens is not None:
        _check(tokens, "tokens", MAX_TOKENS, count)
    if average != "tokens":
        return [1.0] * count
    if tokens is None:
        raise ValueError("the average by tokens needs the tokens of each contribution")
    total = max(sum(tokens), 1)
    return [own * count / total for own in tokens]


def _check(numbers: Sequence[int], name: str, most: int, count: int) -> None:
    if len(numbers) != count:
        raise ValueError(f"{count} contributions but {len(numbers)} {name}")
    if numbers and not 0 <= min(numbers) <= max(numbers) <= most:
        raise ValueError(f"{name} must be 0 to {most}, got {list(numbers)}")


def _sent_chunks(
    update: SparseUpdate, shape: Shape, numbers: NDArray[np.int64], weight: float, halving: int
) -> tuple[SentChunks, NDArray[np.int32]]:
    """The chunks of one shape, without those of scale 0, as rows of `numbers`."""
    sent, limit = update.shapes[shape], CODEC_LIMITS[update.codec]
    if sent.values.size and not -limit <= sent.values.min() <= sent.values.max() <= limit:
        raise ValueError(f"a value of a {update.codec} contribution is beyond {limit}")
    rows = np.arange(numbers.size)
    if not np.array_equal(sent.chunks, numbers):
        rows = np.searchsorted(numbers, sent.chunks)
        if np.any(np.diff(sent.chunks) <= 0):
            raise ValueError(f"the chunks of shape {shape} of a contribution do not ascend")
        if np.any(np.searchsorted(numbers, sent.chunks, side="right") == rows):
            raise ValueError(f"a contribution has chunks of shape {shape} that the layout has not")
    bits = 0 if update.codec == "sign" else limit.bit_length()
    scales = np.ldexp(sent.scales.astype(np.float64) * weight, -halving)
    scales = np.minimum(scales, 2.0 ** (MAX_EXPONENT - 1 - bits))
    indices, values, some = sent.indices, sent.values, scales > 0
    if not some.all():
        rows, indices, values, scales = rows[some], indices[some], values[some], scales[some]
    return SentChunks(rows, indices, values, scales, signs=update.codec == "sign"), np.frexp(scales)[1] + bits


def _finish(
    tile: Tile, elements: int, numbers: NDArray[np.int64], exponents: NDArray[np.int32], largest: int | None
) -> UpdateCoefficients:
    """The requantised chunks of a tile: every element of dense chunks, what is not zero of others."""
    units = exponents[tile.rows] - FRACTION_BITS
    if not is_dense(elements):
        if largest is not None:
            keep_largest(tile.values, largest)
        return requantise_sparse(numbers[tile.rows], tile.indices, tile.values, units)
    rows, columns = np.nonzero(tile.values)
    values = np.zeros((tile.values.shape[0], elements), np.int32)
    values[rows, tile.indices[rows, columns]] = tile.values[rows, columns]
    rounded, shifted, bits = requantise(values, units)
    return UpdateCoefficients(
        chunks=numbers[tile.rows],
        counts=np.full(len(values), elements),
        indices=np.tile(np.arange(elements, dtype=np.uint16), len(values)),
        values=rounded.reshape(-1),
        exponents=shifted,
        bits=bits,
    )


_NOTHING = UpdateCoefficients(
    chunks=np.empty(0, np.int64),
    counts=np.empty(0, np.int64),
    indices=np.empty(0, np.uint16),
    values=np.empty(0, np.int8),
    exponents=np.empty(0, np.int16),
    bits=np.empty(0, np.uint8),
)


def _concatenate(parts: Sequence[UpdateCoefficients]) -> UpdateCoefficients:
    fields = (vars(part).values() for part in [_NOTHING, *parts])
    return UpdateCoefficients(*(np.concatenate(arrays) for arrays in zip(*fields, strict=True)))


def without_empty_tensors(update: AggregateUpdate, layout: ParameterLayout) -> AggregateUpdate:
    """Drops the chunks of tensors that have no non-zero value."""
    parts = update.shapes
    owners = np.repeat(np.arange(len(layout.tensors)), [stop - start for start, stop in layout.tensor_chunks])
    present = np.zeros(len(layout.tensors), np.bool_)
    for (rows, cols), part in parts.items():
        dense = is_dense(rows * cols)
        filled = part.values.reshape(-1, rows * cols).any(axis=1) if dense else part.counts > 0
        present[owners[part.chunks[filled]]] = True
    shapes = {}
    for shape, part in parts.items():
        stays = present[owners[part.chunks]]
        if stays.all() and stays.size:
            shapes[shape] = part
        elif stays.any():
            each = np.repeat(stays, part.counts)
            shapes[shape] = UpdateCoefficients(
                chunks=part.chunks[stays],
                counts=part.counts[stays],
                indices=part.indices[each],
                values=part.values[each],
                exponents=part.exponents[stays],
                bits=part.bits[stays],
            )
    return AggregateUpdate(shapes, frozenset(np.flatnonzero(~present).tolist()))
