"""Unsigned and two's complement integers of 1 to 16 bits, packed without gaps in little-endian bit order.

Eight values of w bits are a group of w bytes. Groups are worked on in tiles that stay in cache.
"""

import numpy as np
from numpy.typing import NDArray

from algorithms import kernels

__all__ = ["check_packed", "pack_bits", "packed_size", "signed", "unpack_bits"]

TILE_GROUPS = 1 << 14

WORD_BYTES = 4
"""A value begins at most 7 bits into a byte and has at most 16 bits: it lies within one 32-bit word."""


def packed_size(count: int, width: int) -> int:
    """Bytes that `count` values of `width` bits take."""
    return -(-count * width // 8)


def check_packed(data: NDArray[np.uint8], width: int, count: int) -> None:
    """Raises ValueError unless data is exactly `packed_size(count, width)` bytes with the unused bits 0."""
    size = packed_size(count, width)
    if data.size != size:
        raise ValueError(f"{count} values of {width} bits take {size} bytes, got {data.size}")
    if count * width % 8 and int(data[-1]) >> (count * width % 8):
        raise ValueError("the unused bits of the last byte are not 0")


def pack_bits(values: NDArray[np.integer] | NDArray[np.bool_], width: int) -> NDArray[np.uint8]:
    """The low `width` bits of each value: value i in bits i*width to (i+1)*width of the stream, uint8 (packed_size,).

    Unused bits of the last byte are 0. Raises ValueError unless 1 <= width <= 16.
    """
    _check_width(width)
    flat = values.reshape(-1)
    if width == 1:
        return np.packbits(flat if flat.dtype == np.bool_ else flat & 1, bitorder="little")
    if kernels.compiled is not None:
        data = np.empty(packed_size(flat.size, width), np.uint8)
        small = flat.itemsize <= 2 and flat.dtype != np.bool_
        kernels.compiled.pack_bits(np.ascontiguousarray(flat if small else flat.astype(np.uint16)), width, data)
        return data
    packed = np.empty((-(-flat.size // 8), width), np.uint8)
    for start in range(0, len(packed), TILE_GROUPS):
        _pack_tile(flat[8 * start : 8 * (start + TILE_GROUPS)], packed[start : start + TILE_GROUPS])
    return packed.reshape(-1)[: packed_size(flat.size, width)]


def _pack_tile(values: NDArray[np.integer] | NDArray[np.bool_], packed: NDArray[np.uint8]) -> None:
    """Fills packed (groups, width) with at most 8 * groups values."""
    groups, width = packed.shape
    padded = np.zeros(8 * groups, np.uint16)
    padded[: values.size] = values
    padded &= np.uint16((1 << width) - 1)
    lanes = np.ascontiguousarray(padded.reshape(groups, 8).T)
    for byte in range(width):
        first = 8 * byte // width
        total = lanes[first] >> (8 * byte - first * width)
        for lane in range(first + 1, (8 * byte + 7) // width + 1):
            total |= lanes[lane] << (lane * width - 8 * byte)
        packed[:, byte] = total


def unpack_bits(data: NDArray[np.uint8], width: int, count: int) -> NDArray[np.uint8 | np.uint16]:
    """The inverse of `pack_bits`, (count,): uint8 of up to 8 bits, uint16 above.

    Raises ValueError unless data is exactly `packed_size(count, width)` bytes with the unused bits 0.
    """
    _check_width(width)
    check_packed(data, width, count)
    if width == 1:
        return np.unpackbits(data, count=count, bitorder="little")
    dtype = np.uint8 if width <= 8 else np.uint16
    if kernels.compiled is not None:
        flat: NDArray[np.uint8 | np.uint16] = np.empty(count, dtype)
        kernels.compiled.unpack_bits(np.ascontiguousarray(data), width, flat)
        return flat
    values = np.empty((-(-count // 8), 8), dtype)
    for start in range(0, len(values), TILE_GROUPS):
        _unpack_tile(data[start * width : (start + TILE_GROUPS) * width], width, values[start : start + TILE_GROUPS])
    return values.reshape(-1)[:count]


def _unpack_tile(data: NDArray[np.uint8], width: int, values: NDArray[np.uint8 | np.uint16]) -> None:
    """Fills values (groups, 8) from at most groups * width bytes."""
    groups = len(values)
    padded = np.zeros(groups * width + WORD_BYTES, np.uint8)
    padded[: data.size] = data
    for lane in range(8):
        byte, shift = divmod(lane * width, 8)
        words: NDArray[np.uint32] = np.ndarray((groups,), "<u4", padded.data, byte, (width,))
        values[:, lane] = words >> np.uint32(shift) & np.uint32((1 << width) - 1)


def signed(values: NDArray[np.uint8 | np.uint16], width: int) -> NDArray[np.int8 | np.int16]:
    """Reads unsigned values of `width` bits as two's complement: int8 from uint8, int16 from uint16."""
    spare = 8 * values.itemsize - width
    shifted: NDArray[np.int8 | np.int16] = (values << spare).view(np.int8 if values.itemsize == 1 else np.int16)
    shifted >>= spare
    return shifted


def _check_width(width: int) -> None:
    if not 1 <= width <= 16:
        raise ValueError(f"width must be 1 to 16 bits, got {width}")
