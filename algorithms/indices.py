"""Ascending indices in chunks of n elements as bits, and back. numpy only.

`packed` is one array of `ceil(log2 n)` bits per index. `compact` is Elias-Fano coding: array `low` has the low l bits
of each index; array `high` has a bit string per chunk, its record, in which bit `(index >> l) + i` is set for its i-th
index. Source: docs/decisions/0002-algorithms.md, section 4.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from algorithms import kernels
from algorithms.bits import check_packed, pack_bits, packed_size
from algorithms.layout import is_dense
from algorithms.updates import Indices

__all__ = [
    "check_indices",
    "index_bits",
    "index_sizes",
    "low_bits",
    "pack_indices",
    "record_bits",
    "unpack_high",
]

TILE_BITS = 1 << 18
"""Bits of `high` that are held as one byte each."""


def check_indices(indices: str) -> None:
    """Raises ValueError unless it is one of `Indices`."""
    if indices not in get_args(Indices):
        raise ValueError(f"indices must be one of {get_args(Indices)}, got {indices!r}")


def index_bits(elements: int) -> int:
    """Bits of a position in a chunk: `ceil(log2 n)`; 0 for dense chunks, whose positions are not sent."""
    return 0 if is_dense(elements) else (elements - 1).bit_length()


def low_bits(elements: int, count: int, chunks: int = 1) -> int:
    """The l that makes the records of so many chunks, with `count` indices together, smallest; the larger of equals."""
    return min(range((elements - 1).bit_length(), -1, -1), key=lambda low: count * low + chunks * _zeros(elements, low))


def record_bits(elements: int, count: int) -> int:
    """Bits of a chunk's record in `high`, if all have as many indices."""
    return count + _zeros(elements, low_bits(elements, count))


def _zeros(elements: int, low: int) -> int:
    """Bits of a chunk's record that are 0."""
    return (elements - 1) >> low


def index_sizes(elements: int, count: int, chunks: int, form: Indices) -> dict[str, int]:
    """The index arrays of `chunks` chunks of one shape, with `count` indices together, and their bytes: `indices`, or
    `low` and `high` if smaller."""
    packed = {"indices": packed_size(count, index_bits(elements))}
    if form == "packed" or is_dense(elements):
        return packed
    low = low_bits(elements, count, chunks)
    compact = {"low": packed_size(count, low), "high": packed_size(count + chunks * _zeros(elements, low), 1)}
    return compact if sum(compact.values()) < packed["indices"] else packed


def pack_indices(
    indices: NDArray[np.uint16], counts: NDArray[np.int64], elements: int, form: Indices
) -> dict[str, NDArray[np.uint8]]:
    """The arrays that `index_sizes` names, from positions (n,), `counts` (m,) in each chunk; none for dense chunks."""
    if is_dense(elements):
        return {}
    if "high" not in index_sizes(elements, indices.size, counts.size, form):
        return {"indices": pack_bits(indices, index_bits(elements))}
    low = low_bits(elements, indices.size, counts.size)
    fields = {"low": pack_bits(indices, low)} if low else {}
    return fields | {"high": _pack_high(indices, low, counts, _zeros(elements, low))}


def _pack_high(indices: NDArray[np.uint16], low: int, counts: NDArray[np.int64], zeros: int) -> NDArray[np.uint8]:
    packed = np.zeros(packed_size(indices.size + counts.size * zeros, 1), np.uint8)
    if kernels.compiled is not None:
        kernels.compiled.pack_high(indices, counts, low, zeros, packed)
        return packed
    highs = indices >> np.uint16(low)
    for tile in _tiles(counts, zeros):
        byte, bit = divmod(tile.first_bit, 8)
        flags = np.zeros(bit + tile.bits, np.uint8)
        flags[bit:][tile.places + highs[tile.indices]] = 1
        data = np.packbits(flags, bitorder="little")
        packed[byte : byte + data.size] |= data
    return packed


def unpack_high(
    data: NDArray[np.uint8], counts: NDArray[np.int64], elements: int
) -> tuple[NDArray[np.uint16], NDArray[np.bool_]]:
    """The high bits `index >> l` (n,), and which records have not as many ones as `counts` says (m,).

    Raises ValueError if the size of data or its unused bits are wrong.
    """
    total = int(counts.sum())
    zeros = _zeros(elements, low_bits(elements, total, counts.size))
    check_packed(data, 1, total + counts.size * zeros)
    highs = np.zeros(total, np.uint16)
    wrong = np.zeros(counts.size, np.bool_)
    for tile in _tiles(counts, zeros):
        byte, bit = divmod(tile.first_bit, 8)
        flags = np.unpackbits(data[byte:], count=bit + tile.bits, bitorder="little")[bit:]
        ones = np.flatnonzero(flags.view(np.bool_))
        in_records = np.diff(np.searchsorted(ones, tile.edges))
        wrong[tile.chunks] = in_records != counts[tile.chunks]
        if not wrong[tile.chunks].any():
            ones -= tile.places
            highs[tile.indices] = ones
    return highs, wrong


@dataclass(frozen=True)
class _Tile:
    """Consecutive chunks, about TILE_BITS bits of `high`."""

    chunks: slice
    indices: slice
    first_bit: int
    edges: NDArray[np.int32]
    """(m + 1,) where the records begin and the last one ends, from the first bit on."""
    places: NDArray[np.int32]
    """(n,) of the ones if all high bits were 0, from the first bit on."""

    @property
    def bits(self) -> int:
        return int(self.edges[-1])


def _tiles(counts: NDArray[np.int64], zeros: int) -> Iterator[_Tile]:
    first = np.concatenate([[0], np.cumsum(counts)])
    bits = int(first[-1]) + counts.size * zeros
    step = max(1, TILE_BITS * counts.size // max(bits, 1))
    for start in range(0, counts.size, step):
        stop = min(start + step, counts.size)
        gaps = np.arange(stop - start + 1, dtype=np.int32) * np.int32(zeros)
        own = (first[start : stop + 1] - first[start]).astype(np.int32)
        yield _Tile(
            chunks=slice(start, stop),
            indices=slice(int(first[start]), int(first[stop])),
            first_bit=int(first[start]) + start * zeros,
            edges=own + gaps,
            places=np.arange(own[-1], dtype=np.int32) + np.repeat(gaps[:-1], counts[start:stop]),
        )
