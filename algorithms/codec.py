"""Updates <-> packed uint8 arrays named `{rows}x{cols}.{field}`, and their digest. numpy only.

Reading trusts nothing: whatever `unpack_*` returns satisfies every statement in `updates.py`. An array that would be
empty is left out. Source: docs/decisions/0001-first-slice.md, section 2; 0002-algorithms.md, sections 3 and 4.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from algorithms.bits import pack_bits, packed_size, signed, unpack_bits
from algorithms.indices import check_indices, index_bits, index_sizes, low_bits, pack_indices, unpack_high
from algorithms.layout import ParameterLayout, is_dense, kept
from algorithms.reader import ArrayReader, array_name
from algorithms.updates import (
    CODEC_BITS,
    CODEC_LIMITS,
    AggregateUpdate,
    Codec,
    Coefficients,
    Indices,
    Shape,
    SparseUpdate,
    UpdateCoefficients,
    merge,
)
from algorithms.values import MAX_SCALE, bfloat16, check_codec, from_bfloat16, pack_values, quantise, unpack_values

__all__ = [
    "MAX_SCALE",
    "VALUE_LIMITS",
    "AggregateUpdate",
    "Arrays",
    "Codec",
    "Coefficients",
    "Indices",
    "SparseUpdate",
    "UpdateCoefficients",
    "bfloat16",
    "digest_arrays",
    "index_bits",
    "merge",
    "pack_bits",
    "pack_contribution",
    "pack_update",
    "parameters_digest",
    "quantise",
    "unpack_bits",
    "unpack_contribution",
    "unpack_update",
]

Arrays = dict[str, NDArray[np.uint8]]

EXPONENTS = (-1000, 120)
"""Bounds of an update's exponents: 127 * 2^120 is finite in float32, and MAX_SCALE leads to at most 4 * 2^109."""

MAX_SCALE_WORD = int(bfloat16(np.array([MAX_SCALE], np.float32))[0])
"""MAX_SCALE as bfloat16; the words of negative numbers, infinities and NaN are larger."""

VALUE_LIMITS = {4: 7, 6: 31, 8: 127}
"""Bits per value of an update -> largest magnitude."""


def pack_contribution(
    update: SparseUpdate, layout: ParameterLayout, codec: Codec, indices: Indices = "packed"
) -> Arrays:
    """The arrays of a contribution, or of a rank's part of it: `values`, `scales` and those of `pack_indices`.

    Raises ValueError if the contribution was made with another codec or has chunks that are not in the layout.
    """
    check_codec(codec)
    check_indices(indices)
    if update.codec != codec:
        raise ValueError(f"the contribution was made with codec {update.codec!r}, not {codec!r}")
    arrays: Arrays = {}
    for shape, sent in update.shapes.items():
        if shape not in layout.shapes or sent.chunks[-1:].max(initial=-1) >= layout.chunk_count:
            raise ValueError(f"the layout has no such chunks of shape {shape}")
        fields = {
            "values": pack_values(sent.values, codec),
            "scales": _to_bytes(bfloat16(sent.scales), "<u2"),
            **pack_indices(sent.indices.reshape(-1), _counts(sent.indices), shape[0] * shape[1], indices),
        }
        _store(arrays, shape, fields)
    return arrays


