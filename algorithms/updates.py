"""Sparse updates as arrays: what a site contributes, and what the aggregate of a round holds. numpy only.

Source: docs/decisions/0002-algorithms.md, sections 3 and 4.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "CODEC_BITS",
    "CODEC_LIMITS",
    "AggregateUpdate",
    "Codec",
    "Coefficients",
    "Indices",
    "Shape",
    "SparseUpdate",
    "UpdateCoefficients",
    "merge",
    "restrict",
]

Shape = tuple[int, int]
"""Rows and columns of a chunk."""

Codec = Literal["sign", "int2", "int4", "int8", "int16"]
"""How the values of a contribution are sent (section 3)."""

CODEC_LIMITS: Mapping[Codec, int] = {"sign": 1, "int2": 3, "int4": 7, "int8": 127, "int16": 32767}
"""Largest magnitude of a sent integer."""

CODEC_BITS: Mapping[Codec, int] = {"sign": 1, "int2": 2, "int4": 4, "int8": 8, "int16": 16}
"""Bits of a sent integer."""

Indices = Literal["packed", "compact"]
"""How the indices of a contribution are sent (section 4)."""


@dataclass(frozen=True)
class Coefficients:
    """What one site sends of m chunks of one shape; the value of a coefficient is `values * scales`."""

    chunks: NDArray[np.int64]
    """(m,) ascending chunk numbers."""
    indices: NDArray[np.uint16]
    """(m, k) positions in the row-major chunk, ascending; every one of them for dense chunks."""
    values: NDArray[np.int8 | np.int16]
    """(m, k) integers of magnitude up to `CODEC_LIMITS`, none of them even for `sign` and `int2`; int16 for `int16`."""
    scales: NDArray[np.float32]
    """(m,) finite, not negative, representable in bfloat16; 0: nothing from this chunk."""


@dataclass(frozen=True)
class SparseUpdate:
    """A site's contribution, or a rank's part of it."""

    shapes: Mapping[Shape, Coefficients]
    absent: frozenset[int]
    """Positions of the tensors that have no gradient so far and take no bytes."""
    codec: Codec = "sign"
    """Bounds the values, and so fixes the exponent with which they are aggregated."""


@dataclass(frozen=True)
class UpdateCoefficients:
    """The aggregate of m chunks of one shape; the value of a coefficient is `values * 2^exponents`."""

    chunks: NDArray[np.int64]
    """(m,) ascending chunk numbers."""
    counts: NDArray[np.int64]
    """(m,) coefficients of each chunk."""
    indices: NDArray[np.uint16]
    """(sum of counts,) positions, ascending within a chunk."""
    values: NDArray[np.int8]
    """(sum of counts,) integers; zeros occur in dense chunks only."""
    exponents: NDArray[np.int16]
    """(m,) powers of two; 0 where a chunk has no value but zero."""
    bits: NDArray[np.uint8]
    """(m,) bits per value: 4, 6 or 8."""


@dataclass(frozen=True)
class AggregateUpdate:
    """The update of a round: every chunk of every tensor that has at least one non-zero coefficient."""

    shapes: Mapping[Shape, UpdateCoefficients]
    absent: frozenset[int]
    """Positions of the tensors without coefficients: they are neither updated nor decayed."""


def merge(shards: Sequence[SparseUpdate]) -> SparseUpdate:
    """Joins the contributions of ranks that own consecutive chunk ranges, given in rank order.

    Raises ValueError if there is none, if they disagree about codec or absent tensors, or if chunks do not ascend.
    """
    if not shards:
        raise ValueError("nothing to merge")
    if len({shard.codec for shard in shards}) > 1:
        raise ValueError(f"ranks disagree about the codec: {[shard.codec for shard in shards]}")
    if any(shard.absent != shards[0].absent for shard in shards):
        raise ValueError(f"ranks disagree about absent tensors: {[sorted(shard.absent) for shard in shards]}")
    merged = {}
    for shape in sorted({shape for shard in shards for shape in shard.shapes}):
        parts = [shard.shapes[shape] for shard in shards if shape in shard.shapes]
        joined = Coefficients(
            chunks=_join([part.chunks for part in parts]),
            indices=_join([part.indices for part in parts]),
            values=_join([part.values for part in parts]),
            scales=_join([part.scales for part in parts]),
        )
        if np.any(np.diff(joined.chunks) <= 0):
            raise ValueError(f"chunks {shape} of the ranks overlap or are out of order")
        merged[shape] = joined
    return SparseUpdate(merged, shards[0].absent, shards[0].codec)


def restrict(update: SparseUpdate, chunks: range) -> SparseUpdate:
    """The chunks of a contribution that lie in the range; copies, unless all do: so the rest of it can be forgotten."""
    shapes = {}
    for shape, sent in update.shapes.items():
        part = slice(*np.searchsorted(sent.chunks, (chunks.start, chunks.stop)))
        if part == slice(0, sent.chunks.size):
            shapes[shape] = sent
            continue
        shapes[shape] = Coefficients(
            chunks=sent.chunks[part].copy(),
            indices=sent.indices[part].copy(),
            values=sent.values[part].copy(),
            scales=sent.scales[part].copy(),
        )
    return SparseUpdate(shapes, update.absent, update.codec)


def _join(parts: list[NDArray[Any]]) -> NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
