"""The averages of the coefficients that the sites of a round sent, tile by tile (rules B3, B12). numpy only.

A coefficient is an integer of up to 2^22 in magnitude. Of each chunk the coefficients of all sites are sorted as keys
`index * 2^24 + integer`, so that those of one index are neighbours, the smallest first. Sites choose nearly disjoint
coefficients: few have a neighbour to be averaged with, and the rest is left as it is.

Everything is exact in float64, hence the same in whatever order the sites come: keys and sums are integers below
2^53; a quotient of up to 2^22 is either a tie, which float64 holds, or at least `1 / (2 * divisor)` away from one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from algorithms.settings import Average

__all__ = ["FRACTION_BITS", "SentChunks", "Tile", "average_tiles"]

FRACTION_BITS = 22
"""A site's integer is at most 2^22: `|q| * scale < 2^E`, and E is the largest of the sites'."""

KEY = 2.0 ** (FRACTION_BITS + 2)

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


@dataclass(frozen=True)
class Tile:
    """The averages of consecutive chunks."""

    rows: slice
    """Positions among the chunks of the aggregate."""
    indices: NDArray[np.float64]
    """(m, w) integers that ascend along a row; they are those of coefficients where the value is not 0."""
    values: NDArray[np.float64]
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
        indices = keys * (1 / KEY)
        np.rint(indices, out=indices)
        keys -= indices * KEY
        values = keys
        _average_equals(indices.reshape(-1), values.reshape(-1), width, average)
        if average == "sites":
            values = np.rint(values / count)
        yield Tile(slice(rows.start, rows.stop), indices, values)


def _sorted_keys(sites: Sequence[SentChunks], rows: range, elements: int, width: int) -> NDArray[np.float64]:
    """Keys (m, width) of some rows, each row ascending; where nothing was sent, of 0 at indices beyond all others."""
    parts = [slice(*np.searchsorted(site.rows, (rows.start, rows.stop))) for site in sites]
    keys = np.empty((len(rows), width))
    if any(part.stop - part.start < len(rows) for part in parts):
        keys[:] = np.arange(elements, elements + width) * KEY
    column = 0
    for site, part in zip(sites, parts, strict=True):
        found = site.values[part] * site.scales[part, None]
        np.rint(found, out=found)
        found += site.indices[part] * KEY
        mine = slice(None) if len(found) == len(rows) else site.rows[part] - rows.start
        keys[mine, column : column + found.shape[1]] = found
        column += found.shape[1]
    keys.sort(axis=1)
    return keys


def _average_equals(indices: NDArray[np.float64], values: NDArray[np.float64], width: int, average: Average) -> None:
    """Gives the first of equal indices in a row the average of their values (`sites`: the sum), the others 0."""
    later = np.flatnonzero(indices[1:] == indices[:-1]) + 1
    later = later[later % width != 0]
    if not later.size:
        return
    runs = np.flatnonzero(np.diff(later, prepend=-1) != 1)
    first = later[runs] - 1
    counts = np.diff(runs, append=later.size) + 1
    if average == "median":
        middle = values[first + (counts - 1) // 2] + values[first + counts // 2]
        values[first] = np.rint(middle / 2)
    else:
        sums = values[first] + np.add.reduceat(values[later], runs)
        values[first] = sums if average == "sites" else np.rint(sums / counts)
    values[later] = 0