def unpack_contribution(
    arrays: Mapping[str, NDArray[np.uint8]],
    layout: ParameterLayout,
    *,
    codec: Codec,
    k: int,
    absent: Collection[str],
    indices: Indices = "packed",
    chunks: range | None = None,
) -> SparseUpdate:
    """Reads a contribution, or a rank's part of it, from an untrusted source; `absent` holds tensor names.

    What it accepts is the only encoding of what it returns. Raises ValueError that names the array or the tensor and
    the reason.
    """
    check_codec(codec)
    check_indices(indices)
    unknown = sorted(set(absent) - layout.index.keys())
    if unknown:
        raise ValueError(f"absent tensors are not in the layout: {', '.join(unknown[:5])}")
    missing = frozenset(layout.index[name] for name in absent)
    reader = ArrayReader(arrays, layout)
    shapes = {}
    for shape in layout.shapes:
        numbers = layout.select(shape, missing, chunks)
        if numbers.size:
            count = kept(k, shape[0] * shape[1], layout.chunk)
            counts = np.full(numbers.size, count)
            shapes[shape] = Coefficients(
                chunks=numbers,
                indices=_read_indices(reader, shape, numbers, counts, indices).reshape(-1, count),
                values=_read_values(reader, shape, numbers, count, codec),
                scales=_read_scales(reader, shape, numbers),
            )
    reader.finish()
    return SparseUpdate(shapes, missing, codec)


def pack_update(update: AggregateUpdate, layout: ParameterLayout) -> Arrays:
    """The arrays of an update, or of one part, with `present`: one bit per tensor, first tensor in the lowest bit."""
    present = np.ones(len(layout.tensors), np.uint8)
    present[list(update.absent)] = 0
    arrays: Arrays = {"present": pack_bits(present, 1)} if present.size else {}
    for shape, part in update.shapes.items():
        fields = {"bits": part.bits, "exponents": _to_bytes(part.exponents, "<i2")}
        if not is_dense(shape[0] * shape[1]):
            fields["counts"] = _to_bytes(part.counts, "<u2")
            fields |= pack_indices(part.indices, part.counts, shape[0] * shape[1], "compact")
        bits = np.repeat(part.bits, part.counts)
        for value_bits in VALUE_LIMITS:
            fields[f"values{value_bits}"] = pack_bits(part.values[bits == value_bits], value_bits)
        _store(arrays, shape, fields)
    return arrays


def unpack_update(
    arrays: Mapping[str, NDArray[np.uint8]], layout: ParameterLayout, chunks: range | None = None
) -> AggregateUpdate:
    """Reads an update, or the part of it in a range of chunks, from an untrusted source.

    Raises ValueError that names the array or the tensor and the reason.
    """
    reader = ArrayReader(arrays, layout)
    present = reader.take("present", packed_size(len(layout.tensors), 1))
    flags = unpack_bits(present, 1, len(layout.tensors))
    absent = frozenset(np.flatnonzero(flags == 0).tolist())
    shapes = {}
    for shape in layout.shapes:
        numbers = layout.select(shape, absent, chunks)
        if numbers.size:
            shapes[shape] = _read_update(reader, shape, numbers)
    reader.finish()
    return AggregateUpdate(shapes, absent)


def _read_scales(reader: ArrayReader, shape: Shape, numbers: NDArray[np.int64]) -> NDArray[np.float32]:
    words = reader.words(shape, "scales", numbers.size)
    reader.check(shape, words > MAX_SCALE_WORD, numbers, "scale is negative, not finite or too large")
    return from_bfloat16(words)


def _read_values(
    reader: ArrayReader, shape: Shape, numbers: NDArray[np.int64], count: int, codec: Codec
) -> NDArray[np.int8 | np.int16]:
    data = reader.bytes(shape, "values", packed_size(numbers.size * count, CODEC_BITS[codec]))
    with reader.naming(shape, "values"):
        values = unpack_values(data, codec, numbers.size * count).reshape(-1, count)
    limit = CODEC_LIMITS[codec]
    reader.check(shape, values < -limit, numbers, f"value below {-limit}")
    return values


