"""The values of a contribution: float32 -> integers and one scale per chunk -> bits, and back. numpy only.

Source: docs/decisions/0002-algorithms.md, section 3.
"""

from typing import get_args

import numpy as np
from numpy.typing import NDArray

from algorithms.bits import pack_bits, signed, unpack_bits
from algorithms.updates import CODEC_BITS, CODEC_LIMITS, Codec

__all__ = ["MAX_SCALE", "bfloat16", "check_codec", "from_bfloat16", "pack_values", "quantise", "unpack_values"]

MAX_SCALE = 2.0**96
"""Keeps every value below 2^111, and so finite in float32 even when the aggregate weights it."""


def check_codec(codec: str) -> None:
    """Raises ValueError unless it is a `Codec`."""
    if codec not in get_args(Codec):
        raise ValueError(f"codec must be one of {get_args(Codec)}, got {codec!r}")


def bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The nearest bfloat16 of finite float32 values, ties to even, as its 16 bits."""
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def from_bfloat16(words: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The float32 values of bfloat16 bits."""
    return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)


def quantise(values: NDArray[np.float32], codec: Codec) -> tuple[NDArray[np.int8 | np.int16], NDArray[np.float32]]:
    """Integers (m, k) and one bfloat16-representable scale (m,) per row of finite float32 values (m, k), k > 0.

    `sign`: q = -1 where negative, else 1; scale = mean magnitude. Others: q = the nearest integer that the codec has;
    scale = largest magnitude / limit, rounded up, so that no value is cut. Scales above MAX_SCALE are, and then values
    too. Raises ValueError on another codec.
    """
    check_codec(codec)
    magnitudes = np.abs(values)
    if codec == "sign":
        return _signed_like(values, np.int8(1)), _scales(magnitudes.mean(axis=1, dtype=np.float64))
    limit = CODEC_LIMITS[codec]
    scales = _scales(magnitudes.max(axis=1).astype(np.float64) / limit, up=True)
    if codec == "int2":
        return _signed_like(values, np.where(magnitudes > 2 * scales[:, None], np.int8(3), np.int8(1))), scales
    ratios = values / np.where(scales > 0, scales, np.float32(1))[:, None]
    integers = np.clip(np.rint(ratios, out=ratios), -limit, limit, out=ratios)
    return integers.astype(np.int16 if codec == "int16" else np.int8), scales


def pack_values(values: NDArray[np.int8 | np.int16], codec: Codec) -> NDArray[np.uint8]:
    """The integers of a contribution as bits: `sign` 1 where negative, `int2` (q + 3) / 2, others two's complement."""
    if codec == "sign":
        return pack_bits(values < 0, 1)
    return pack_bits((values + 3) >> 1 if codec == "int2" else values, CODEC_BITS[codec])


def unpack_values(data: NDArray[np.uint8], codec: Codec, count: int) -> NDArray[np.int8 | np.int16]:
    """The inverse of `pack_values`, (count,): int16 for `int16`, else int8. Raises ValueError as `unpack_bits` does.

    The most negative number of two's complement, which no codec has, is for the caller to refuse.
    """
    width = CODEC_BITS[codec]
    words = unpack_bits(data, width, count)
    if codec == "sign":
        return 1 - 2 * words.view(np.int8)
    return 2 * words.view(np.int8) - 3 if codec == "int2" else signed(words, width)


def _signed_like(values: NDArray[np.float32], magnitudes: NDArray[np.int8] | np.int8) -> NDArray[np.int8]:
    return np.where(values < 0, -magnitudes, magnitudes)


def _scales(values: NDArray[np.float64], up: bool = False) -> NDArray[np.float32]:
    """Cuts at MAX_SCALE and rounds to bfloat16: to the nearest, or up."""
    cut = np.minimum(values, MAX_SCALE)
    words = bfloat16(cut.astype(np.float32))
    if up:
        words += from_bfloat16(words) < cut
    return from_bfloat16(words)
