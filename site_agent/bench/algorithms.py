"""`isthmus bench algorithms`: what the algorithms cost here, beside the textbook way, in one run on one thread.

Every ratio is the median of those of single rounds, in which both sides run in turn; more than 1 means that ours is
faster. Times are CPU time of the whole process. The top level of the figures:

- `encode_speedup_k8`, `_k32`: momentum, transform, top-k and subtraction; ours quantises as well.
- `decode_speedup_k32_n4`: from the update of 4 sites to the moved parameters, with the 4 bits per value that the
  rules give, and with 8 (`_8bit`). The textbook begins with the contributions, since each of its sites averages.
- `aggregate_speedup_n4_k8`: the aggregate of the whole round on both sides. `aggregate_extra_mb_n4_k8` is its memory
  for 320 million parameters; `aggregate_textbook_extra_mb_n4_k8` is that of a textbook which keeps the mean of one
  tensor at a time; `memory` has that of all as `textbook_whole`.
- `bytes_per_coefficient_*`: whole messages, from the momentum of a language model trained for a moment.
- `encode_over_floor_k8`, `decode_over_floor_k32`: how many times as long as the bare products of the transform.
"""

import platform
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from algorithms import kernels
from algorithms.layout import ParameterLayout
from algorithms.updates import SparseUpdate
from site_agent.bench import ours
from site_agent.bench.growth import grow
from site_agent.bench.memory import extra_megabytes
from site_agent.bench.messages import bytes_per_coefficient
from site_agent.bench.pieces import (
    Case,
    Tensors,
    compare_directions,
    compare_picks,
    time_aggregate,
    time_decode,
    time_encode,
)
from site_agent.bench.shapes import gpt2, olmo
from site_agent.bench.timing import Samples, rounded
from site_agent.bench.training import train

__all__ = ["FULL", "QUICK", "Plan", "measure"]

KS = (8, 32)
SITES = 4

Figures = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """Sizes of everything that is measured."""

    layout: tuple[int, int, int]
    """Layers, width, vocabulary of a GPT-2."""
    memory: tuple[int, int, int]
    """Of an OLMo."""
    model: tuple[int, int, int]
    """Layers, width and training steps of the model whose momentum is sent."""
    rounds: int
    aggregate_sites: tuple[int, ...]
    growth_ks: tuple[int, ...]
    growth_layers: tuple[int, ...]


FULL = Plan(
    layout=(12, 768, 50304),
    memory=(16, 1024, 50304),
    model=(12, 512, 40),
    rounds=4,
    aggregate_sites=(2, 4, 8, 16),
    growth_ks=(1, 8, 32, 128),
    growth_layers=(2, 4, 8, 12),
)
QUICK = Plan(
    layout=(1, 256, 1024),
    memory=(1, 256, 8192),
    model=(1, 128, 3),
    rounds=2,
    aggregate_sites=(2, 4),
    growth_ks=(1, 32),
    growth_layers=(1, 2),
)


