"""The aggregate of the contributions of a round, in integers (rules B3, B4), and the outlier rule (C6). numpy only.

Integer sums do not depend on order: neither of arrival nor of sites, threads or sorting.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from algorithms.layout import ParameterLayout, is_dense
from algorithms.updates import (
    CODEC_LIMITS,
    AggregateUpdate,
    Codec,
    Coefficients,
    Shape,
    SparseUpdate,
    UpdateCoefficients,
)

__all__ = ["MAX_HALVINGS", "aggregate", "norm", "outlier_halvings"]

FRACTION_BITS = 22
"""A site's value is at most 2^22: `|q| * scale < 2^E`, and E is the largest of the sites'."""

VALUE_SHIFT = FRACTION_BITS + 1
VALUE_MASK = (1 << (VALUE_SHIFT + 1)) - 1

BITS_BY_NONZEROS = ((148, 4), (512, 6))
"""Up to so many non-zero values in a chunk, so many bits each; 8 above (rule B4)."""

MAX_HALVINGS = 300

TILE_KEYS = 1 << 18
"""Keys sorted at a time: 2 MiB, which stays in cache."""


@dataclass(frozen=True)
class _Site:
    """One site's chunks of one shape that have a positive scale."""

    places: NDArray[np.int64]
    """(m,) ascending positions among the chunks of the update."""
    indices: NDArray[np.uint16]
    values: NDArray[np.int8 | np.int16]
    scales: NDArray[np.float64]
    """(m,) after halving, exact."""
    exponents: NDArray[np.int32]
    """(m,) the least E with `|q| * scale < 2^E`."""


@dataclass(frozen=True)
class _Means:
    """Averaged integers of a tile, (total,) each, ordered by row and index."""

    rows: NDArray[np.int64]
    indices: NDArray[np.int64]
    values: NDArray[np.int64]


def aggregate(
    contributions: Sequence[SparseUpdate], layout: ParameterLayout, halvings: Sequence[int]
) -> AggregateUpdate:
    """The mean over those sites that sent a coefficient, requantised with a power of two per chunk.

    Contributions are in the order of the entry's list; `halvings[i]` scales site i by `2^-halvings[i]`. A chunk with
    scale 0 is not a contribution. Tensors without a non-zero result are absent.
    Raises ValueError if the lengths differ or a number of halvings is not 0 to 300.
    """
    if len(contributions) != len(halvings):
        raise ValueError(f"{len(contributions)} contributions but {len(halvings)} halvings")
    if halvings and not 0 <= min(halvings) <= max(halvings) <= MAX_HALVINGS:
        raise ValueError(f"halvings must be 0 to {MAX_HALVINGS}, got {list(halvings)}")
    unsent = frozenset(range(len(layout.tensors))).intersection(*(site.absent for site in contributions))
    parts = {
        shape: _aggregate_shape(shape, layout.select(shape, unsent), contributions, halvings) for shape in layout.shapes
    }
    return _without_empty_tensors(parts, layout)


def norm(update: SparseUpdate) -> float:
    """L2 norm of all values of a contribution, in float64."""
    total = 0.0
    for sent in update.shapes.values():
        squares = np.square(sent.values, dtype=np.int32).sum(axis=1)
        total += float((squares * np.square(sent.scales.astype(np.float64))).sum())
    return math.sqrt(total)


