"""Times the pieces of a step, ours and the textbook's in turn, and checks that both do the same work."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from algorithms.codec import pack_contribution, quantise
from algorithms.layout import ParameterLayout
from algorithms.transforms import basis
from algorithms.updates import AggregateUpdate, SparseUpdate
from site_agent.bench import ours
from site_agent.bench.textbook import Picks, Textbook, Tuned
from site_agent.bench.timing import Samples

__all__ = [
    "Case",
    "Tensors",
    "common_picks",
    "compare_directions",
    "compare_picks",
    "time_aggregate",
    "time_decode",
    "time_encode",
]

LR = 1e-3

Tensors = Mapping[int, Tensor]
"""Position in the layout -> float32 tensor."""


@dataclass(frozen=True)
class Case:
    """What is measured, how often, and whether beside the textbook and the floor."""

    layout: ParameterLayout
    k: int
    rounds: int
    compared: bool = True

    def textbooks(self) -> dict[str, Textbook]:
        if not self.compared:
            return {}
        return {"textbook": Textbook(self.layout, self.k), "tuned": Tuned(self.layout, self.k)}


def time_encode(case: Case, gradients: Tensors, others: Sequence[SparseUpdate]) -> Samples:
    """`ours` is `encode`, which quantises, plus `subtract` after a round together with `others`; `floor` is two mm."""
    samples, site, textbooks = Samples(case.layout.parameter_count), ours.Site(case.layout, case.k), case.textbooks()
    for _ in range(case.rounds):
        with samples.time("encode"):
            sent = site.encode(gradients)
        update = ours.mean([sent, *others], case.layout)
        with samples.time("subtract"):
            site.subtract(sent, update)
        for name, textbook in textbooks.items():
            with samples.time(name):
                textbook.encode(gradients)
        _time_floor(case, samples, gradients)
        _time_packing(samples, sent, case.layout)
    samples.add("ours", "encode", "subtract")
    return samples


def time_aggregate(case: Case, contributions: Sequence[SparseUpdate]) -> Samples:
    """The mean of a round, all of it, as a coordinator needs it; the textbooks make it tensor by tensor."""
    samples, textbooks = Samples(case.layout.parameter_count), case.textbooks()
    sites = [ours.picks_of(sent, case.layout) for sent in contributions]
    for _ in range(case.rounds):
        with samples.time("ours"):
            ours.mean(contributions, case.layout)
        for name, textbook in textbooks.items():
            with samples.time(name):
                list(textbook.means(sites))
    return samples


def time_decode(case: Case, parameters: Tensors, contributions: Sequence[SparseUpdate]) -> Samples:
    """Decoding and applying the update as the rules make it, and with 8 bits; the textbooks begin with their mean."""
    samples, textbooks = Samples(case.layout.parameter_count), case.textbooks()
    sites = [ours.picks_of(sent, case.layout) for sent in contributions]
    updates = _updates(case, contributions)
    for _ in range(case.rounds):
        for name, update in updates.items():
            with samples.time(name):
                ours.apply(update, case.layout, parameters, LR)
        for name, textbook in textbooks.items():
            with samples.time(name):
                textbook.decode_and_apply(sites, parameters, LR)
        _time_floor(case, samples, parameters)
    return samples


def _updates(case: Case, contributions: Sequence[SparseUpdate]) -> dict[str, AggregateUpdate]:
    update = ours.mean(contributions, case.layout)
    return {"ours": update, "ours_8bit": ours.as_eight_bits(update)}


def _time_packing(samples: Samples, sent: SparseUpdate, layout: ParameterLayout) -> None:
    """Quantisation apart, of values as they were sent, and packing."""
    values = [part.values * part.scales[:, None] for part in sent.shapes.values()]
    with samples.time("quantise"):
        for part in values:
            quantise(part, sent.codec)
    with samples.time("pack"):
        pack_contribution(sent, layout, sent.codec)


def _time_floor(case: Case, samples: Samples, tensors: Tensors) -> None:
    """The products of a transform and nothing else: two by 64 x 64 for every chunk, as plain large ones."""
    if not case.compared:
        return
    matrix = torch.from_numpy(basis("dct", 64).orthonormal.copy()).float()
    largest = max(tensor.numel() for tensor in tensors.values())
    buffers = torch.ones(2, largest // 64, 64)  # whose pages exist, unlike those of zeros
    with samples.time("floor"):
        for tensor in tensors.values():
            once, twice = buffers[:, : tensor.numel() // 64]
            torch.mm(tensor.view(-1, 64), matrix, out=once)
            torch.mm(once, matrix, out=twice)


def compare_picks(case: Case, gradients: Tensors) -> float:
    """The share of our picks that each textbook has picked, too, from equal momenta; the least of them."""
    mine = ours.picks_of(ours.Site(case.layout, case.k).encode(gradients), case.layout)
    return min(common_picks(mine, textbook.encode(gradients)) for textbook in case.textbooks().values())


def common_picks(mine: Picks, theirs: Picks) -> float:
    """The share of the places of `mine` that `theirs` has, too."""
    pairs = [(places, others) for (places, _), (others, _) in zip(mine, theirs, strict=True)]
    hits = sum(int(torch.eq(places[:, :, None], others[:, None, :]).sum()) for places, others in pairs)
    return hits / sum(places.numel() for places, _ in pairs)


def compare_directions(case: Case, parameters: Tensors, contributions: Sequence[SparseUpdate]) -> dict[str, float]:
    """The share of the parameters that an update and each textbook move alike; the least. Overwrites `parameters`."""
    sites = [ours.picks_of(sent, case.layout) for sent in contributions]
    theirs = [
        _directions(parameters, partial(textbook.decode_and_apply, sites, parameters, 1.0))
        for textbook in case.textbooks().values()
    ]
    shares = {}
    for name, update in _updates(case, contributions).items():
        mine = _directions(parameters, partial(ours.apply, update, case.layout, parameters, 1.0))
        shares[name] = min(float(np.equal(mine, other).mean()) for other in theirs)
    return shares


def _directions(parameters: Tensors, move: Callable[[], None]) -> NDArray[np.int8]:
    """Where `move` takes parameters that are zero, int8, all of them."""
    for tensor in parameters.values():
        tensor.zero_()
    move()
    return np.concatenate([tensor.view(-1).to(torch.int8).numpy() for tensor in parameters.values()])
