"""The averages of the coefficients that the sites of a round sent, tile by tile (rules B3, B12). numpy only.

A coefficient is an integer of up to 2^22 in magnitude. Of each chunk the coefficients of all sites are sorted as keys,
the index above the integer, so that those of one index are neighbours, the smallest first. Sites choose nearly disjoint
coefficients: few have a neighbour to be averaged with, and the rest is left as it is.

Everything is exact, hence the same in whatever order the sites come: float64 holds the sums, and a quotient of up to
2^22 is either a tie, which float64 holds, too, or at least `1 / (2 * divisor)` away from one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from algorithms import kernels
from algorithms.settings import Average

__all__ = ["FRACTION_BITS", "SentChunks", "Tile", "average_tiles"]

FRACTION_BITS = 22
"""A site's integer is at most 2^22: `|q| * scale < 2^E`, and E is the largest of the sites'."""

KEY = np.dtype("<i8")
"""The index in the upper 32 bits, the integer plus BIAS in the lower ones."""

BIAS = np.int32(1 << FRACTION_BITS)
"""Makes integers positive, so that keys of one index are in their order."""

TILE_KEYS = 1 << 16
"""Keys sorted at a time: 512 KiB, which stays in cache."""


@dataclass(frozen=True)
class SentChunks:
    """One site's chunks of one shape that have a positive scale."""

    rows: NDArray[np.int64]
    """(m,) ascending positions among the chunks of the aggregate."""
    indices: NDArray[np.uint16]
    """(m, k) positions in the chunk."""
    values: NDArray[np.int8 | np.int16]
    """(m, k) sent integers q."""
    scales: NDArray[np.float64]
    """(m,) in units of `2^(E-22)` of the chunk: `rint(values * scales)` are the integers."""
    signs: bool
    """Whether all values are 1 or -1, so that the integers are `values * rint(scales)`."""


@dataclass(frozen=True)
class Tile:
    """The averages of consecutive chunks."""

    rows: slice
    """Positions among the chunks of the aggregate."""
    indices: NDArray[np.uint16]
    """(m, w) positions in the chunk, ascending along a row where `values` is not 0."""
    values: NDArray[np.int32]
    """(m, w) integers; 0 also where nothing was sent and for all but the first of equal indices."""


def average_tiles(
    sites: Sequence[SentChunks], chunks: int, elements: int, average: Average, count: int
) -> Iterator[Tile]:
    """The averages of so many chunks of so many elements.

    `count` is the number of contributions of the round, those without such chunks included.
    """
    width = sum(site.indices.shape[1] for site in sites)
    size = max(1, TILE_KEYS // max(1, width))
    for start in range(0, chunks, size):
        rows = range(start, min(start + size, chunks))
        keys = _sorted_keys(sites, rows, elements, width)
        yield Tile(slice(rows.start, rows.stop), *_averages(keys, average, count))


def _sorted_keys(sites: Sequence[SentChunks], rows: range, elements: int, width: int) -> NDArray[np.int64]:
    """Keys (m, width) of some rows, each row ascending; where nothing was sent, of 0 at indices beyond all others,
    which differ from each other so as not to be averaged."""
    parts = [slice(*np.searchsorted(site.rows, (rows.start, rows.stop))) for site in sites]
    keys = np.empty((len(rows), width), KEY)
    if any(part.stop - part.start < len(rows) for part in parts):
        beyond = elements + np.arange(width) % ((1 << 16) - elements)
        keys[:] = (beyond << 32) + BIAS
    column = 0
    for site, part in zip(sites, parts, strict=True):
        _fill(keys, column, site, part, rows.start)
        column += site.indices.shape[1]
    keys.sort(axis=1)
    return keys


def _fill(keys: NDArray[np.int64], column: int, site: SentChunks, part: slice, start: int) -> None:
    """Writes the keys of one site's part into the columns from `column` on; `start` is the first row."""
    mine, indices, values = site.rows[part] - start, site.indices[part], site.values[part]
    if kernels.compiled is not None:
        kernels.compiled.fill_keys(keys, column, mine, indices, values, site.scales[part], BIAS)
        return
    if site.signs:
        integers = values * np.rint(site.scales[part, None]).astype(np.int32)
    else:
        integers = np.rint(values * site.scales[part, None])
    integers += BIAS
    halves, columns = _halves(keys), slice(column, column + indices.shape[1])
    rows = slice(None) if len(mine) == len(keys) else mine
    halves[rows, columns, 0] = integers
    halves[rows, columns, 1] = indices


def _halves(keys: NDArray[np.int64]) -> NDArray[np.int32]:
    """A view (m, w, 2) of keys (m, w): the integer with its bias, and the index."""
    return keys.view("<i4").reshape(*keys.shape, 2)


def _averages(keys: NDArray[np.int64], average: Average, count: int) -> tuple[NDArray[np.uint16], NDArray[np.int32]]:
    """Indices and values of sorted keys: of equal indices in a row the first has their average, and the others 0."""
    if kernels.compiled is not None:
        indices, values = np.empty(keys.shape, np.uint16), np.empty(keys.shape, np.int32)
        divisor = count if average == "sites" else 0
        kernels.compiled.average_equals(keys, BIAS, divisor, average == "median", indices, values)
        return indices, values
    halves = _halves(keys)
    indices, values = halves[:, :, 1].astype(np.uint16), halves[:, :, 0] - BIAS
    _average_equals(indices.reshape(-1), values.reshape(-1), keys.shape[1], average, count)
    return indices, values


def _average_equals(
    indices: NDArray[np.uint16], values: NDArray[np.int32], width: int, average: Average, count: int
) -> None:
    """Gives the first of equal indices in a row of so many the average of their values, and the others 0."""
    later = np.flatnonzero(indices[1:] == indices[:-1]) + 1
    later = later[later % width != 0]
    runs = np.flatnonzero(np.diff(later, prepend=-1) != 1)
    first = later[runs] - 1
    sent = np.diff(runs, append=later.size) + 1
    if average == "median":
        averages = (values[first + (sent - 1) // 2] + values[first + sent // 2]) / 2
    else:
        sums = values[first] + np.add.reduceat(values[later], runs, dtype=np.float64)
        averages = sums / (count if average == "sites" else sent)
    if average == "sites":
        values[:] = np.rint(values / count)
    values[first] = np.rint(averages)
    values[later] = 0
