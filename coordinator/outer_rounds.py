"""The outer step of one fragment, from ranges of blobs to drafts of blobs, a block of every array at a time."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import lcm

import numpy as np
from numpy.typing import NDArray

from algorithms.layout import ParameterLayout
from algorithms.outer import outer_update, weighted_mean
from api.specs import OuterSpec
from coordinator.blobs import Blobs
from coordinator.drafts import Draft
from coordinator.encodings import BLOCK_ELEMENTS, UploadedCopies, read_floats

__all__ = ["BLOCK_ELEMENTS", "Anchor", "Copies", "outer_step"]

Values = NDArray[np.float32]
Copy = NDArray[np.float32] | NDArray[np.float64]
Anchors = Callable[[int, int], Values]
"""Elements begin to end of the anchor before the outer step."""


@dataclass(frozen=True)
class Copies:
    """What an outer step of one fragment reads: digests of blobs.

    `anchor` and `momentum` are None before the first outer step: then the anchor is in `start`, the parameters of
    entry 0. `regions`: of each region, the uploads of which its copy is the mean, and its weight in tokens, in region
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

    `rejected`: the uploads that were left out, because they are not finite.
    """

    parameters: Draft
    momentum: Draft
    rejected: frozenset[str]


def outer_step(copies: Copies, layout: ParameterLayout, outer: OuterSpec, blobs: Blobs) -> Anchor:
    """The new anchor and the outer momentum (rule B13).

    If no region that has a finite copy trained on anything since the last anchor, both stay as they are. Copies that
    are all the same blob are read once: their mean is that blob. Blocks; memory does not grow with the fragment.
    """
    uploaded = UploadedCopies(copies.fragment, layout, outer, blobs)
    anchors = partial(_anchor, copies, layout, outer, blobs)
    rejected = frozenset(upload for upload in sorted(copies.distinct) if not _is_finite(upload, uploaded, anchors))
    copies = copies.without(rejected)
    anchor, momentum = blobs.draft(), blobs.draft()
    try:
        for new_anchor, new_momentum in _blocks(copies, uploaded, anchors, outer, blobs):
            anchor.write(new_anchor.astype("<f4", copy=False).tobytes())
            momentum.write(new_momentum.astype("<f4", copy=False).tobytes())
    except BaseException:
        anchor.discard()
        momentum.discard()
        raise
    return Anchor(anchor, momentum, rejected)


def _anchor(copies: Copies, layout: ParameterLayout, outer: OuterSpec, blobs: Blobs, begin: int, end: int) -> Values:
    if copies.anchor is not None:
        return read_floats(blobs, copies.anchor, begin, end)
    first = layout.offsets[layout.fragments(outer.fragments)[copies.fragment].start]
    return read_floats(blobs, copies.start, first + begin, first + end)


def _ranges(elements: int) -> Iterator[tuple[int, int]]:
    return ((begin, min(begin + BLOCK_ELEMENTS, elements)) for begin in range(0, elements, BLOCK_ELEMENTS))


def _is_finite(upload: str, uploaded: UploadedCopies, anchors: Anchors) -> bool:
    """A pass of its own: what comes late in a copy decides about its beginning, too."""
    blocks = (uploaded.read(upload, anchors(begin, end), begin) for begin, end in _ranges(uploaded.elements))
    return all(bool(np.isfinite(block).all()) for block in blocks)


def _blocks(
    copies: Copies, uploaded: UploadedCopies, anchors: Anchors, outer: OuterSpec, blobs: Blobs
) -> Iterator[tuple[Values, Values]]:
    trained = sum(weight for _, weight in copies.regions) > 0
    for begin, end in _ranges(uploaded.elements):
        anchor = anchors(begin, end)
        momentum = (
            np.zeros(end - begin, "<f4") if copies.momentum is None else read_floats(blobs, copies.momentum, begin, end)
        )
        if trained:
            mean = _mean(copies, uploaded, anchor, begin)
            anchor, momentum = outer_update(outer.optimizer, anchor, momentum, mean, outer.lr, outer.momentum)
        yield anchor, momentum


def _mean(copies: Copies, uploaded: UploadedCopies, anchor: Values, begin: int) -> NDArray[np.float64]:
    if len(copies.distinct) == 1:
        return uploaded.read(min(copies.distinct), anchor, begin).astype(np.float64)
    values = {upload: uploaded.read(upload, anchor, begin) for upload in copies.distinct}
    return _weighted([([values[one] for one in uploads], weight) for uploads, weight in copies.regions])


def _weighted(regions: Sequence[tuple[Sequence[Copy], int]]) -> NDArray[np.float64]:
    """Over regions by weight; over the copies of one region by equal parts of its weight."""
    shares = lcm(*(len(copies) for copies, _ in regions))
    values = [copy for copies, _ in regions for copy in copies]
    return weighted_mean(values, [weight * (shares // len(copies)) for copies, weight in regions for _ in copies])
