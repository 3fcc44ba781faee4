"""The training script of `isthmus chaos`: one small layer; says after every step which parameters it holds."""

import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from site_agent import join


def _batches(seed: int, features: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(4, features, generator=generator) for _ in itertools.count())


def main() -> None:
    torch.set_num_threads(1)
    with join() as site:
        params = site.spec.params
        go = Path(params["go"])
        torch.manual_seed(site.rank)  # not the same at all ranks: entry 0 makes it so
        model = nn.Linear(*params["size"])
        wrapped = DistributedDataParallel(model) if site.ranks > 1 else model
        optimizer = site.optimizer(wrapped)
        applied: dict[str, int | str] = {}
        for batch in site.batches(_batches(site.seed, params["size"][0])):
            time.sleep(params["pace_s"])
            while optimizer.steps >= params["hold_at"] and not go.exists():
                time.sleep(params["pace_s"])
            loss = (wrapped(batch) - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            now = {"step": optimizer.steps, "digest": optimizer.parameters_digest()}
            if now != applied:  # with overlap nothing is applied after the first step, and after an outer step
                sys.stdout.write(json.dumps(now) + "\n")
                sys.stdout.flush()
            applied = now
            site.log(loss=loss.item())


if __name__ == "__main__":
    main()
