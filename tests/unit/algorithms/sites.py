"""A model with every kind of parameter, and rounds of several sites in memory."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from algorithms import DeMo
from algorithms.updates import SparseUpdate


class Odd(nn.Module):
    """Every kind of parameter that broke somebody's optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(37, 70)
        self.head = nn.Linear(70, 37, bias=False)
        self.head.weight = self.embedding.weight
        self.conv = nn.Conv2d(3, 6, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.unused = nn.Linear(5, 5)
        self.frozen = nn.Parameter(torch.ones(9), requires_grad=False)
        self.low = nn.Parameter(torch.linspace(-1, 1, 70 * 66, dtype=torch.bfloat16).view(66, 70))
        self.transposed = nn.Parameter(torch.linspace(-1, 1, 6 * 66).view(66, 6).T)
        self.strided = nn.Parameter(torch.linspace(0, 1, 12)[::2])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        features = hidden @ self.low.float().T @ self.transposed.T * self.strided
        image = hidden.reshape(1, -1)[:, :108].reshape(1, 3, 6, 6)
        return self.head(hidden).logsumexp(-1).sum() * self.scale + features.square().sum() + self.conv(image).sum()


def odd(seed: int = 0, **options: Any) -> tuple[Odd, DeMo]:
    torch.manual_seed(seed)
    model = Odd()
    return model, DeMo(model.named_parameters(), lr=2.0**-8, **options)


def backward(model: Odd, seed: int) -> None:
    model.zero_grad()
    model(torch.randint(37, (4, 9), generator=torch.Generator().manual_seed(seed))).backward()


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def step_together(optimizers: Sequence[DeMo], tokens: Sequence[int] | None = None) -> list[SparseUpdate]:
    """One step of all sites with the entry that the first of them makes; returns what they sent."""
    sent = [optimizer._contribution() for optimizer in optimizers]
    entry = optimizers[0].entry(sent, listed=True, tokens=tokens)
    for optimizer, mine in zip(optimizers, sent, strict=True):
        optimizer._exchange = lambda *_: entry
        optimizer._contribution = lambda mine=mine: mine  # type: ignore[method-assign]
        optimizer.step()
        del optimizer._contribution
    return sent


def with_gradient(parameter: nn.Parameter, seed: int = 0) -> nn.Parameter:
    """Of either sign, with magnitudes of 0.5 to 1.5, so that none of them quantises to zero."""
    noise = 2 * torch.rand(parameter.shape, generator=torch.Generator().manual_seed(seed)) - 1
    gradient = noise + 0.5 * noise.sign()
    parameter.grad = torch.empty_like(parameter).copy_(gradient)
    return parameter


def momentum(optimizer: DeMo, parameter: torch.Tensor) -> torch.Tensor:
    state: torch.Tensor = optimizer.state[parameter]["momentum"]
    return state
