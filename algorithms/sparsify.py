"""The float transform of chunks, its inverse, and the exact top-k. Private to a site: not bit-equal elsewhere (B10)."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from algorithms.transforms import Transform, basis

__all__ = ["Sides", "add_forward", "add_inverse", "candidates", "forward", "largest", "sides"]

GROUPS = 4
"""Groups per wanted coefficient, and at least 64 of them, so that maxima are taken by whole vectors."""

CROWDED = 2
"""Candidates per wanted coefficient at most; where more are equal, as in a chunk of zeros, torch's top-k decides."""


class Sides(NamedTuple):
    """The orthonormal matrices of chunks of one shape, float32: coefficients are `left @ X @ right`."""

    left: Tensor
    """(rows, rows): the basis."""
    right: Tensor
    """(cols, cols): the basis, transposed."""


@lru_cache(maxsize=512)
def sides(transform: Transform, rows: int, cols: int, step: int, device: torch.device) -> Sides | None:
    """The bases of a step; None for `identity`. Only `random` depends on the step."""
    if transform == "identity":
        return None
    left, right = (torch.from_numpy(basis(transform, length, step).orthonormal.copy()) for length in (rows, cols))
    return Sides(*(side.to(device=device, dtype=torch.float32).contiguous() for side in (left, right.T)))


def forward(chunks: Tensor, transform: Transform, step: int = 0) -> Tensor:
    """Coefficients (m, rows * cols) of float32 chunks (m, rows, cols)."""
    count, rows, cols = chunks.shape
    both = sides(transform, rows, cols, step, chunks.device)
    if both is None:
        return chunks.reshape(count, rows * cols)
    coefficients, half = torch.empty_like(chunks), torch.empty_like(chunks)
    add_forward(coefficients, chunks[None], both, half, beta=0.0, alpha=1.0)
    return coefficients.view(count, rows * cols)


def add_forward(total: Tensor, lines: Tensor, sides: Sides, half: Tensor, *, beta: float, alpha: float) -> None:
    """`total <- beta * total + alpha * T(lines)`, in float32; with beta 0 what was in `total` does not matter.

    `lines` (l, m, rows, cols) is any view; `total` and `half`, for use in between, are contiguous (l * m, rows, cols).
    """
    _add_products(total, sides.left, lines, sides.right, half, beta, alpha)


def add_inverse(total: Tensor, lines: Tensor, sides: Sides, half: Tensor, *, alpha: float) -> None:
    """`total <- total + alpha * inverse(lines)`, with arguments as in `add_forward`."""
    _add_products(total, sides.left.T, lines, sides.right.T, half, 1.0, alpha)


def _add_products(
    total: Tensor, left: Tensor, lines: Tensor, right: Tensor, half: Tensor, beta: float, alpha: float
) -> None:
    """`total <- beta * total + alpha * left @ lines @ right`."""
    _, count, rows, cols = lines.shape
    lefts = left.expand(count, rows, rows)
    with torch.autocast(total.device.type, enabled=False):
        for line, out in zip(lines.unbind(), half.view(lines.shape).unbind(), strict=True):
            torch.bmm(lefts, line, out=out)
        total.view(-1, cols).addmm_(half.view(-1, cols), right, beta=beta, alpha=alpha)


def candidates(coefficients: Tensor, k: int, magnitudes: Tensor) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The k largest magnitudes of each row of finite (m, n), and few more: flat positions, ascending, and values.

    `magnitudes`, (m, n), is overwritten. The k-th largest of the maxima of more than k disjoint groups of a row is
    reached by at least k members and, as the largest are rarely in one group, by few more.
    """
    count, elements = coefficients.shape
    torch.abs(coefficients, out=magnitudes)
    groups = max(GROUPS * k, 64)
    members = elements // groups
    places = None
    if magnitudes.device.type == "cpu" and members > 1:  # numpy selects and compares by vectors, torch does not
        maxima = magnitudes[:, : members * groups].view(count, members, groups).amax(dim=1).numpy()
        maxima.partition(groups - k, axis=1)
        reached = np.flatnonzero(magnitudes.numpy() >= maxima[:, groups - k, None])
        places = torch.from_numpy(reached) if reached.size <= CROWDED * k * count else None
    if places is None:
        firsts = torch.arange(count, device=magnitudes.device)[:, None] * elements
        places = (magnitudes.topk(k, dim=1, sorted=False).indices.sort(dim=1).values + firsts).view(-1)
    return places.cpu().numpy(), coefficients.take(places).cpu().numpy()


def largest(
    places: NDArray[np.int64], values: NDArray[np.float32], shape: Sequence[int], k: int
) -> tuple[NDArray[np.uint16], NDArray[np.float32]]:
    """Positions, ascending, and values of the k largest magnitudes of each row, (m, k), among candidates.

    `places` are flat in the shape (m, n), ascending, at least k in each row; `values` are theirs.
    """
    count, elements = shape
    starts = np.searchsorted(places, np.arange(count + 1) * elements)
    width = np.diff(starts).max()
    magnitudes = np.full((count, width), -1, np.float32)
    magnitudes[np.arange(width) < np.diff(starts)[:, None]] = np.abs(values)
    best = np.argpartition(magnitudes, width - k, axis=1)[:, width - k :]
    best.sort(axis=1)
    best += starts[:-1, None]
    return (places[best] % elements).astype(np.uint16), values[best]
