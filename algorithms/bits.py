"""Unsigned and two's complement integers of 1 to 16 bits, packed without gaps in little-endian bit order."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["pack_bits", "packed_size", "signed", "unpack_bits"]


def packed_size(count: int, width: int) -> int:
    """Bytes that `count` values of `width` bits take."""
    return -(-count * width // 8)


def pack_bits(values: NDArray[np.integer] | NDArray[np.bool_], width: int) -> NDArray[np.uint8]:
    """The low `width` bits of each value: value i in bits i*width to (i+1)*width of the stream, uint8 (packed_size,).

    Unused bits of the last byte are 0. Raises ValueError unless 1 <= width <= 16.
    """
    _check_width(width)
    groups = -(-values.size // 8)
    padded = np.zeros(groups * 8, np.uint16)
    padded[: values.size] = values.reshape(-1).astype(np.uint16) & np.uint16((1 << width) - 1)
    lanes = np.ascontiguousarray(padded.reshape(groups, 8).T)
    packed = np.empty((groups, width), np.uint8)
    for byte in range(width):
        total = np.zeros(groups, np.uint16)
        for lane in range(8 * byte // width, (8 * byte + 7) // width + 1):
            shift = 8 * byte - lane * width
            total |= lanes[lane] >> shift if shift >= 0 else lanes[lane] << -shift
        packed[:, byte] = total & 0xFF
    return packed.reshape(-1)[: packed_size(values.size, width)]


def unpack_bits(data: NDArray[np.uint8], width: int, count: int) -> NDArray[np.uint16]:
    """The inverse of `pack_bits`, uint16 (count,).

    Raises ValueError unless data is exactly `packed_size(count, width)` bytes with the unused bits 0.
    """
    _check_width(width)
    size = packed_size(count, width)
    if data.size != size:
        raise ValueError(f"{count} values of {width} bits take {size} bytes, got {data.size}")
    if count * width % 8 and int(data[-1]) >> (count * width % 8):
        raise ValueError("the unused bits of the last byte are not 0")
    groups = -(-count // 8)
    padded = np.zeros(groups * width, np.uint8)
    padded[:size] = data
    lanes = np.ascontiguousarray(padded.reshape(groups, width).T).astype(np.uint32)
    values = np.empty((groups, 8), np.uint16)
    for lane in range(8):
        total = np.zeros(groups, np.uint32)
        first = lane * width // 8
        for byte in range(first, (lane * width + width - 1) // 8 + 1):
            total |= lanes[byte] << np.uint32(8 * (byte - first))
        values[:, lane] = (total >> np.uint32(lane * width % 8)) & np.uint32((1 << width) - 1)
    return values.reshape(-1)[:count]


def signed(values: NDArray[np.uint16], width: int) -> NDArray[np.int8]:
    """Reads unsigned values of `width` <= 8 bits as two's complement, int8."""
    half = 1 << (width - 1)
    return ((values.astype(np.int16) ^ half) - half).astype(np.int8)


def _check_width(width: int) -> None:
    if not 1 <= width <= 16:
        raise ValueError(f"width must be 1 to 16 bits, got {width}")
