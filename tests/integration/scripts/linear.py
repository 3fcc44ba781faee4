"""A training script with one linear layer, which misbehaves where the run's params tell it to.

Params: `plain`: no DDP; `evaluate_every`: steps between evaluations;
`seed`: of the data, which are then the same in every run;
`folder`, where it leaves a line with the digest of the parameters after every step; `size` of the layer;
`raise_at` and `raising`: the step at which a site fails; `straying`: the site whose last rank changes its parameters;
`flipping`: a site, in one of whose parameters one bit changes after step 2; `own`: the script makes the optimizer;
`holding` and `hold_at`: sites, and the step at which each leaves a file `held-SITE` and waits for a file `go-SITE`; or
`holding` alone: such steps by site.
"""

import hashlib
import itertools
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from site_agent import join


def random_batches(width: int, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(4, width, generator=generator) for _ in itertools.count())


def fail_if_told(params: dict[str, Any], site: str, step: int) -> None:
    if params.get("raising") == site and params["raise_at"] == step:
        sys.stderr.write("this is the last line before the end\n")
        (Path(params["folder"]) / "raised").touch()
        raise RuntimeError("the data are broken")


def hold_if_told(params: dict[str, Any], site: str, step: int) -> None:
    holding = params.get("holding", {})
    if site in holding and step == (holding[site] if isinstance(holding, dict) else params["hold_at"]):
        folder = Path(params["folder"])
        (folder / f"held-{site}").touch()
        while not (folder / f"go-{site}").exists():
            time.sleep(0.02)


def flip_one_bit(tensor: Tensor) -> None:
    tensor.view(torch.int32)[0] ^= 1


def digest(model: nn.Module) -> str:
    """Of the parameters in layout order."""
    named = sorted(model.named_parameters())
    return hashlib.sha256(b"".join(value.detach().numpy().tobytes() for _, value in named)).hexdigest()


def main() -> None:
    with join() as site:
        params = site.spec.params
        folder, size = Path(params["folder"]), params.get("size", [24, 16])
        seed = zlib.crc32(f"{params['seed']} {site.name} {site.rank}".encode()) if "seed" in params else site.seed
        torch.manual_seed(site.rank + 10)  # not the same at all ranks: entry 0 makes it so
        model = nn.Linear(*size)
        wrapped = DistributedDataParallel(model) if site.ranks > 1 and not params.get("plain") else model
        own = (lambda groups: torch.optim.RMSprop(groups)) if params.get("own") else None
        optimizer = site.optimizer(wrapped, inner=own)
        if "evaluate_every" in params:
            site.evaluate(lambda: float(model.weight.abs().mean()), params["evaluate_every"])
        with (folder / f"digests-{site.name}-{site.rank}").open("w", buffering=1) as digests:
            for step, batch in enumerate(site.batches(random_batches(size[0], seed)), 1):
                loss = (wrapped(batch) - 1).square().mean()
                loss.backward()
                fail_if_told(params, site.name, step)
                hold_if_told(params, site.name, step)
                optimizer.step()
                optimizer.zero_grad()
                if params.get("straying") == site.name and 0 < site.rank == site.ranks - 1:
                    model.bias.data[0] += 1
                if params.get("flipping") == site.name and step == 2:
                    flip_one_bit(model.bias.data)
                digests.write(f"{digest(model)}\n")
                site.log(loss=loss.item())


if __name__ == "__main__":
    main()
