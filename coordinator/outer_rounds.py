"""The outer step of one fragment, from blobs to blobs."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from algorithms.layout import ParameterLayout
from algorithms.outer import nesterov, weighted_mean
from api.schemas import OuterSpec
from coordinator.blobs import BlobDirectory

__all__ = ["Copies", "outer_step"]

Parameters = NDArray[np.float32]


@dataclass(frozen=True)
class Copies:
    """What an outer step of one fragment reads: digests of blobs.

    `anchor` and `momentum` are None before the first outer step: then the anchor is in `start`, the parameters of
    entry 0. `regions`: the digest of each region's copy and its weight in tokens, in region order.
    """

    fragment: int
    start: str
    anchor: str | None
    momentum: str | None
    regions: tuple[tuple[str, int], ...]


def _read(path: Path, elements: int, offset: int = 0) -> Parameters:
    return (
        np.memmap(path, dtype="<f4", mode="r", offset=4 * offset, shape=(elements,)) if elements else np.empty(0, "f4")
    )


def outer_step(copies: Copies, layout: ParameterLayout, outer: OuterSpec, blobs: BlobDirectory) -> tuple[str, str]:
    """Digests of the new anchor and of the outer momentum, both stored (rule B13).

    If no region trained on anything since the last anchor, anchor and momentum stay as they are. Copies that are all
    the same blob are read once: their mean is that blob.
    """
    tensors = layout.fragments(outer.fragments)[copies.fragment]
    elements = layout.fragment_elements(tensors)
    if copies.anchor is None:
        anchor = _read(blobs.path(copies.start), elements, layout.offsets[tensors.start])
    else:
        anchor = _read(blobs.path(copies.anchor), elements)
    momentum = np.zeros(elements, "<f4") if copies.momentum is None else _read(blobs.path(copies.momentum), elements)
    if sum(weight for _, weight in copies.regions) > 0:
        mean = _mean(copies, elements, blobs)
        anchor, momentum = nesterov(anchor, momentum, mean, outer.lr, outer.momentum)
    return _store(anchor, blobs), _store(momentum, blobs)


def _mean(copies: Copies, elements: int, blobs: BlobDirectory) -> NDArray[np.float64]:
    distinct = {digest for digest, _ in copies.regions}
    if len(distinct) == 1:
        return _read(blobs.path(distinct.pop()), elements).astype(np.float64)
    values = [_read(blobs.path(digest), elements) for digest, _ in copies.regions]
    return weighted_mean(values, [weight for _, weight in copies.regions])


def _store(values: Parameters, blobs: BlobDirectory) -> str:
    return blobs.put_bytes(values.astype("<f4", copy=False).tobytes())
