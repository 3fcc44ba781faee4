"""Peak memory of an aggregate: how far the resident set of a fresh process rises while it runs, its result included.

The kernel's high-water mark (Linux), so numpy's and torch's memory are measured alike.
"""

import ctypes
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Literal, get_args

import torch

from algorithms.layout import ParameterLayout
from site_agent.bench import ours
from site_agent.bench.resident import forget_peak, peak, resident
from site_agent.bench.shapes import gpt2
from site_agent.bench.textbook import Textbook

__all__ = ["Way", "extra_megabytes"]

M_MMAP_THRESHOLD = -3
"""Of glibc's `mallopt`: larger allocations are mappings of their own, so that what is freed leaves the resident set."""

Way = Literal["ours", "textbook", "textbook_whole"]
"""`textbook` makes the mean of one tensor after the other and keeps none, `textbook_whole` keeps all."""


def extra_megabytes(layout: ParameterLayout, k: int, sites: int) -> dict[Way, float]:
    """Megabytes (10^6) that an aggregate needs beyond the contributions of all sites, measured in a new process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return {way: pool.submit(_measure, way, layout, k, sites).result() / 1e6 for way in get_args(Way)}


def _measure(way: Way, layout: ParameterLayout, k: int, sites: int) -> int:
    """Bytes; a small aggregate before it takes what only the first one needs."""
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
    _aggregation(way, gpt2(1, 64, 0), k, sites)()
    aggregation = _aggregation(way, layout, k, sites)
    forget_peak()
    before = resident()
    result = aggregation()
    most = peak()
    del result
    return most - before


def _aggregation(way: Way, layout: ParameterLayout, k: int, sites: int) -> Callable[[], object]:
    """The aggregate of contributions that are already there."""
    contributions = [ours.made_up(layout, k, seed) for seed in range(sites)]
    if way == "ours":
        return lambda: ours.mean(contributions, layout)
    textbook = Textbook(layout, k)
    picks = [ours.picks_of(sent, layout) for sent in contributions]
    if way == "textbook_whole":
        return lambda: list(textbook.means(picks))

    def one_by_one() -> None:
        for _ in textbook.means(picks):
            pass

    return one_by_one
