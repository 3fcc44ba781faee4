"""The outer step of DiLoCo (rule B13): float64, block by block, in the given order, one final rounding.

numpy only. It knows flat float32 arrays, not fragments, regions or where the copies come from.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "OuterOptimizer",
    "delayed_anchor",
    "heavy_ball",
    "nesterov",
    "outer_update",
    "pseudo_gradient",
    "shifted",
    "weighted_mean",
]

Values = NDArray[np.float32]
OuterOptimizer = Literal["nesterov", "sgd", "average"]

BLOCK = 1 << 18


def weighted_mean(
    copies: Sequence[NDArray[np.float32] | NDArray[np.float64]], weights: Sequence[int]
) -> NDArray[np.float64]:
    """`sum(w_i * x_i) / sum(w_i)` of (n,) copies in the given order, float64 (n,).

    Weights are tokens, at least 0. Raises ValueError if they are negative or all 0, or if numbers or sizes differ.
    """
    if len(copies) != len(weights):
        raise ValueError(f"{len(copies)} copies but {len(weights)} weights")
    total = sum(weights)
    if total <= 0 or min(weights) < 0:
        raise ValueError(f"weights must not be negative and not all 0, got {list(weights)}")
    _check_sizes(*copies)
    mean = np.zeros(copies[0].size, np.float64)
    for part in _parts(mean.size):
        for values, weight in zip(copies, weights, strict=True):
            if weight:
                mean[part] += float(weight) * values[part].astype(np.float64)
        mean[part] /= float(total)
    return mean


def pseudo_gradient(anchor: NDArray[np.float32], mean: NDArray[np.float64]) -> NDArray[np.float64]:
    """`anchor - mean`, float64 (n,): points from where the parameters went back to where they were."""
    _check_sizes(anchor, mean)
    return anchor.astype(np.float64) - mean


def outer_update(
    optimizer: OuterOptimizer, anchor: Values, buffer: Values, mean: NDArray[np.float64], lr: float, momentum: float
) -> tuple[Values, Values]:
    """One outer step: the new anchor and buffer. All arrays (n,).

    `average`: the mean is the anchor, and the buffer stays as it is. Raises ValueError if sizes differ.
    """
    _check_sizes(anchor, buffer, mean)
    if optimizer == "average":
        return mean.astype(np.float32), buffer
    step = nesterov if optimizer == "nesterov" else heavy_ball
    return step(anchor, buffer, mean, lr, momentum)


def nesterov(
    anchor: Values, buffer: Values, mean: NDArray[np.float64], lr: float, momentum: float
) -> tuple[Values, Values]:
    """One outer step: `g = anchor - mean`, `buf <- momentum*buf + g`, `anchor <- anchor - lr*(g + momentum*buf)`.

    All arrays (n,). Computed in float64, each result rounded to float32 once. With lr 1 and momentum 0 the new anchor
    is exactly the mean rounded to float32. Returns the new anchor and buffer. Raises ValueError if sizes differ.
    """
    return _step(anchor, buffer, mean, lr, momentum, ahead=True)


def heavy_ball(
    anchor: Values, buffer: Values, mean: NDArray[np.float64], lr: float, momentum: float
) -> tuple[Values, Values]:
    """One outer step like `nesterov`, but without look-ahead: `anchor <- anchor - lr*buf`."""
    return _step(anchor, buffer, mean, lr, momentum, ahead=False)


def _step(
    anchor: Values, buffer: Values, mean: NDArray[np.float64], lr: float, momentum: float, *, ahead: bool
) -> tuple[Values, Values]:
    _check_sizes(anchor, buffer, mean)
    new_anchor, new_buffer = np.empty_like(anchor), np.empty_like(buffer)
    for part in _parts(anchor.size):
        gradient = pseudo_gradient(anchor[part], mean[part])
        momenta = momentum * buffer[part].astype(np.float64) + gradient
        new_buffer[part] = momenta
        if lr == 1 and momentum == 0:
            new_anchor[part] = mean[part]
        elif lr == 0:
            new_anchor[part] = anchor[part]  # a difference would lose the sign of -0
        else:
            direction = gradient + momentum * momenta if ahead else momenta
            new_anchor[part] = anchor[part].astype(np.float64) - lr * direction
    return new_anchor, new_buffer


def delayed_anchor(
    anchor: NDArray[np.float32], now: NDArray[np.float32], taken: NDArray[np.float32], mix: float
) -> NDArray[np.float32]:
    """`anchor + mix * (now - taken)`: the anchor of an outer round whose copy was `taken` some steps ago, (n,).

    One rounding per operation, of `mix` to float32 too (rules A12, B8). Where nothing moved it is the anchor, bit for
    bit. Raises ValueError if sizes differ.
    """
    _check_sizes(anchor, now, taken)
    scaled = (now - taken) * np.float32(mix)
    return np.where(scaled == 0, anchor, anchor + scaled)


def shifted(now: NDArray[np.float32], anchor: NDArray[np.float32], before: NDArray[np.float32]) -> NDArray[np.float32]:
    """`now + (anchor - before)`, (n,): what was not in the mean, moved as the anchor has moved from `before` on (A12).

    One rounding per operation. What was the anchor is the new one, bit for bit; and where the anchor has not moved,
    nothing does. Raises ValueError if sizes differ.
    """
    _check_sizes(now, anchor, before)
    moved = np.where(anchor == before, now, now + (anchor - before))
    return np.where(now == before, anchor, moved)


def _check_sizes(*arrays: NDArray[np.float32] | NDArray[np.float64]) -> None:
    if len({array.shape for array in arrays}) != 1 or arrays[0].ndim != 1:
        raise ValueError(f"flat arrays of one size are needed, got shapes {[array.shape for array in arrays]}")


def _parts(size: int) -> Iterator[slice]:
    return (slice(start, start + BLOCK) for start in range(0, size, BLOCK))