def _read_indices(
    reader: ArrayReader, shape: Shape, numbers: NDArray[np.int64], counts: NDArray[np.int64], form: Indices
) -> NDArray[np.uint16]:
    """Positions (n,), `counts` (m,) in each chunk, checked to be in range and ascending."""
    elements, total = shape[0] * shape[1], int(counts.sum())
    if is_dense(elements):
        return np.tile(np.arange(elements, dtype=np.uint16), numbers.size)
    if "high" in (sizes := index_sizes(elements, total, numbers.size, form)):
        data = reader.bytes(shape, "high", sizes["high"])
        with reader.naming(shape, "high"):
            indices, wrong = unpack_high(data, counts, elements)
        reader.check(shape, wrong, numbers, "the record has not as many ones as the chunk has coefficients")
        if low := low_bits(elements, total, numbers.size):
            indices <<= low
            indices |= reader.unpack(shape, "low", total, low)
    else:
        indices = reader.unpack(shape, "indices", total, index_bits(elements)).astype(np.uint16, copy=False)
    descends = np.zeros(total, np.bool_)
    descends[1:] = indices[1:] <= indices[:-1]
    starts = np.cumsum(counts) - counts
    descends[starts[counts > 0]] = False
    for wrong, reason in (
        (indices >= elements, f"index not below {elements}"),
        (descends, "indices do not ascend"),
    ):
        if np.any(wrong):
            reader.check(shape, wrong, np.repeat(numbers, counts), reason)
    return indices


def _read_update(reader: ArrayReader, shape: Shape, numbers: NDArray[np.int64]) -> UpdateCoefficients:
    elements = shape[0] * shape[1]
    dense = is_dense(elements)
    counts = np.full(numbers.size, elements, np.int64)
    if not dense:
        counts = reader.words(shape, "counts", numbers.size).astype(np.int64)
        reader.check(shape, counts > elements, numbers, f"more than {elements} coefficients")
    exponents = reader.words(shape, "exponents", numbers.size).view(np.int16)
    low, high = EXPONENTS
    reader.check(shape, (exponents < low) | (exponents > high), numbers, f"exponent not in {low} to {high}")
    bits = reader.bytes(shape, "bits", numbers.size)
    reader.check(shape, ~np.isin(bits, list(VALUE_LIMITS)), numbers, "bits per value not 4, 6 or 8")
    widths = np.repeat(bits, counts)
    values = np.empty(widths.size, np.int8)
    for width, limit in VALUE_LIMITS.items():
        mine = widths == width
        packed = reader.unpack(shape, f"values{width}", int(np.count_nonzero(mine)), width)
        values[mine] = signed(packed, width)
        if np.any(packed == limit + 1):
            raise ValueError(f"{array_name(shape, f'values{width}')}: value below {-limit}")
    if not dense and not values.all():
        reader.check(shape, values == 0, np.repeat(numbers, counts), "zero among the coefficients")
    indices = _read_indices(reader, shape, numbers, counts, "compact")
    return UpdateCoefficients(numbers, counts, indices, values, exponents, bits)


def digest_arrays(arrays: Mapping[str, NDArray[np.uint8]]) -> str:
    """SHA-256 (hex) over name, NUL, length as 8 little-endian bytes and bytes of each array, in the order of names."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        data = np.ascontiguousarray(arrays[name])
        digest.update(name.encode() + b"\0" + data.nbytes.to_bytes(8, "little"))
        digest.update(data.data)
    return digest.hexdigest()


def parameters_digest(arrays: Iterable[NDArray[np.float32]]) -> str:
    """SHA-256 (hex) of the little-endian float32 bytes of all tensors, in layout order (rule C3)."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array, "<f4").data)
    return digest.hexdigest()


def _counts(indices: NDArray[np.uint16]) -> NDArray[np.int64]:
    """As many per chunk, of indices (chunks, count)."""
    return np.full(indices.shape[0], indices.shape[1])


def _to_bytes(values: NDArray[np.uint16] | NDArray[np.int16] | NDArray[np.int64], dtype: str) -> NDArray[np.uint8]:
    return np.ascontiguousarray(values.astype(dtype)).view(np.uint8)


def _store(arrays: Arrays, shape: Shape, fields: Mapping[str, NDArray[np.uint8]]) -> None:
    """Adds the fields that are not empty."""
    arrays.update({array_name(shape, field): data for field, data in fields.items() if data.size})
