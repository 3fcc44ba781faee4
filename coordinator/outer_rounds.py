"""The outer step of one fragment, from blobs to blobs."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from algorithms.layout import ParameterLayout
from algorithms.outer import outer_update, weighted_mean
from api.schemas import OuterSpec
from coordinator.blobs import BlobDirectory

__all__ = ["Anchor", "Copies", "outer_step"]

Parameters = NDArray[np.float32]


@dataclass(frozen=True)
class Copies:
    """What an outer step of one fragment reads: digests of blobs.

    `anchor` and `momentum` are None before the first outer step: then the anchor is in `start`, the parameters of
    entry 0. `regions`: of each region, the digests of which its copy is the mean, and its weight in tokens, in region
    order.
    """

    fragment: int
    start: str
    anchor: str | None
    momentum: str | None
    regions: tuple[tuple[tuple[str, ...], int], ...]


def _read(path: Path, elements: int, offset: int = 0) -> Parameters:
    return (
        np.memmap(path, dtype="<f4", mode="r", offset=4 * offset, shape=(elements,)) if elements else np.empty(0, "f4")
    )


@dataclass(frozen=True)
class Anchor:
    """What came of it: digests of blobs, and of the copies that were left out because they are not finite."""

    digest: str
    momentum: str
    rejected: frozenset[str]


def outer_step(copies: Copies, layout: ParameterLayout, outer: OuterSpec, blobs: BlobDirectory) -> Anchor:
    """The new anchor and outer momentum, both stored (rule B13).

    If no region trained on anything since the last anchor, or none has a finite copy, both stay as they are. Copies
    that are all the same blob are read once: their mean is that blob.
    """
    tensors = layout.fragments(outer.fragments)[copies.fragment]
    elements = layout.fragment_elements(tensors)
    if copies.anchor is None:
        anchor = _read(blobs.path(copies.start), elements, layout.offsets[tensors.start])
    else:
        anchor = _read(blobs.path(copies.anchor), elements)
    momentum = np.zeros(elements, "<f4") if copies.momentum is None else _read(blobs.path(copies.momentum), elements)
    distinct = {digest for digests, _ in copies.regions for digest in digests}
    values = {digest: _read(blobs.path(digest), elements) for digest in sorted(distinct)}
    finite = {digest: copy for digest, copy in values.items() if np.isfinite(copy).all()}
    regions = [([finite[one] for one in digests if one in finite], weight) for digests, weight in copies.regions]
    regions = [(there, weight) for there, weight in regions if there]
    if sum(weight for _, weight in regions) > 0:
        mean = next(iter(finite.values())).astype(np.float64) if len(finite) == 1 else _mean(regions)
        anchor, momentum = outer_update(outer.optimizer, anchor, momentum, mean, outer.lr, outer.momentum)
    return Anchor(_store(anchor, blobs), _store(momentum, blobs), frozenset(distinct - finite.keys()))


def _mean(regions: Sequence[tuple[Sequence[Parameters], int]]) -> NDArray[np.float64]:
    """Over regions by weight; over the copies of one region by equal parts of its weight."""
    shares = lcm(*(len(copies) for copies, _ in regions))
    values = [copy for copies, _ in regions for copy in copies]
    weights = [weight * (shares // len(copies)) for copies, weight in regions for _ in copies]
    return weighted_mean(values, weights)


def _store(values: Parameters, blobs: BlobDirectory) -> str:
    return blobs.put_bytes(values.astype("<f4", copy=False).tobytes())
