"""Updates <-> packed uint8 arrays named `{rows}x{cols}.{field}`, and their digest. numpy only.

Reading trusts nothing: whatever `unpack_*` returns satisfies every statement in `updates.py`. An array that would be
empty is left out. Source: docs/decisions/0001-first-slice.md, section 2.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from algorithms.bits import pack_bits, packed_size, signed, unpack_bits
from algorithms.layout import ParameterLayout, is_dense, kept
from algorithms.updates import AggregateUpdate, Codec, Coefficients, Shape, SparseUpdate, UpdateCoefficients, merge

__all__ = [
    "INT8_LIMIT",
    "MAX_SCALE",
    "VALUE_LIMITS",
    "AggregateUpdate",
    "Arrays",
    "Codec",
    "Coefficients",
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

MAX_SCALE = 2.0**112
"""Keeps every value finite in float32: 127 * 2^112 < 2^119."""

EXPONENTS = (-1000, 120)
"""Bounds of an update's exponents: 127 * 2^120 is finite in float32, and 4 * 2^117 is what MAX_SCALE can lead to."""

VALUE_LIMITS = {4: 7, 6: 31, 8: 127}
"""Bits per value of an update -> largest magnitude."""

INT8_LIMIT = 127


def index_bits(elements: int) -> int:
    """Bits of a position in a chunk: `ceil(log2 n)`; 0 for dense chunks, whose positions are not sent."""
    return 0 if is_dense(elements) else (elements - 1).bit_length()


def bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The nearest bfloat16 of finite float32 values, ties to even, as its 16 bits."""
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def quantise(values: NDArray[np.float32], codec: Codec) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Integers (m, k) and one bfloat16-representable scale (m,) per row of finite float32 values (m, k), k > 0.

    `sign`: q = -1 where negative, else 1, scale = mean magnitude. `int8`: scale = largest magnitude / 127, q = nearest.
    Scales above MAX_SCALE are cut. Raises ValueError on another codec.
    """
    _check_codec(codec)
    if codec == "sign":
        scales = _scales(np.abs(values).mean(axis=1, dtype=np.float64))
        return np.where(values < 0, np.int8(-1), np.int8(1)), scales
    scales = _scales(np.abs(values).max(axis=1).astype(np.float64) / INT8_LIMIT)
    divisors = np.where(scales > 0, scales, np.float32(1)).astype(np.float64)
    ratio = np.rint(values / divisors[:, None])
    return np.clip(ratio, -INT8_LIMIT, INT8_LIMIT).astype(np.int8), scales


def pack_contribution(update: SparseUpdate, layout: ParameterLayout, codec: Codec) -> Arrays:
    """The arrays `indices`, `values` and `scales` of a contribution, or of a rank's part of it.

    Raises ValueError if the contribution was made with another codec or has chunks that are not in the layout.
    """
    _check_codec(codec)
    if update.codec != codec:
        raise ValueError(f"the contribution was made with codec {update.codec!r}, not {codec!r}")
    arrays: Arrays = {}
    for shape, sent in update.shapes.items():
        if shape not in layout.shapes or sent.chunks[-1:].max(initial=-1) >= layout.chunk_count:
            raise ValueError(f"the layout has no such chunks of shape {shape}")
        values = sent.values.reshape(-1)
        fields = {
            "values": pack_bits(values < 0, 1) if codec == "sign" else values.view(np.uint8),
            "scales": _to_bytes(bfloat16(sent.scales), "<u2"),
        }
        if width := index_bits(shape[0] * shape[1]):
            fields["indices"] = pack_bits(sent.indices, width)
        _store(arrays, shape, fields)
    return arrays


def unpack_contribution(
    arrays: Mapping[str, NDArray[np.uint8]],
    layout: ParameterLayout,
    *,
    codec: Codec,
    k: int,
    absent: Collection[str],
    chunks: range | None = None,
) -> SparseUpdate:
    """Reads a contribution, or a rank's part of it, from an untrusted source; `absent` holds tensor names.

    Raises ValueError that names the array or the tensor and the reason.
    """
    _check_codec(codec)
    unknown = sorted(set(absent) - layout.index.keys())
    if unknown:
        raise ValueError(f"absent tensors are not in the layout: {', '.join(unknown[:5])}")
    missing = frozenset(layout.index[name] for name in absent)
    reader = _Reader(arrays, layout)
    shapes = {}
    for shape in layout.shapes:
        elements = shape[0] * shape[1]
        count = kept(k, elements, layout.chunk)
        numbers = layout.select(shape, missing, chunks)
        if not numbers.size:
            continue
        scales = (reader.words(shape, "scales", numbers.size).astype(np.uint32) << np.uint32(16)).view(np.float32)
        reader.check(
            shape, ~(scales >= 0) | (scales > MAX_SCALE), numbers, "scale is negative, not finite or too large"
        )
        total = numbers.size * count
        if codec == "sign":
            values = 1 - 2 * reader.unpack(shape, "values", total, 1).astype(np.int8)
        else:
            values = reader.bytes(shape, "values", total).view(np.int8)
            reader.check(shape, (values == -128).reshape(-1, count).any(axis=1), numbers, "value -128")
        indices = reader.indices(shape, numbers, np.full(numbers.size, count, np.int64))
        grid = (numbers.size, count)
        shapes[shape] = Coefficients(numbers, indices.reshape(grid), values.reshape(grid), scales)
    reader.finish()
    return SparseUpdate(shapes, missing, codec)


