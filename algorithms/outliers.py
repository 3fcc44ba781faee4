"""The outlier rule (C6): how often a contribution is halved so that it does not decide every sign. numpy only."""

import math
from collections.abc import Sequence

import numpy as np

from algorithms.updates import SparseUpdate

__all__ = ["MAX_HALVINGS", "norm", "outlier_halvings", "squares"]

MAX_HALVINGS = 300


def norm(update: SparseUpdate) -> float:
    """L2 norm of all values of a contribution, in float64."""
    return math.sqrt(squares(update))


def squares(update: SparseUpdate) -> float:
    """Sum of the squares of all values of a contribution, or of a part of it, in float64."""
    total = 0.0
    for sent in update.shapes.values():
        if update.codec == "sign":  # 1 or -1
            chunks = np.full(len(sent.values), float(sent.values.shape[1]))
        else:
            chunks = np.einsum("ij,ij->i", sent.values, sent.values, dtype=np.float64)
        total += float((chunks * np.square(sent.scales, dtype=np.float64)).sum())
    return total


def outlier_halvings(norms: Sequence[float]) -> list[int]:
    """How often to halve each contribution until its norm is at most twice the lower median (rule C6).

    A median of 0 halves nothing. Raises ValueError if a norm is negative or not finite.
    """
    if not all(math.isfinite(value) and value >= 0 for value in norms):
        raise ValueError(f"norms must be finite and not negative, got {list(norms)}")
    limit = 2 * sorted(norms)[(len(norms) - 1) // 2] if norms else 0.0
    return [_halvings(value, limit) for value in norms]


def _halvings(value: float, limit: float) -> int:
    count = 0
    while limit > 0 and math.ldexp(value, -count) > limit and count < MAX_HALVINGS:
        count += 1
    return count
