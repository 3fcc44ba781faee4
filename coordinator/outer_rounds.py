"""The outer step of one fragment, from ranges of blobs to drafts of blobs, a block of every array at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm

import numpy as np
from numpy.typing import NDArray

from algorithms.layout import ParameterLayout
from algorithms.outer import outer_update, weighted_mean
from api.errors import ProblemError
from api.schemas import OuterSpec
from coordinator.blobs import Blobs
from coordinator.drafts import Draft

__all__ = ["BLOCK_ELEMENTS", "Copies", "Made", "outer_step"]

BLOCK_ELEMENTS = 1 << 19
"""Of each array that are in memory at once, 2 MiB; the bits of the result do not depend on it."""

Parameters = NDArray[np.float32]
Regions = Sequence[tuple[Sequence[str], int]]


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


@dataclass(frozen=True)
class Made:
    """The new anchor and outer momentum, for the caller to commit or to discard.

    `rejected`: digests of the copies that were left out because they are not finite.
    """

    anchor: Draft
    momentum: Draft
    rejected: frozenset[str]


def outer_step(copies: Copies, layout: ParameterLayout, outer: OuterSpec, blobs: Blobs) -> Made:
    """By rule B13; it blocks, and its memory does not grow with the fragment.

    If no region trained on anything since the last anchor, or none has a finite copy, both stay as they are. Copies
    that are all the same blob are read once: their mean is that blob.
    """
    tensors = layout.fragments(outer.fragments)[copies.fragment]
    elements = layout.fragment_elements(tensors)
    distinct = sorted({digest for digests, _ in copies.regions for digest in digests})
    finite = {digest for digest in distinct if _is_finite(blobs, digest, elements)}
    regions = [([one for one in digests if one in finite], weight) for digests, weight in copies.regions]
    regions = [(there, weight) for there, weight in regions if there]
    first = layout.offsets[tensors.start] if copies.anchor is None and elements else 0
    anchor, momentum = blobs.draft(), blobs.draft()
    try:
        for begin, end in _blocks(elements):
            x = _read(blobs, copies.anchor or copies.start, first + begin, first + end)
            m = np.zeros(end - begin, "<f4") if copies.momentum is None else _read(blobs, copies.momentum, begin, end)
            if sum(weight for _, weight in regions) > 0:
                x, m = outer_update(outer.optimizer, x, m, _mean(regions, blobs, begin, end), outer.lr, outer.momentum)
            anchor.write(x.astype("<f4", copy=False).tobytes())
            momentum.write(m.astype("<f4", copy=False).tobytes())
    except BaseException:
        anchor.discard()
        momentum.discard()
        raise
    return Made(anchor, momentum, frozenset(distinct) - finite)


def _blocks(elements: int) -> Iterator[tuple[int, int]]:
    return ((begin, min(begin + BLOCK_ELEMENTS, elements)) for begin in range(0, elements, BLOCK_ELEMENTS))


def _is_finite(blobs: Blobs, digest: str, elements: int) -> bool:
    return all(np.isfinite(_read(blobs, digest, *block)).all() for block in _blocks(elements))


def _mean(regions: Regions, blobs: Blobs, begin: int, end: int) -> NDArray[np.float64]:
    """Over regions by weight; over the copies of one region by equal parts of its weight."""
    values = {digest: _read(blobs, digest, begin, end) for digests, _ in regions for digest in digests}
    if len(values) == 1:
        return next(iter(values.values())).astype(np.float64)
    shares = lcm(*(len(digests) for digests, _ in regions))
    weights = [weight * (shares // len(digests)) for digests, weight in regions for _ in digests]
    return weighted_mean([values[one] for digests, _ in regions for one in digests], weights)


def _read(blobs: Blobs, digest: str, begin: int, end: int) -> Parameters:
    data = blobs.read(digest, 4 * begin, 4 * end)
    if len(data) != 4 * (end - begin):
        raise ProblemError("blob_too_short", f"blob {digest} ends before its element {end}: it is another fragment's")
    return np.frombuffer(data, "<f4")
