"""Parts (A5): the chunks of a layout, cut into ranges of which each one's contribution fits a message. numpy only.

Source: docs/decisions/0004-durability.md, section 1.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np

from algorithms.aggregate import join
from algorithms.indices import index_bits, record_bits
from algorithms.indices import low_bits as low_index_bits
from algorithms.layout import ParameterLayout, is_dense, kept
from algorithms.updates import CODEC_BITS, AggregateUpdate, Codec, Indices, Shape, UpdateCoefficients

__all__ = ["PART_BYTES", "cut", "join_parts"]

PART_BYTES = 6 << 20
"""Bytes of the arrays of one part of a contribution, at most."""

_ROUNDING = 3 * 7
"""Bits of a shape's `values`, and `indices` or `low` and `high`, that packing may add at their ends."""
_SCALE = 16


@lru_cache(maxsize=64)
def cut(
    layout: ParameterLayout, k: int, codec: Codec, indices: Indices = "packed", limit: int = PART_BYTES
) -> tuple[range, ...]:
    """Consecutive ranges of all chunk numbers, at least one: each as long as its arrays surely take `limit` bytes.

    A tensor counts whether it will be absent or not, so that layout and settings alone decide. A chunk that takes more
    than `limit` is a part of its own.
    """
    costs = np.zeros(layout.chunk_count, np.int64)
    for block in layout.blocks:
        costs[block.chunks] = _chunk_bits(block.elements, kept(k, block.elements, layout.chunk), codec, indices)
    ends = np.cumsum(costs)
    room = 8 * limit - _ROUNDING * len(layout.shapes)
    cuts = [0]
    while (start := cuts[-1]) < layout.chunk_count:
        before = int(ends[start - 1]) if start else 0
        cuts.append(max(int(np.searchsorted(ends, before + room, side="right")), start + 1))
    return tuple(range(start, stop) for start, stop in pairwise(cuts)) or (range(0),)


def _chunk_bits(elements: int, count: int, codec: Codec, indices: Indices) -> int:
    positions = count * index_bits(elements)
    if indices == "compact" and not is_dense(elements):
        positions = min(positions, count * low_index_bits(elements, count) + record_bits(elements, count))
    return positions + count * CODEC_BITS[codec] + _SCALE


def join_parts(parts: Sequence[AggregateUpdate], layout: ParameterLayout, ranges: Sequence[range]) -> AggregateUpdate:
    """The update of a round, of the updates of its parts, each without the tensors that have no value in it.

    Raises ValueError if the parts are not as many as the ranges, or the ranges not all chunks in order.
    """
    if len(parts) != len(ranges):
        raise ValueError(f"{len(parts)} parts for {len(ranges)} ranges of chunks")
    if len(parts) == 1:
        return parts[0]
    absent = frozenset.intersection(*(part.absent for part in parts))
    return join([_filled(part, layout, absent, chunks) for part, chunks in zip(parts, ranges, strict=True)], layout)


def _filled(part: AggregateUpdate, layout: ParameterLayout, absent: frozenset[int], chunks: range) -> AggregateUpdate:
    """With chunks that have no value but zero where a tensor has its values in other parts."""
    if part.absent == absent:
        return part
    return AggregateUpdate(
        {shape: _filled_shape(part, layout, absent, chunks, shape) for shape in layout.shapes}, absent
    )


def _filled_shape(
    part: AggregateUpdate, layout: ParameterLayout, absent: frozenset[int], chunks: range, shape: Shape
) -> UpdateCoefficients:
    elements = shape[0] * shape[1]
    dense = is_dense(elements)
    numbers = layout.select(shape, absent, chunks)
    counts = np.full(numbers.size, elements if dense else 0, np.int64)
    exponents, bits = np.zeros(numbers.size, np.int16), np.full(numbers.size, 4, np.uint8)
    indices, values = np.empty(0, np.uint16), np.empty(0, np.int8)
    own = part.shapes.get(shape)
    if own is not None:
        rows = np.searchsorted(numbers, own.chunks)
        counts[rows], exponents[rows], bits[rows] = own.counts, own.exponents, own.bits
        indices, values = own.indices, own.values
    if dense:
        indices, values = (
            np.tile(np.arange(elements, dtype=np.uint16), numbers.size),
            np.zeros((numbers.size, elements), np.int8),
        )
        if own is not None:
            values[rows] = own.values.reshape(-1, elements)
        values = values.reshape(-1)
    return UpdateCoefficients(numbers, counts, indices, values, exponents, bits)
