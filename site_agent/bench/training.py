"""A language model over bytes, trained for a short while with DeMo on Python's own sources: for a real momentum."""

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from algorithms import DeMo
from algorithms.layout import ParameterLayout

__all__ = ["Trained", "train"]

CONTEXT = 64
BATCH = 4
HEADS = 8
LR = 1e-3


@dataclass(frozen=True)
class Trained:
    layout: ParameterLayout
    momentum: dict[int, Tensor]
    """By position in the layout, as `algorithms.momentum` keeps it."""
    losses: list[float]
    """Nats per byte of every step."""


class _Model(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, HEADS, 4 * width, dropout=0.0, activation=F.gelu, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        for table in (self.embedding, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, sequences: Tensor) -> Tensor:
        """The mean loss of predicting bytes 1 to CONTEXT of (batch, CONTEXT + 1)."""
        x = self.embedding(sequences[:, :-1]) + self.positions.weight
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), sequences[:, 1:].flatten())


def train(layers: int, width: int, steps: int) -> Trained:
    """About `12 * layers * width^2` parameters; 256 bytes per step."""
    text = _sources()
    generator = np.random.default_rng(0)
    torch.manual_seed(0)
    model = _Model(layers, width)
    optimizer = DeMo(model.named_parameters(), lr=LR)
    losses = []
    for _ in range(steps):
        starts = generator.integers(len(text) - CONTEXT, size=(BATCH, 1))
        loss = model(torch.from_numpy(text[starts + np.arange(CONTEXT + 1)].astype(np.int64)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    index = optimizer.layout.index
    momentum = {index[name]: optimizer.state[value]["momentum"] for name, value in model.named_parameters()}
    return Trained(optimizer.layout, momentum, losses)


def _sources() -> np.ndarray:
    """The modules of the standard library, uint8, about five million."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)
