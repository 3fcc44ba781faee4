"""The forward transform and the exact top-k per chunk. Private to a site: it need not be bit-equal elsewhere (B10)."""

from functools import lru_cache

import torch
from torch import Tensor

from algorithms.transforms import basis

__all__ = ["forward_dct", "top_k"]

GROUP = 16
"""Members of a group in `top_k`."""

CROWDED = 2
"""Groups pay while fewer than 1/2 of them are taken."""


@lru_cache(maxsize=512)
def _basis(length: int, device: torch.device) -> Tensor:
    return torch.from_numpy(basis("dct", length).orthonormal.copy()).to(device=device, dtype=torch.float32)


def forward_dct(chunks: Tensor) -> Tensor:
    """Two-dimensional DCT-II of float32 chunks (m, rows, cols), as coefficients (m, rows * cols)."""
    count, rows, cols = chunks.shape
    with torch.autocast(chunks.device.type, enabled=False):
        half = chunks.reshape(count * rows, cols) @ _basis(cols, chunks.device).T
        return torch.matmul(_basis(rows, chunks.device), half.view(count, rows, cols)).view(count, rows * cols)


def top_k(coefficients: Tensor, k: int) -> Tensor:
    """Positions of the k largest magnitudes of each row of (m, n), int64 (m, k), ascending.

    Where it pays, in two stages: the k largest of the maxima of groups of 16, then the k largest of those groups'
    members. That is exact: a group with one of the k largest members has one of the k largest maxima.
    """
    count, elements = coefficients.shape
    magnitudes = coefficients.abs()
    groups = elements // GROUP
    if elements % GROUP or k * CROWDED > groups:
        return magnitudes.topk(k, dim=1, sorted=False).indices.sort(dim=1).values
    grouped = magnitudes.view(count, GROUP, groups)
    best = grouped.amax(dim=1).topk(k, dim=1, sorted=False).indices
    members = grouped.gather(2, best[:, None, :].expand(count, GROUP, k)).view(count, GROUP * k)
    places = members.topk(k, dim=1, sorted=False).indices
    found = places.div(k, rounding_mode="floor") * groups + best.gather(1, places % k)
    return found.sort(dim=1).values
