"""A training script whose model has everything that is odd, and whose gradients are not finite where params say.

Params: `folder`; `not_finite`, the names of sites by step; and it goes on after its loop once `folder/go` exists.
"""

import json
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from site_agent import join


class Odd(nn.Module):
    def __init__(self, mean: float) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)
        self.norm = nn.BatchNorm1d(12)
        self.norm.running_mean.fill_(mean)
        self.norm.num_batches_tracked.fill_(int(mean))
        self.frozen = nn.Parameter(torch.ones(3, 30), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(70))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.coarse = nn.Linear(12, 6, dtype=torch.bfloat16)
        self.convolution = nn.Conv2d(1, 4, 3)

    def forward(self, batch: Tensor) -> Tensor:
        hidden = self.norm(self.layer(batch)) * self.scale + self.frozen.sum()
        return self.coarse(hidden.bfloat16()).float().sum() + self.convolution(batch[None, None]).square().sum()


def main() -> None:
    with join() as site:
        folder = Path(site.spec.params["folder"])
        torch.manual_seed(site.seed % 2**32)
        model = Odd(mean=float(ord(site.name[0])))
        optimizer = site.optimizer(model)
        buffers = {name: buffer.tolist() for name, buffer in model.named_buffers()}
        (folder / f"buffers-{site.name}").write_text(json.dumps(buffers))
        digests = []
        for step, _ in enumerate(site.batches([torch.zeros(5)]), 1):
            model(torch.randn(8, 12)).backward()
            if site.name in site.spec.params["not_finite"].get(str(step), ()):
                model.layer.weight.grad[3, 4] = torch.nan
            optimizer.step()
            optimizer.zero_grad()
            digests.append(optimizer.parameters_digest())
    (folder / f"digests-{site.name}-0").write_text("\n".join(digests))
    while not (folder / "go").exists():  # the run has succeeded long since
        time.sleep(0.02)
    (folder / f"done-{site.name}").touch()


if __name__ == "__main__":
    main()
