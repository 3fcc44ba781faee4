"""What the sites of `isthmus bench outer` run: an ordinary training script whose parameters are made up, not trained.

Before every step each site writes the parameters that follow from the seed, so that all of them hold the same copy, but
for one number at the site that is to differ. There are no gradients: a step is an empty contribution, and then an outer
round of everything. What each one took is left in a file.
"""

import itertools
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from site_agent import join
from site_agent.bench.resident import forget_peak, peak, resident

__all__ = ["Seen", "Task", "seen_at"]

_TENSORS = 64
_COLUMNS = 1024


@dataclass(frozen=True)
class Task:
    """The run's params."""

    mib: int
    """Of parameters."""
    seed: int
    differing: str | None
    """The site of which one number, hence one fragment, is another."""
    folder: str
    """Where the sites leave what they have seen."""


@dataclass
class Seen:
    """Of one site, in bytes and in seconds by the clock of the machine."""

    bare: int
    """Resident before there were parameters."""
    joined: int = 0
    """The most that was resident from then to the head of the log."""
    peaks: list[int] = field(default_factory=list)
    """The most that was resident in each outer round."""
    spans: list[tuple[float, float]] = field(default_factory=list)
    """When each began and ended."""


def seen_at(folder: Path, site: str) -> Seen:
    return Seen(**json.loads((folder / site).read_text()))


def _model(mib: int) -> nn.ParameterList:
    rows = (mib << 20) // (4 * _TENSORS * _COLUMNS)
    return nn.ParameterList(nn.Parameter(torch.zeros(rows, _COLUMNS)) for _ in range(_TENSORS))


@torch.no_grad()
def _make_up(tensors: nn.ParameterList, seed: int, step: int, differs: bool) -> None:
    """One tensor after the other, in place."""
    for index, tensor in enumerate(tensors):
        values = np.random.default_rng([seed, step, index]).random(tensor.numel(), np.float32)
        tensor.view(-1).copy_(torch.from_numpy(values))
    if differs:
        tensors[0].view(-1)[0] += 1


def main() -> None:
    torch.set_num_threads(1)
    with join() as site:
        task = Task(**site.spec.params)
        forget_peak()
        seen = Seen(bare=resident())
        model = _model(task.mib)
        optimizer = site.optimizer(model)
        seen.joined = peak()
        batches = itertools.repeat(Tensor([0.0]))
        for step, _ in enumerate(site.batches(batches), 1):
            _make_up(model, task.seed, step, differs=site.name == task.differing)
            forget_peak()
            began = time.monotonic()
            optimizer.step()
            seen.spans.append((began, time.monotonic()))
            seen.peaks.append(peak())
        (Path(task.folder) / site.name).write_text(json.dumps(asdict(seen)))


if __name__ == "__main__":
    main()
