"""What a site uploads of a copy of a fragment in an outer round, in fewer bits, and what is left of it. numpy only.

The pseudo-gradient `anchor - copy` plus what was left of the last one is wanted; `bf16` and `int8` encode it element by
element, `topk` by the largest of its DCT coefficients (`coefficients.py`). What was not encoded is left for the next
outer round. All of it but the choice of coefficients is bit-equal everywhere. Source: docs/decisions/0005-outer.md,
section 4; rules A14, B13.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from algorithms.updates import Codec
from algorithms.values import bfloat16, from_bfloat16

__all__ = [
    "PICKED",
    "SCALED",
    "ElementCodec",
    "OuterCodec",
    "decode",
    "encode",
    "encoded_range",
    "left_over",
    "wanted",
]

OuterCodec = Literal["fp32", "bf16", "int8", "topk"]
"""How a copy is uploaded; `fp32`: as it is, without a pseudo-gradient."""

ElementCodec = Literal["bf16", "int8"]

PICKED: Codec = "int8"
"""How the coefficients of `topk` are coded."""

SCALED = 4096
"""Values of `int8` that share a scale, which precedes them."""

_LIMIT = 127
_SCALE_BYTES = 4
_NAN_WORD = np.uint16(0x7FC0)


def wanted(anchor: NDArray[np.float32], copy: NDArray[np.float32], left: NDArray[np.float32]) -> NDArray[np.float32]:
    """`(anchor - copy) + left`, (n,): what an upload should say."""
    with np.errstate(over="ignore", invalid="ignore"):
        change = anchor - copy
        return change + left


def left_over(wanted: NDArray[np.float32], decoded: NDArray[np.float32]) -> NDArray[np.float32]:
    """`wanted - decoded`, (n,): what the upload did not say. 0 where that is not finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        left = wanted - decoded
    left[~np.isfinite(left)] = 0
    return left


def encoded_range(codec: ElementCodec, start: int, stop: int) -> range:
    """Which bytes of the encoding hold the values `start` to `stop`; `start` is a multiple of `SCALED`."""
    if codec == "bf16":
        return range(2 * start, 2 * stop)
    return range(*(values + _SCALE_BYTES * -(-values // SCALED) for values in (start, stop)))


def encode(codec: ElementCodec, values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """The encoding of flat values, or of some from a multiple of `SCALED` on.

    `bf16`: the nearest bfloat16, little-endian. `int8`: of every `SCALED` values a float32 scale, their largest
    magnitude / 127, and `rint(value / scale)`. Values that are not finite become NaN, under `int8` all of that scale.
    """
    if codec == "bf16":
        words = bfloat16(np.where(np.isfinite(values), values, np.float32(0)))
        words[~np.isfinite(values)] = _NAN_WORD
        return words.astype("<u2", copy=False).view(np.uint8)
    data = np.empty(len(encoded_range(codec, 0, values.size)), np.uint8)
    whole = values.size - values.size % SCALED
    for first, last, width in ((0, whole, SCALED), (whole, values.size, values.size - whole)):
        if first < last:
            part = encoded_range(codec, first, last)
            _encode_rows(values[first:last].reshape(-1, width), data[part.start : part.stop].reshape(-1, width + 4))
    return data


def _encode_rows(values: NDArray[np.float32], rows: NDArray[np.uint8]) -> None:
    """Fills rows (m, 4 + w) of bytes from values (m, w)."""
    scales = np.abs(values).max(axis=1) / np.float32(_LIMIT)
    finite = np.isfinite(scales)
    usable = np.where(finite & (scales > 0), scales, np.float32(1))
    ratios = np.where(finite[:, None], values, np.float32(0)) / usable[:, None]
    scales[~finite] = np.nan
    rows[:, :_SCALE_BYTES] = scales.astype("<f4")[:, None].view(np.uint8)
    rows[:, _SCALE_BYTES:] = np.clip(np.rint(ratios), -_LIMIT, _LIMIT).astype(np.int8).view(np.uint8)


def decode(codec: ElementCodec, data: NDArray[np.uint8], elements: int) -> NDArray[np.float32]:
    """The inverse of `encode`, (elements,), from an untrusted source.

    NaN and infinity are for the caller to find. Raises ValueError on another size, a negative scale or -128.
    """
    size = len(encoded_range(codec, 0, elements))
    if data.size != size:
        raise ValueError(f"{elements} values of {codec} take {size} bytes, got {data.size}")
    if codec == "bf16":
        return from_bfloat16(np.ascontiguousarray(data).view("<u2").astype(np.uint16, copy=False))
    values = np.empty(elements, np.float32)
    whole = elements - elements % SCALED
    for first, last, width in ((0, whole, SCALED), (whole, elements, elements - whole)):
        if first < last:
            part = encoded_range(codec, first, last)
            _decode_rows(data[part.start : part.stop].reshape(-1, width + 4), values[first:last].reshape(-1, width))
    return values


def _decode_rows(rows: NDArray[np.uint8], values: NDArray[np.float32]) -> None:
    """Fills values (m, w) from rows (m, 4 + w) of bytes."""
    scales = np.ascontiguousarray(rows[:, :_SCALE_BYTES]).view("<f4")
    integers = np.ascontiguousarray(rows[:, _SCALE_BYTES:]).view(np.int8)
    if np.any(scales < 0):
        raise ValueError(f"a scale is negative: {scales.min()}")
    if np.any(integers < -_LIMIT):
        raise ValueError(f"a value is below {-_LIMIT}")
    np.multiply(integers, scales, out=values, dtype=np.float32)