def pack_update(update: AggregateUpdate, layout: ParameterLayout) -> Arrays:
    """The arrays of an update, with `present`: one bit per tensor, first tensor in the lowest bit."""
    present = np.ones(len(layout.tensors), np.uint8)
    present[list(update.absent)] = 0
    arrays: Arrays = {"present": pack_bits(present, 1)} if present.size else {}
    for shape, part in update.shapes.items():
        fields = {"bits": part.bits, "exponents": _to_bytes(part.exponents, "<i2")}
        if width := index_bits(shape[0] * shape[1]):
            fields["counts"] = _to_bytes(part.counts, "<u2")
            fields["indices"] = pack_bits(part.indices, width)
        bits = np.repeat(part.bits, part.counts)
        for value_bits in VALUE_LIMITS:
            fields[f"values{value_bits}"] = pack_bits(part.values[bits == value_bits], value_bits)
        _store(arrays, shape, fields)
    return arrays


def unpack_update(arrays: Mapping[str, NDArray[np.uint8]], layout: ParameterLayout) -> AggregateUpdate:
    """Reads an update from an untrusted source. Raises ValueError that names the array or the tensor and the reason."""
    reader = _Reader(arrays, layout)
    present = reader.take("present", packed_size(len(layout.tensors), 1))
    flags = unpack_bits(present, 1, len(layout.tensors))
    absent = frozenset(np.flatnonzero(flags == 0).tolist())
    shapes = {}
    for shape in layout.shapes:
        numbers = layout.select(shape, absent)
        if numbers.size:
            shapes[shape] = _read_update(reader, shape, numbers)
    reader.finish()
    return AggregateUpdate(shapes, absent)


def _read_update(reader: "_Reader", shape: Shape, numbers: NDArray[np.int64]) -> UpdateCoefficients:
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
            raise ValueError(f"{_label(shape, f'values{width}')}: value below {-limit}")
    owners = np.repeat(numbers, counts)
    if not dense:
        reader.check(shape, values == 0, owners, "zero among the coefficients")
    return UpdateCoefficients(numbers, counts, reader.indices(shape, numbers, counts), values, exponents, bits)


class _Reader:
    """Takes arrays of exact size, and knows which of them nobody has asked for."""

    def __init__(self, arrays: Mapping[str, NDArray[np.uint8]], layout: ParameterLayout) -> None:
        self._arrays = arrays
        self._layout = layout
        self._left = set(arrays)

    def take(self, name: str, size: int) -> NDArray[np.uint8]:
        """The array of that name, of exactly `size` bytes; one of no bytes must be missing."""
        if size == 0:
            return np.empty(0, np.uint8)
        array = self._arrays.get(name)
        if array is None:
            raise ValueError(f"array {name} is missing")
        if array.dtype != np.uint8 or array.shape != (size,):
            raise ValueError(f"array {name} must be {size} uint8, got {array.dtype} of shape {array.shape}")
        self._left.discard(name)
        return array

    def bytes(self, shape: Shape, field: str, size: int) -> NDArray[np.uint8]:
        return np.ascontiguousarray(self.take(_label(shape, field), size))

    def words(self, shape: Shape, field: str, count: int) -> NDArray[np.uint16]:
        return self.bytes(shape, field, 2 * count).view("<u2").astype(np.uint16)

    def unpack(self, shape: Shape, field: str, count: int, width: int) -> NDArray[np.uint16]:
        data = self.bytes(shape, field, packed_size(count, width))
        try:
            return unpack_bits(data, width, count)
        except ValueError as error:
            raise ValueError(f"array {_label(shape, field)}: {error}") from None

    def indices(self, shape: Shape, numbers: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.uint16]:
        """Positions, checked to be in range and ascending within each chunk."""
        elements = shape[0] * shape[1]
        width = index_bits(elements)
        if not width:
            return np.tile(np.arange(elements, dtype=np.uint16), numbers.size)
        indices = self.unpack(shape, "indices", int(counts.sum()), width)
        owners = np.repeat(numbers, counts)
        self.check(shape, indices >= elements, owners, f"index not below {elements}")
        descends = (indices[1:] <= indices[:-1]) & (owners[1:] == owners[:-1])
        self.check(shape, descends, owners[1:], "indices do not ascend")
        return indices

    def check(self, shape: Shape, wrong: NDArray[np.bool_], numbers: NDArray[np.int64], reason: str) -> None:
        """Raises ValueError about the first chunk for which `wrong` holds."""
        if np.any(wrong):
            chunk = int(numbers[np.argmax(wrong)])
            raise ValueError(f"tensor {self._layout.tensor_of(chunk)!r}, chunk {chunk} {shape}: {reason}")

    def finish(self) -> None:
        if self._left:
            raise ValueError(f"unexpected arrays: {', '.join(sorted(self._left)[:5])}")


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


def _scales(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """Cuts at MAX_SCALE and rounds to bfloat16."""
    words = bfloat16(np.minimum(values, MAX_SCALE).astype(np.float32))
    return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _check_codec(codec: str) -> None:
    if codec not in get_args(Codec):
        raise ValueError(f"codec must be one of {get_args(Codec)}, got {codec!r}")


def _label(shape: Shape, field: str) -> str:
    return f"{shape[0]}x{shape[1]}.{field}"


def _to_bytes(values: NDArray[np.uint16] | NDArray[np.int16] | NDArray[np.int64], dtype: str) -> NDArray[np.uint8]:
    return np.ascontiguousarray(values.astype(dtype)).view(np.uint8)


def _store(arrays: Arrays, shape: Shape, fields: Mapping[str, NDArray[np.uint8]]) -> None:
    """Adds the fields that are not empty."""
    arrays.update({_label(shape, field): data for field, data in fields.items() if data.size})
