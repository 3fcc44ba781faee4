"""`python -m tests.faults.killed_rank FOLDER SITE`: a training script, with traps (`tests.faults.traps`).

Its data follow from the site's name alone. It trains up to the step in the file `gate`, and says after every step which
parameters it holds. Whatever is larger than a kilobyte it uploads in pieces.
"""

import itertools
import json
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

import api.transfers
from site_agent import join
from tests.faults.points import IN_RANK
from tests.faults.traps import Traps

WIDTH = 32


class Model(nn.Module):
    """Two layers, and a buffer that is another one at every site."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.second = nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, batch: Tensor) -> Tensor:
        self.seen += batch.detach().mean()
        return self.second(torch.relu(self.first(batch)))


def batches(seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(4, WIDTH, generator=generator) for _ in itertools.count())


def train(gate: Path) -> None:
    torch.set_num_threads(1)
    with join() as site:
        torch.manual_seed(7)
        model = Model()
        optimizer = site.optimizer(model)
        for batch in site.batches(batches(zlib.crc32(site.name.encode()))):
            while optimizer.steps >= int(gate.read_text()):
                time.sleep(0.02)
            loss = (model(batch) - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            applied = {"step": optimizer.steps, "digest": optimizer.parameters_digest()}
            sys.stdout.write(json.dumps(applied) + "\n")
            sys.stdout.flush()
            site.log(loss=loss.item())


if __name__ == "__main__":
    folder, name = Path(sys.argv[1]), sys.argv[2]
    api.transfers.WHOLE, api.transfers.BLOCK, api.transfers.CHUNK = 1 << 10, 1 << 10, 1 << 11
    Traps(folder).install(IN_RANK, name)
    train(folder / "gate")
