"""The mean of what several sites hold of a buffer, block by block, in its own type. numpy only."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from algorithms.tensor_file import FLOATS, as_floats
from algorithms.values import bfloat16

__all__ = ["mean_block"]


@np.errstate(over="ignore", invalid="ignore")
def mean_block(copies: Sequence[bytes], weights: Sequence[int], dtype: str) -> bytes:
    """The bytes of a block of one buffer, of the same block of each copy.

    Equal copies are what they are; types other than F64, F32, F16 and BF16 are the first copy's. Otherwise each element
    is the weighted mean of those that are finite, in float64, rounded once; where there is none, the first copy's.
    """
    if len(set(copies)) == 1 or dtype not in (*FLOATS, "BF16"):
        return copies[0]
    total = weight_of = np.zeros(1)
    for copy, weight in zip(copies, weights, strict=True):
        values = as_floats(copy, dtype).astype(np.float64)
        counts = np.isfinite(values) * float(weight)
        total = total + np.where(counts > 0, values, 0.0) * counts
        weight_of = weight_of + counts
    first = np.frombuffer(copies[0], "<u2" if dtype == "BF16" else FLOATS[dtype])
    mean = total / np.where(weight_of > 0, weight_of, 1.0)
    rounded = _bfloat16(mean) if dtype == "BF16" else mean.astype(FLOATS[dtype])
    return np.where(weight_of > 0, rounded, first).astype(first.dtype).tobytes()


def _bfloat16(values: NDArray[np.float64]) -> NDArray[np.uint16]:
    """Rounded once: on the way, float32 is cut, and its last bit says whether anything was cut off."""
    nearest = values.astype(np.float32)
    cut = np.where(np.abs(nearest.astype(np.float64)) > np.abs(values), np.nextafter(nearest, np.float32(0)), nearest)
    bits = cut.view(np.uint32) | (cut.astype(np.float64) != values)
    return bfloat16(bits.astype(np.uint32).view(np.float32))
