"""Orthonormal DCT-II bases and their integer approximations, whose bits are part of the layout digest (rule B1)."""

import hashlib
import math
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

__all__ = ["BASIS_LIMIT", "MAX_LENGTH", "basis_digest", "basis_scale", "dct_basis", "integer_basis"]

MAX_LENGTH = 128
"""The longest piece of a dimension, hence the longest basis."""

BASIS_LIMIT = 126
"""Largest magnitude of an integer basis entry: at 127 some entries fall on a rounding tie, which libm would decide."""


@lru_cache(maxsize=MAX_LENGTH)
def dct_basis(length: int) -> NDArray[np.float64]:
    """Orthonormal DCT-II of `length` points, float64 (length, length): row i is frequency i, column j a position.

    The angle is reduced in integers, so that no entry is worse than the cosine of a small angle.
    Raises ValueError unless 1 <= length <= 128.
    """
    if not 1 <= length <= MAX_LENGTH:
        raise ValueError(f"basis length must be 1 to {MAX_LENGTH}, got {length}")
    points = np.arange(length)
    quarter_turns = np.outer(points, 2 * points + 1) % (4 * length)
    basis: NDArray[np.float64] = np.cos(quarter_turns * (math.pi / (2 * length))) * math.sqrt(2 / length)
    basis[0] = math.sqrt(1 / length)
    basis.setflags(write=False)
    return basis


def basis_scale(length: int) -> float:
    """The factor by which entries of `integer_basis(length)` are divided to approximate `dct_basis(length)`."""
    return float(BASIS_LIMIT / np.abs(dct_basis(length)).max())


@lru_cache(maxsize=MAX_LENGTH)
def integer_basis(length: int) -> NDArray[np.int8]:
    """`rint(126 * dct / max|dct|)`, int8 (length, length), rows are frequencies (rule B1)."""
    basis = np.rint(dct_basis(length) * basis_scale(length)).astype(np.int8)
    basis.setflags(write=False)
    return basis


def basis_digest(lengths: Iterable[int]) -> str:
    """SHA-256 (hex) of the row-major bytes of the integer bases of the distinct lengths, shortest first."""
    digest = hashlib.sha256()
    for length in sorted(set(lengths)):
        digest.update(integer_basis(length).tobytes())
    return digest.hexdigest()
