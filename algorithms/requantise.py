"""The averaged integers of a tile of chunks -> few bits per value and a power of two per chunk (rule B4). numpy only.

Integers are up to 2^22 in magnitude: float32 holds them, and their quotients by powers of two.
"""

import numpy as np
from numpy.typing import NDArray

from algorithms import kernels
from algorithms.updates import UpdateCoefficients

__all__ = ["keep_largest", "requantise", "requantise_sparse"]

BITS_BY_NONZEROS = ((148, 4), (512, 6))
"""Up to so many non-zero values in a chunk, so many bits each; 8 above."""


def keep_largest(values: NDArray[np.int32], count: int) -> None:
    """Sets all but the `count` largest magnitudes of each row of (m, w) to 0, in place; the first of equals stays."""
    if values.shape[1] <= count:
        return
    magnitudes = np.abs(values)
    least = np.partition(magnitudes, -count, axis=1)[:, -count, None]
    larger, equal = magnitudes > least, magnitudes == least
    room = count - np.count_nonzero(larger, axis=1, keepdims=True)
    values[~larger & ~(equal & (np.cumsum(equal, axis=1) <= room))] = 0


def requantise_sparse(
    chunks: NDArray[np.int64], indices: NDArray[np.uint16], values: NDArray[np.int32], exponents: NDArray[np.int32]
) -> UpdateCoefficients:
    """What `requantise` does not round to 0, of values (m, w) at these positions of chunks (m,)."""
    if kernels.compiled is None:
        rounded, shifted, bits = requantise(values, exponents)
        keep = rounded != 0
        places = np.flatnonzero(keep)
        counts = np.einsum("ij->i", keep, dtype=np.int32).astype(np.int64)
        return UpdateCoefficients(
            chunks, counts, indices.reshape(-1)[places], rounded.reshape(-1)[places], shifted, bits
        )
    counts = np.empty(chunks.size, np.int64)
    kept, rounded = np.empty(values.size, np.uint16), np.empty(values.size, np.int8)
    shifted, bits = np.empty(chunks.size, np.int16), np.empty(chunks.size, np.uint8)
    most = np.array([nonzeros for nonzeros, _ in BITS_BY_NONZEROS], np.int32)
    total = kernels.compiled.requantise(indices, values, exponents, most, counts, kept, rounded, shifted, bits)
    return UpdateCoefficients(chunks, counts, kept[:total].copy(), rounded[:total].copy(), shifted, bits)


def requantise(
    values: NDArray[np.int32], exponents: NDArray[np.int32]
) -> tuple[NDArray[np.int8], NDArray[np.int16], NDArray[np.uint8]]:
    """Rounded values (m, w), exponents (m,) and bits (m,) of integers (m, w) that count units of `2^exponents`, (m,).

    They are shifted right, ties to even, by the least number with which the largest magnitude of the row fits the bits
    that its non-zeros allow. The exponent of a row of zeros is 0.
    """
    bits = _bits(values)
    peaks = np.abs(values).max(axis=1, initial=0).astype(np.float64)
    shifts = np.maximum(np.frexp(peaks)[1] - (bits - 1), 0)
    shifts += np.rint(np.ldexp(peaks, -shifts)) >= 1 << (bits - 1)
    rounded = values.astype(np.float32)
    rounded *= np.ldexp(np.float32(1), -shifts)[:, None]
    np.rint(rounded, out=rounded)
    shifted = np.where(peaks > 0, exponents + shifts, 0)
    return rounded.astype(np.int8), shifted.astype(np.int16), bits.astype(np.uint8)


def _bits(values: NDArray[np.int32]) -> NDArray[np.int64]:
    """Bits per value of each row; counting is needed only where rows are long."""
    bits = np.full(values.shape[0], 8)
    nonzeros = values.shape[1] if values.shape[1] <= BITS_BY_NONZEROS[0][0] else np.count_nonzero(values, axis=1)
    for most, width in reversed(BITS_BY_NONZEROS):
        bits[nonzeros <= most] = width
    return bits
