"""How our cost grows with k, with the number of sites, and with the number of parameters."""

from collections.abc import Sequence

import torch

from algorithms.layout import ParameterLayout
from site_agent.bench import ours
from site_agent.bench.pieces import Case, time_aggregate, time_decode, time_encode
from site_agent.bench.shapes import gpt2

__all__ = ["Costs", "grow"]

ROUNDS = 3
K, SITES = 32, 4

Costs = dict[str, dict[str, float]]
"""What grew, as text -> `encode`, `aggregate`, `decode_and_apply`: milliseconds in all, medians."""


def grow(ks: Sequence[int], sites: Sequence[int], layers: Sequence[int], width: int) -> dict[str, Costs]:
    """One thing at a time; the others are k 32, 4 sites, and the fewest layers. Without an embedding."""
    small = gpt2(min(layers), width, 0)
    layouts = [gpt2(count, width, 0) for count in layers]
    return {
        "k": {str(k): _costs(small, k, SITES) for k in ks},
        "sites": {str(count): _costs(small, K, count) for count in sites},
        "parameters": {str(layout.parameter_count): _costs(layout, K, SITES) for layout in layouts},
    }


def _costs(layout: ParameterLayout, k: int, sites: int) -> dict[str, float]:
    case = Case(layout, k, ROUNDS, compared=False)
    tensors = {index: torch.randn(tensor.elements) for index, tensor in enumerate(layout.tensors)}
    shaped = {index: tensors[index].view(spec.shape) for index, spec in enumerate(layout.tensors)}
    contributions = [ours.made_up(layout, k, seed) for seed in range(sites)]
    return {
        "encode": time_encode(case, shaped, contributions[1:]).total("ours"),
        "aggregate": time_aggregate(case, contributions).total("ours"),
        "decode_and_apply": time_decode(case, tensors, contributions).total("ours"),
    }
