"""The outer step of one fragment, from ranges of blobs to drafts of blobs, a block of every array at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import lcm

import numpy as np
from numpy.typing import NDArray

from algorithms.layout import ParameterLayout
from algorithms.outer import outer_update, weighted_mean
from api.errors import ProblemError
from api.schemas import OuterSpec
from coordinator.blobs import Blobs
from coordinator.drafts import Draft

__all__ = ["BLOCK_ELEMENTS", "Anchor", "Copies", "outer_step"]

BLOCK_ELEMENTS = 1 << 19
"""Of each array that are in memory at once, 2 MiB; the bits of the result do not depend on it."""

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

    @property
    def distinct(self) -> set[str]:
        return {digest for digests, _ in self.regions for digest in digests}

    def without(self, rejected: frozenset[str]) -> "Copies":
        """Regions that have no other copy are left out."""
        there = ((tuple(one for one in digests if one not in rejected), weight) for digests, weight in self.regions)
        return replace(self, regions=tuple((digests, weight) for digests, weight in there if digests))


@dataclass(frozen=True)
class Anchor:
    """What came of an outer step: drafts of the new anchor and of the outer momentum, to commit or to discard.

    `rejected`: the copies that were left out, because they are not finite.
    """

    parameters: Draft
    momentum: Draft
    rejected: frozenset[str]


def outer_step(copies: Copies, layout: ParameterLayout, outer: OuterSpec, blobs: Blobs) -> Anchor:
    """The new anchor and the outer momentum (rule B13).

    If no region that has a finite copy trained on anything since the last anchor, both stay as they are. Copies that
    are all the same blob are read once: their mean is that blob. Blocks; memory does not grow with the fragment.
    """
    elements = layout.fragment_elements(layout.fragments(outer.fragments)[copies.fragment])
    rejected = frozenset(copy for copy in sorted(copies.distinct) if not _is_finite(copy, elements, blobs))
    copies = copies.without(rejected)
    anchor, momentum = blobs.draft(), blobs.draft()
    try:
        for new_anchor, new_momentum in _blocks(copies, layout, outer, blobs):
            anchor.write(new_anchor.astype("<f4", copy=False).tobytes())
            momentum.write(new_momentum.astype("<f4", copy=False).tobytes())
    except BaseException:
        anchor.discard()
        momentum.discard()
        raise
    return Anchor(anchor, momentum, rejected)


def _is_finite(digest: str, elements: int, blobs: Blobs) -> bool:
    """A pass of its own: what comes late in a copy decides about its beginning, too."""
    begins = range(0, elements, BLOCK_ELEMENTS)
    blocks = (_read(blobs, digest, begin, min(begin + BLOCK_ELEMENTS, elements)) for begin in begins)
    return all(bool(np.isfinite(block).all()) for block in blocks)


def _blocks(
    copies: Copies, layout: ParameterLayout, outer: OuterSpec, blobs: Blobs
) -> Iterator[tuple[Parameters, Parameters]]:
    tensors = layout.fragments(outer.fragments)[copies.fragment]
    elements = layout.fragment_elements(tensors)
    first = layout.offsets[tensors.start] if copies.anchor is None and elements else 0
    trained = sum(weight for _, weight in copies.regions) > 0
    for begin in range(0, elements, BLOCK_ELEMENTS):
        end = min(begin + BLOCK_ELEMENTS, elements)
        anchor = _read(blobs, copies.anchor or copies.start, first + begin, first + end)
        momentum = (
            np.zeros(end - begin, "<f4") if copies.momentum is None else _read(blobs, copies.momentum, begin, end)
        )
        if trained:
            mean = _mean(copies, blobs, begin, end)
            anchor, momentum = outer_update(outer.optimizer, anchor, momentum, mean, outer.lr, outer.momentum)
        yield anchor, momentum


def _mean(copies: Copies, blobs: Blobs, begin: int, end: int) -> NDArray[np.float64]:
    if len(copies.distinct) == 1:
        return _read(blobs, min(copies.distinct), begin, end).astype(np.float64)
    values = {digest: _read(blobs, digest, begin, end) for digest in copies.distinct}
    return _weighted([([values[one] for one in digests], weight) for digests, weight in copies.regions])


def _weighted(regions: Sequence[tuple[Sequence[Parameters], int]]) -> NDArray[np.float64]:
    """Over regions by weight; over the copies of one region by equal parts of its weight."""
    shares = lcm(*(len(copies) for copies, _ in regions))
    values = [copy for copies, _ in regions for copy in copies]
    return weighted_mean(values, [weight * (shares // len(copies)) for copies, weight in regions for _ in copies])


def _read(blobs: Blobs, digest: str, begin: int, end: int) -> Parameters:
    data = blobs.read(digest, 4 * begin, 4 * end)
    if len(data) != 4 * (end - begin):
        raise ProblemError("blob_too_short", f"blob {digest} ends before its element {end}: it is another fragment's")
    return np.frombuffer(data, "<f4")