def outlier_halvings(norms: Sequence[float]) -> list[int]:
    """How often to halve each contribution until its norm is at most twice the lower median (rule C6).

    A median of 0 halves nothing. Raises ValueError if a norm is negative or not finite.
    """
    if not all(math.isfinite(value) and value >= 0 for value in norms):
        raise ValueError(f"norms must be finite and not negative, got {list(norms)}")
    limit = 2 * sorted(norms)[(len(norms) - 1) // 2] if norms else 0.0
    return [_halvings(value, limit) for value in norms]


def _halvings(value: float, limit: float) -> int:
    count = 0
    while limit > 0 and math.ldexp(value, -count) > limit and count < MAX_HALVINGS:
        count += 1
    return count


def _aggregate_shape(
    shape: Shape, numbers: NDArray[np.int64], contributions: Sequence[SparseUpdate], halvings: Sequence[int]
) -> UpdateCoefficients:
    """The update of the chunks `numbers`, tile by tile."""
    elements = shape[0] * shape[1]
    sites = [
        _site(update.shapes[shape], numbers, update.codec, halving)
        for update, halving in zip(contributions, halvings, strict=True)
        if shape in update.shapes
    ]
    exponents = np.full(numbers.size, np.iinfo(np.int32).min, np.int32)
    for site in sites:
        exponents[site.places] = np.maximum(exponents[site.places], site.exponents)
    step = max(1, TILE_KEYS // max(1, sum(site.indices.shape[1] for site in sites)))
    means = _dense_means if is_dense(elements) else _sparse_means
    tiles = [_EMPTY]
    for start in range(0, numbers.size, step):
        tile = range(start, min(start + step, numbers.size))
        tiles.append(_requantise(means(elements, tile, sites, exponents), numbers, tile, exponents, is_dense(elements)))
    return UpdateCoefficients(*(np.concatenate(arrays) for arrays in zip(*map(_fields, tiles), strict=True)))


def _site(sent: Coefficients, numbers: NDArray[np.int64], codec: Codec, halving: int) -> _Site:
    """Drops chunks with scale 0. Raises ValueError if values do not fit the codec or chunks are not of the layout."""
    limit = CODEC_LIMITS[codec]
    if np.any(np.abs(sent.values.astype(np.int16)) > limit):
        raise ValueError(f"a value of a {codec} contribution is beyond {limit}")
    some = sent.scales > 0
    places = np.searchsorted(numbers, sent.chunks[some])
    if np.any(np.searchsorted(numbers, sent.chunks[some], side="right") == places):
        raise ValueError("a contribution has chunks that the layout has not")
    scales = np.ldexp(sent.scales[some].astype(np.float64), -halving)
    exponents = np.frexp(scales)[1] + (limit.bit_length() if limit > 1 else 0)
    return _Site(places, sent.indices[some], sent.values[some], scales, exponents)


def _integers(site: _Site, part: slice, exponents: NDArray[np.int32]) -> NDArray[np.int64]:
    """`rint(q * scale * 2^(22-E))` of some rows: an exact product in float64 and one rounding."""
    factors = np.ldexp(site.scales[part], FRACTION_BITS - exponents[site.places[part]])
    return np.rint(site.values[part] * factors[:, None]).astype(np.int64)


def _sparse_means(elements: int, tile: range, sites: Sequence[_Site], exponents: NDArray[np.int32]) -> _Means:
    """Sorts one row of keys (index, value) per chunk, then sums runs of equal indices."""
    nothing = np.iinfo(np.int64).max
    keys = np.full((len(tile), sum(site.indices.shape[1] for site in sites)), nothing, np.int64)
    column = 0
    for site in sites:
        part = slice(*np.searchsorted(site.places, (tile.start, tile.stop)))
        integers = _integers(site, part, exponents) + (1 << VALUE_SHIFT)
        width = site.indices.shape[1]
        places = site.places[part] - tile.start
        keys[places, column : column + width] = site.indices[part].astype(np.int64) << (VALUE_SHIFT + 1) | integers
        column += width
    keys.sort(axis=1)
    rows, columns = np.nonzero(keys != nothing)
    found = keys[rows, columns]
    indices = found >> (VALUE_SHIFT + 1)
    starts = np.flatnonzero(np.diff(rows * elements + indices, prepend=-1))
    if not starts.size:
        return _Means(rows, indices, found)
    sums = np.add.reduceat((found & VALUE_MASK) - (1 << VALUE_SHIFT), starts)
    counts = np.diff(starts, append=rows.size)
    return _Means(rows[starts], indices[starts], _divide(sums, counts))


def _dense_means(elements: int, tile: range, sites: Sequence[_Site], exponents: NDArray[np.int32]) -> _Means:
    """Every position of every chunk, zeros included."""
    sums = np.zeros((len(tile), elements), np.int64)
    counts = np.zeros(len(tile), np.int64)
    for site in sites:
        part = slice(*np.searchsorted(site.places, (tile.start, tile.stop)))
        places = site.places[part] - tile.start
        sums[places] += _integers(site, part, exponents)
        counts[places] += 1
    values = _divide(sums, np.maximum(counts, 1)[:, None]).reshape(-1)
    rows, indices = np.divmod(np.arange(values.size), elements)
    return _Means(rows, indices, values)


def _divide(sums: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Nearest integer of sums / counts, ties to even."""
    quotients, rests = np.divmod(sums, counts)
    up = (2 * rests > counts) | ((2 * rests == counts) & (quotients & 1 == 1))
    result: NDArray[np.int64] = quotients + up
    return result


def _requantise(
    means: _Means, numbers: NDArray[np.int64], tile: range, exponents: NDArray[np.int32], dense: bool
) -> UpdateCoefficients:
    """The least shift per chunk for which the largest rounded magnitude fits the bits that its non-zeros allow."""
    nonzeros = np.bincount(means.rows[means.values != 0], minlength=len(tile))
    bits = np.full(len(tile), 8, np.int64)
    for most, width in reversed(BITS_BY_NONZEROS):
        bits[nonzeros <= most] = width
    peaks = np.zeros(len(tile), np.int64)
    if means.rows.size:
        starts = np.flatnonzero(np.diff(means.rows, prepend=-1))
        peaks[means.rows[starts]] = np.maximum.reduceat(np.abs(means.values), starts)
    shifts = np.maximum(np.frexp(peaks.astype(np.float64))[1].astype(np.int64) - (bits - 1), 0)
    shifts += _divide(peaks, 1 << shifts) >= 1 << (bits - 1)
    values = _divide(means.values, 1 << shifts[means.rows])
    keep = np.full(values.size, True) if dense else values != 0
    scale_exponents = np.where(peaks > 0, exponents[tile.start : tile.stop] - FRACTION_BITS + shifts, 0)
    return UpdateCoefficients(
        chunks=numbers[tile.start : tile.stop],
        counts=np.bincount(means.rows[keep], minlength=len(tile)).astype(np.int64),
        indices=means.indices[keep].astype(np.uint16),
        values=values[keep].astype(np.int8),
        exponents=scale_exponents.astype(np.int16),
        bits=bits.astype(np.uint8),
    )


_EMPTY = UpdateCoefficients(
    chunks=np.empty(0, np.int64),
    counts=np.empty(0, np.int64),
    indices=np.empty(0, np.uint16),
    values=np.empty(0, np.int8),
    exponents=np.empty(0, np.int16),
    bits=np.empty(0, np.uint8),
)


def _fields(part: UpdateCoefficients) -> tuple[NDArray[Any], ...]:
    return part.chunks, part.counts, part.indices, part.values, part.exponents, part.bits


def _without_empty_tensors(parts: dict[Shape, UpdateCoefficients], layout: ParameterLayout) -> AggregateUpdate:
    """Drops the chunks of tensors that have no non-zero value."""
    firsts = np.array([start for start, _ in layout.tensor_chunks], np.int64)
    tensors = {shape: np.searchsorted(firsts, part.chunks, side="right") - 1 for shape, part in parts.items()}
    present = np.zeros(len(layout.tensors), np.bool_)
    for shape, part in parts.items():
        present[np.repeat(tensors[shape], part.counts)[part.values != 0]] = True
    shapes = {}
    for shape, part in parts.items():
        rows = present[tensors[shape]]
        each = np.repeat(rows, part.counts)
        if rows.any():
            shapes[shape] = UpdateCoefficients(
                chunks=part.chunks[rows],
                counts=part.counts[rows],
                indices=part.indices[each],
                values=part.values[each],
                exponents=part.exponents[rows],
                bits=part.bits[rows],
            )
    return AggregateUpdate(shapes, frozenset(np.flatnonzero(~present).tolist()))
