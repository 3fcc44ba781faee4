"""The outer step of one fragment, from ranges of blobs to drafts of blobs, a block of every array at a time."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from algorithms.layout import ParameterLayout
from algorithms.outer import nesterov, weighted_mean
from api.errors import ProblemError
from api.schemas import OuterSpec
from coordinator.blobs import Blobs
from coordinator.drafts import Draft

__all__ = ["BLOCK_ELEMENTS", "Copies", "outer_step"]

BLOCK_ELEMENTS = 1 << 19
"""Of each array that are in memory at once, 2 MiB; the bits of the result do not depend on it."""

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


def outer_step(copies: Copies, layout: ParameterLayout, outer: OuterSpec, blobs: Blobs) -> tuple[Draft, Draft]:
    """The new anchor and the outer momentum (rule B13), for the caller to commit or to discard.

    If no region trained on anything since the last anchor, anchor and momentum stay as they are. Copies that are all
    the same blob are read once: their mean is that blob. Blocks; memory does not grow with the fragment.
    """
    anchor, momentum = blobs.draft(), blobs.draft()
    try:
        for new_anchor, new_momentum in _blocks(copies, layout, outer, blobs):
            anchor.write(new_anchor.astype("<f4", copy=False).tobytes())
            momentum.write(new_momentum.astype("<f4", copy=False).tobytes())
    except BaseException:
        anchor.discard()
        momentum.discard()
        raise
    return anchor, momentum


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
            anchor, momentum = nesterov(anchor, momentum, mean, outer.lr, outer.momentum)
        yield anchor, momentum


def _mean(copies: Copies, blobs: Blobs, begin: int, end: int) -> NDArray[np.float64]:
    distinct = {digest for digest, _ in copies.regions}
    if len(distinct) == 1:
        return _read(blobs, distinct.pop(), begin, end).astype(np.float64)
    values = [_read(blobs, digest, begin, end) for digest, _ in copies.regions]
    return weighted_mean(values, [weight for _, weight in copies.regions])


def _read(blobs: Blobs, digest: str, begin: int, end: int) -> Parameters:
    data = blobs.read(digest, 4 * begin, 4 * end)
    if len(data) != 4 * (end - begin):
        raise ProblemError("blob_too_short", f"blob {digest} ends before its element {end}: it is another fragment's")
    return np.frombuffer(data, "<f4")
