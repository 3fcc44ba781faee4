"""Our side of the comparison: whatever the bench calls of the algorithms, it calls here."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from algorithms import Settings
from algorithms.aggregate import aggregate
from algorithms.apply import apply_update
from algorithms.codec import VALUE_LIMITS, quantise
from algorithms.layout import ParameterLayout, kept
from algorithms.momentum import Ownership, encode, subtract_sent
from algorithms.updates import AggregateUpdate, Codec, Coefficients, SparseUpdate, UpdateCoefficients
from site_agent.bench.textbook import BETA, Picks, single_block

__all__ = ["DEFAULT_CODEC", "Site", "apply", "as_eight_bits", "made_up", "mean", "picks_of"]

DEFAULT_CODEC: Codec = Settings().codec


class Site:
    """One site's momentum of all chunks."""

    def __init__(self, layout: ParameterLayout, k: int, momentum: Mapping[int, Tensor] | None = None) -> None:
        self._ownership = Ownership(layout, range(layout.chunk_count))
        self._momentum = momentum or {index: torch.zeros(size) for index, size in enumerate(self._ownership.sizes)}
        self.layout = layout
        self.k = k

    def encode(self, gradients: Mapping[int, Tensor], codec: Codec = DEFAULT_CODEC, beta: float = BETA) -> SparseUpdate:
        """Momentum, transform, top-k, and the quantisation of what was picked."""
        return encode(self._ownership, self._momentum, gradients, beta=beta, k=self.k, codec=codec)

    def subtract(self, sent: SparseUpdate, update: AggregateUpdate) -> None:
        subtract_sent(self._ownership, self._momentum, sent, update, 1.0)


def mean(contributions: Sequence[SparseUpdate], layout: ParameterLayout) -> AggregateUpdate:
    return aggregate(contributions, layout, [0] * len(contributions))


def apply(update: AggregateUpdate, layout: ParameterLayout, parameters: Mapping[int, Tensor], lr: float) -> None:
    apply_update(update, layout, parameters, [lr] * len(layout.groups), [1.0] * len(layout.groups), lambda _: True)


def as_eight_bits(update: AggregateUpdate) -> AggregateUpdate:
    """The same coefficients with 8 bits in every chunk and values up to 127: what the costlier decoding is for."""
    return replace(update, shapes={shape: _widened(part) for shape, part in update.shapes.items()})


def _widened(part: UpdateCoefficients) -> UpdateCoefficients:
    limits = np.select([part.bits == bits for bits in VALUE_LIMITS], list(VALUE_LIMITS.values()))
    factors = VALUE_LIMITS[8] // limits
    rests = VALUE_LIMITS[8] - factors * limits
    values = part.values * np.repeat(factors, part.counts) + np.sign(part.values) * np.repeat(rests, part.counts)
    return replace(
        part,
        values=values.astype(np.int8),
        exponents=(part.exponents - np.frexp(factors)[1] + 1).astype(np.int16),
        bits=np.full_like(part.bits, 8),
    )


def made_up(layout: ParameterLayout, k: int, seed: int, codec: Codec = DEFAULT_CODEC) -> SparseUpdate:
    """A contribution at random places, as nearly uniform as those of real momenta, with normally distributed values."""
    generator = np.random.default_rng(seed)
    shapes = {}
    for shape in layout.shapes:
        elements, chunks = shape[0] * shape[1], layout.select(shape)
        grid = (chunks.size, kept(k, elements, layout.chunk))
        places = np.sort(generator.integers(elements - grid[1] + 1, size=grid), axis=1) + np.arange(grid[1])
        values, scales = quantise(generator.standard_normal(grid, np.float32), codec)
        shapes[shape] = Coefficients(chunks, places.astype(np.uint16), values, scales)
    return SparseUpdate(shapes, frozenset(), codec)


def picks_of(sent: SparseUpdate, layout: ParameterLayout) -> Picks:
    """A contribution as the textbook has it."""
    picks = []
    for tensor in range(len(layout.tensors)):
        block = single_block(layout, tensor)
        part = sent.shapes[block.shape]
        start = int(np.searchsorted(part.chunks, block.chunks[0]))
        rows = slice(start, start + len(block))
        values = part.values[rows] * part.scales[rows, None]
        picks.append((torch.from_numpy(part.indices[rows].astype(np.int64)), torch.from_numpy(values)))
    return picks
