"""What is learnt: a byte-level language model of about a million parameters, `examples/tiny_lm`.

Everything depends on the seed and not on the method: the initial weights, and the sequences that each site draws.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Task"]

_HELD_OUT_SEQUENCES = 256


@dataclass(frozen=True)
class Task:
    """The model's size, and what a site draws per step: `batch` sequences of `context` bytes."""

    batch: int = 4
    context: int = 64
    width: int = 192
    layers: int = 2
    heads: int = 4

    def model(self, seed: int) -> nn.Module:
        """Called with sequences (batch, context + 1) it returns their mean loss, in nats per byte."""
        shape = {"context": self.context, "width": self.width, "layers": self.layers, "heads": self.heads}
        model: nn.Module = _tiny_lm("model").build_model(seed, **shape)
        return model

    def batches(self, seed: int, site: int) -> Iterator[Tensor]:
        """The sequences of a site, int64 (batch, context + 1), without end."""
        crops = _tiny_lm("data").random_crops(_corpus(self.context).training, self.batch, self.context, (seed, site))
        return map(torch.from_numpy, crops)

    @torch.no_grad()
    def held_out_loss(self, model: nn.Module) -> float:
        """In nats per byte, on sequences that no site draws."""
        crops = _tiny_lm("data").even_crops(_corpus(self.context).held_out, _HELD_OUT_SEQUENCES, self.context)
        return float(model(torch.from_numpy(crops)))


def _tiny_lm(name: str) -> Any:
    """A module of the example, which is in a clone of the repository and in no installed package."""
    try:
        return import_module(f"examples.tiny_lm.{name}")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("examples"):
            raise
        raise SystemExit(
            "the quality benchmark trains examples/tiny_lm: run it in the root of a clone of the repository"
        ) from None


@lru_cache(maxsize=1)
def _corpus(context: int) -> Any:
    return _tiny_lm("data").load_corpus(None, context)
