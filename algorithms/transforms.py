"""Orthonormal bases and their integer forms, whose bits are part of the layout digest. numpy only.

A chunk X of r x c has the coefficients `L X R'` with the orthonormal L of length r and R of length c. Source:
docs/decisions/0002-algorithms.md, section 2; rules B1, B5, B11.
"""

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

__all__ = ["DCT_LIMIT", "MAX_LENGTH", "TRANSFORMS", "Basis", "Transform", "basis", "basis_digest"]

Transform = Literal["dct", "hadamard", "random", "identity"]
TRANSFORMS: tuple[Transform, ...] = get_args(Transform)

MAX_LENGTH = 128
"""The longest piece of a dimension, hence the longest basis."""

DCT_LIMIT = 126
"""Largest magnitude of an integer DCT entry: at 127 some entries fall on a rounding tie, which libm would decide."""


@dataclass(frozen=True, eq=False)
class Basis:
    """One side of a transform, read-only: row i is frequency i, column j a position."""

    orthonormal: NDArray[np.float64]
    """(length, length)."""
    integers: NDArray[np.int8]
    """(length, length): `rint(scale * orthonormal)`; the inverse transform is computed with these, exactly."""
    scale: float
    limit: int
    """Largest magnitude of `integers`."""


def basis(transform: Transform, length: int, step: int = 0) -> Basis:
    """The basis of `length` points; only `random` depends on the step.

    Raises ValueError unless 1 <= length <= 128 and the transform is known.
    """
    if not 1 <= length <= MAX_LENGTH:
        raise ValueError(f"basis length must be 1 to {MAX_LENGTH}, got {length}")
    if transform == "random":
        return _random(length, step)
    if transform not in TRANSFORMS:
        raise ValueError(f"transform must be one of {TRANSFORMS}, got {transform!r}")
    return _fixed(transform, length)


def basis_digest(transform: Transform, lengths: Iterable[int]) -> str:
    """SHA-256 (hex) of the row-major bytes of the integer bases of the distinct lengths, shortest first, at step 0."""
    digest = hashlib.sha256()
    for length in sorted(set(lengths)):
        digest.update(basis(transform, length).integers.tobytes())
    return digest.hexdigest()


@lru_cache(maxsize=3 * MAX_LENGTH)
def _fixed(transform: Transform, length: int) -> Basis:
    if transform == "dct":
        orthonormal = _dct(length)
        scale = float(DCT_LIMIT / np.abs(orthonormal).max())
        return _freeze(orthonormal, np.rint(orthonormal * scale).astype(np.int8), scale, DCT_LIMIT)
    if transform == "hadamard" and length & (length - 1) == 0:
        matrix = np.ones((1, 1), np.int8)
        while len(matrix) < length:
            matrix = np.block([[matrix, matrix], [matrix, -matrix]])
        scale = math.sqrt(length)
        return _freeze(matrix / scale, matrix, scale, 1)
    return _freeze(np.eye(length), np.eye(length, dtype=np.int8), 1.0, 1)


def _dct(length: int) -> NDArray[np.float64]:
    """Orthonormal DCT-II. The angle is reduced in integers, so that no entry is worse than that of a small angle."""
    points = np.arange(length)
    quarter_turns = np.outer(points, 2 * points + 1) % (4 * length)
    matrix: NDArray[np.float64] = np.cos(quarter_turns * (math.pi / (2 * length))) * math.sqrt(2 / length)
    matrix[0] = math.sqrt(1 / length)
    return matrix


@lru_cache(maxsize=MAX_LENGTH)
def _random(length: int, step: int) -> Basis:
    """Hadamard, or DCT where that is none, with columns permuted and signed by a hash of length and step.

    The hash, unlike a library's generator, gives the same numbers for ever.
    """
    base = _fixed("hadamard" if length & (length - 1) == 0 else "dct", length)
    stream = hashlib.shake_256(f"isthmus random basis {length} {step}".encode()).digest(9 * length)
    order = np.frombuffer(stream[: 8 * length], "<u8").argsort(kind="stable")
    signs = 1 - 2 * (np.frombuffer(stream[8 * length :], np.uint8) & 1).astype(np.int8)
    return _freeze(base.orthonormal[:, order] * signs, base.integers[:, order] * signs, base.scale, base.limit)


def _freeze(orthonormal: NDArray[np.float64], integers: NDArray[np.int8], scale: float, limit: int) -> Basis:
    for matrix in (orthonormal, integers):
        matrix.setflags(write=False)
    return Basis(orthonormal, integers, scale, limit)