def measure(plan: Plan, say: Callable[[str], None]) -> Figures:
    """All figures, as JSON values; `say` is told what comes next."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layout = gpt2(*plan.layout)
    tensors = {index: torch.randn(tensor.elements) for index, tensor in enumerate(layout.tensors)}
    contributions = {k: [ours.made_up(layout, k, seed) for seed in range(max(plan.aggregate_sites))] for k in KS}
    top: Figures = {}
    details: Figures = {}
    parts: dict[str, Callable[[], tuple[Figures, Figures]]] = {
        "encode": lambda: _encode(plan, layout, tensors, contributions),
        "aggregate": lambda: _aggregate(plan, layout, contributions),
        "decode_and_apply": lambda: _decode(plan, layout, tensors, contributions[32][:SITES]),
        "memory": lambda: _memory(plan),
        "bytes": lambda: _bytes(plan),
    }
    for name, part in parts.items():
        say(f"measuring: {name}")
        headline, details[name] = part()
        top |= headline
    say("measuring: growth")
    growth = grow(plan.growth_ks, plan.aggregate_sites, plan.growth_layers, plan.layout[1])
    return top | details | {"growth": growth, "environment": _environment(plan, layout)}


def _encode(
    plan: Plan, layout: ParameterLayout, tensors: Tensors, contributions: dict[int, list[SparseUpdate]]
) -> tuple[Figures, Figures]:
    gradients = {index: tensors[index].view(spec.shape) for index, spec in enumerate(layout.tensors)}
    top, details = {}, {}
    for k in KS:
        case = Case(layout, k, plan.rounds)
        agreement = compare_picks(case, gradients)
        samples = time_encode(case, gradients, contributions[k][1:SITES])
        details[f"k{k}"] = _compared(samples) | {"equal_picks": rounded(agreement)}
        top[f"encode_speedup_k{k}"] = samples.ratio("textbook", "ours")["median"]
        if k == 8:
            top["encode_over_floor_k8"] = samples.ratio("ours", "floor")["median"]
    return top, details


def _aggregate(
    plan: Plan, layout: ParameterLayout, contributions: dict[int, list[SparseUpdate]]
) -> tuple[Figures, Figures]:
    top, details = {}, {}
    for k in KS:
        case = Case(layout, k, min(plan.rounds, 3))
        for sites in plan.aggregate_sites:
            samples = time_aggregate(case, contributions[k][:sites])
            details[f"n{sites}_k{k}"] = _compared(samples)
            if (sites, k) == (SITES, 8):
                top["aggregate_speedup_n4_k8"] = samples.ratio("textbook", "ours")["median"]
    return top, details


def _decode(
    plan: Plan, layout: ParameterLayout, tensors: Tensors, contributions: list[SparseUpdate]
) -> tuple[Figures, Figures]:
    case = Case(layout, 32, plan.rounds)
    agreement = compare_directions(case, tensors, contributions)
    samples = time_decode(case, tensors, contributions)
    top = {
        "decode_speedup_k32_n4": samples.ratio("textbook", "ours")["median"],
        "decode_speedup_k32_n4_8bit": samples.ratio("textbook", "ours_8bit")["median"],
        "decode_over_floor_k32": samples.ratio("ours", "floor")["median"],
    }
    return top, _compared(samples) | {"equal_directions": {name: rounded(share) for name, share in agreement.items()}}


def _compared(samples: Samples) -> Figures:
    others = samples.names & {"textbook", "tuned"}
    return {
        "ms_per_million": samples.per_million(),
        "speedup": {name: samples.ratio(name, "ours") for name in sorted(others)},
    }


def _memory(plan: Plan) -> tuple[Figures, Figures]:
    layout = olmo(*plan.memory)
    extra = {way: rounded(size) for way, size in extra_megabytes(layout, 8, SITES).items()}
    top = {
        "aggregate_extra_mb_n4_k8": extra["ours"],
        "aggregate_textbook_extra_mb_n4_k8": extra["textbook"],
    }
    return top, {"parameters": layout.parameter_count, "extra_mb_n4_k8": extra, "measured": "resident set"}


def _bytes(plan: Plan) -> tuple[Figures, Figures]:
    trained = train(*plan.model)
    sizes = {f"k{k}": bytes_per_coefficient(ours.Site(trained.layout, k, trained.momentum)) for k in KS}
    top = {
        "bytes_per_coefficient_default": sizes["k32"][ours.DEFAULT_CODEC]["packed"],
        "bytes_per_coefficient_compact": sizes["k32"][ours.DEFAULT_CODEC]["compact"],
        "bytes_per_coefficient_compact_k8": sizes["k8"][ours.DEFAULT_CODEC]["compact"],
    }
    return top, {
        "parameters": trained.layout.parameter_count,
        "steps": len(trained.losses),
        "loss": {"first": rounded(trained.losses[0]), "last": rounded(trained.losses[-1])},
        "per_coefficient": sizes,
    }


def _environment(plan: Plan, layout: ParameterLayout) -> Figures:
    names = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return {
        "parameters": layout.parameter_count,
        "rounds": plan.rounds,
        "threads": torch.get_num_threads(),
        "cpu": names[0] if names else platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "compiled": kernels.compiled is not None,
    }
