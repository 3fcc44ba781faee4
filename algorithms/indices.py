"""The indices of a contribution as bits, k ascending ones per chunk of n elements, and back. numpy only.

`packed` is one array of `ceil(log2 n)` bits per index. `compact` is Elias-Fano coding with a record of fixed size per
chunk: array `low` has the low l bits of each index; array `high` has a bit string per chunk in which bit
`(index >> l) + i` is set for its i-th index. Source: docs/decisions/0002-algorithms.md, section 4.
"""

from typing import get_args

import numpy as np
from numpy.typing import NDArray

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


def low_bits(elements: int, count: int) -> int:
    """The l that makes the record of `count` indices smallest; the larger of two equals."""
    return min(
        range((elements - 1).bit_length(), -1, -1), key=lambda low: count * low + _high_bits(elements, count, low)
    )


def record_bits(elements: int, count: int) -> int:
    """Bits of a chunk's record in `high`."""
    return _high_bits(elements, count, low_bits(elements, count))


def _high_bits(elements: int, count: int, low: int) -> int:
    return count + -(-elements >> low) - 1


def index_sizes(elements: int, count: int, chunks: int, form: Indices) -> dict[str, int]:
    """The index arrays of `chunks` chunks of one shape and their bytes: `indices`, or `low` and `high` if smaller."""
    total = chunks * count
    packed = {"indices": packed_size(total, index_bits(elements))}
    if form == "packed" or is_dense(elements):
        return packed
    compact = {
        "low": packed_size(total, low_bits(elements, count)),
        "high": packed_size(chunks, record_bits(elements, count)),
    }
    return compact if sum(compact.values()) < packed["indices"] else packed


def pack_indices(indices: NDArray[np.uint16], elements: int, form: Indices) -> dict[str, NDArray[np.uint8]]:
    """The arrays that `index_sizes` names, from ascending positions (chunks, count); none for dense chunks."""
    if is_dense(elements):
        return {}
    chunks, count = indices.shape
    if "high" not in index_sizes(elements, count, chunks, form):
        return {"indices": pack_bits(indices, index_bits(elements))}
    low = low_bits(elements, count)
    fields = {"low": pack_bits(indices, low)} if low else {}
    return fields | {"high": _pack_high(indices, low, record_bits(elements, count))}


def _pack_high(indices: NDArray[np.uint16], low: int, record: int) -> NDArray[np.uint8]:
    chunks, count = indices.shape
    packed = np.empty(packed_size(chunks, record), np.uint8)
    step = _tile_chunks(record)
    places = _places(min(step, chunks), count, record)
    for start in range(0, chunks, step):
        part = indices[start : start + step]
        flags = np.zeros(len(part) * record, np.uint8)
        flags[(places[: len(part)] + (part >> low)).reshape(-1)] = 1
        data = np.packbits(flags, bitorder="little")
        packed[start * record // 8 :][: data.size] = data
    return packed


def unpack_high(
    data: NDArray[np.uint8], elements: int, count: int, chunks: int
) -> tuple[NDArray[np.uint16], NDArray[np.bool_]]:
    """The high bits `index >> l` (chunks, count), and which records have not exactly `count` ones (chunks,).

    Raises ValueError if the size of data or its unused bits are wrong.
    """
    record = record_bits(elements, count)
    check_packed(data, record, chunks)
    highs = np.zeros((chunks, count), np.uint16)
    wrong = np.zeros(chunks, np.bool_)
    step = _tile_chunks(record)
    places = _places(min(step, chunks), count, record)
    words = places.astype(np.uint16)
    for start in range(0, chunks, step):
        part = highs[start : start + step]
        flags = np.unpackbits(data[start * record // 8 :], count=len(part) * record, bitorder="little").view(np.bool_)
        ones = np.flatnonzero(flags)
        if ones.size == part.size and _in_records(ones.reshape(part.shape), places[: len(part), 0], record):
            # differences are below 2^16, so that their low 16 bits are enough
            np.subtract(ones.astype(np.uint16).reshape(part.shape), words[: len(part)], out=part)
        else:
            wrong[start : start + step] = flags.reshape(-1, record).sum(axis=1) != count
    return highs, wrong


def _tile_chunks(record: int) -> int:
    """Chunks of a tile: a multiple of 8, so that every tile begins on a byte."""
    return 8 * max(1, TILE_BITS // (8 * record))


def _places(chunks: int, count: int, record: int) -> NDArray[np.int64]:
    """Where the ones of a tile are if all high bits are 0, (chunks, count)."""
    return np.arange(chunks)[:, None] * record + np.arange(count)


def _in_records(ones: NDArray[np.int64], starts: NDArray[np.int64], record: int) -> bool:
    """Whether the ascending places of each row (chunks, count) are in the record that begins at its start."""
    return bool(np.all(ones[:, 0] >= starts) and np.all(ones[:, -1] < starts + record))
