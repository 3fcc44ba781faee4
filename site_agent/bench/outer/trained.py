"""What the sites of a run train that is stopped and started again: a small layer, on made-up data.

Every process leaves a file of its own with a line `STEP DIGEST` for the parameters that it begins with, and for those
after each of its steps.
"""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from algorithms import DeMo
from site_agent import join

__all__ = ["Lines", "lines_of"]

_FEATURES = 96
Lines = list[tuple[int, str]]


def lines_of(path: Path) -> Lines:
    """But for the one that is being written."""
    whole = path.read_text().split("\n")[:-1]
    return [(int(step), digest) for step, _, digest in (line.partition(" ") for line in whole)]


def _batches(seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(8, _FEATURES, generator=generator) for _ in itertools.count())


def main() -> None:
    torch.set_num_threads(1)
    with join() as site:
        model = nn.Linear(_FEATURES, _FEATURES)
        optimizer = site.optimizer(model)
        assert isinstance(optimizer, DeMo)
        path = Path(site.spec.params["folder"]) / f"{site.name}-{os.getpid()}"
        with path.open("w", buffering=1) as lines:
            lines.write(f"{optimizer.steps} {optimizer.parameters_digest()}\n")
            for batch in site.batches(_batches(site.seed)):
                (model(batch) - batch.flip(1)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                lines.write(f"{optimizer.steps} {optimizer.parameters_digest()}\n")


if __name__ == "__main__":
    main()
