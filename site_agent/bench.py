"""`isthmus bench`: what the algorithms cost, beside the textbook way of doing the same, both measured in one run.

The layout is that of one block of GPT-2 small with a part of its embedding. One thread; medians of several rounds.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from pydantic_settings import BaseSettings, CliApp, SettingsConfigDict
from torch import Tensor

from algorithms.aggregate import aggregate
from algorithms.apply import apply_update
from algorithms.layout import ParameterLayout, TensorSpec
from algorithms.momentum import Ownership, encode
from algorithms.traffic import contribution_bytes, ddp_bytes
from algorithms.transforms import basis
from algorithms.updates import AggregateUpdate, SparseUpdate

__all__ = ["main"]

_SHAPES = {
    "embedding": (4096, 768),
    "attention.in": (2304, 768),
    "attention.out": (768, 768),
    "mlp.in": (3072, 768),
    "mlp.out": (768, 3072),
}
_SIDE = 64
_BETA = 0.99


class Bench(BaseSettings):
    """Measures encode, aggregate, and decode-and-apply, and compares them with the textbook way."""

    model_config = SettingsConfigDict(cli_prog_name="isthmus bench", cli_kebab_case=True, cli_hide_none_type=True)

    k: int = Field(default=32, ge=1, le=4096, description="coefficients per chunk of 64 x 64")
    sites: int = Field(default=4, ge=1, le=16)
    rounds: int = Field(default=5, ge=1)
    json_: Path | None = Field(default=None, alias="json", description="write the figures to this file")

    def cli_cmd(self) -> None:
        torch.set_num_threads(1)
        figures = _measure(self)
        text = json.dumps(figures, indent=2)
        if self.json_ is not None:
            self.json_.write_text(text + "\n")
        sys.stdout.write(text + "\n")


def main() -> None:
    CliApp.run(Bench)


def _measure(bench: Bench) -> dict[str, Any]:
    layout = ParameterLayout([TensorSpec(name, shape, 0) for name, shape in _SHAPES.items()], _SIDE)
    generator = torch.Generator().manual_seed(0)
    gradients = [
        {index: torch.randn(tensor.shape, generator=generator) for index, tensor in enumerate(layout.tensors)}
        for _ in range(bench.sites)
    ]
    ownership = Ownership(layout, range(layout.chunk_count))
    momenta = [{index: torch.zeros(size) for index, size in enumerate(ownership.sizes)} for _ in range(bench.sites)]
    parameters = {index: torch.randn(tensor.elements) for index, tensor in enumerate(layout.tensors)}

    def encode_one(site: int) -> SparseUpdate:
        return encode(ownership, momenta[site], gradients[site], beta=_BETA, k=bench.k, codec="sign")

    sent = [encode_one(site) for site in range(bench.sites)]
    update = aggregate(sent, layout, [0] * bench.sites)
    textbook = _Textbook(layout, bench.k)
    picks = [textbook.encode(gradients[site]) for site in range(bench.sites)]
    ours_and_theirs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "encode": (lambda: encode_one(0), lambda: textbook.encode(gradients[0])),
        "aggregate": (lambda: aggregate(sent, layout, [0] * bench.sites), lambda: textbook.aggregate(picks)),
        "decode_and_apply": (
            lambda: _apply(update, layout, parameters),
            lambda: textbook.decode_and_apply(picks, parameters),
        ),
    }
    millions = layout.parameter_count / 1e6
    figures: dict[str, Any] = {"parameters": layout.parameter_count, "k": bench.k, "sites": bench.sites}
    for name, (ours, theirs) in ours_and_theirs.items():
        figures |= _compare(name, ours, theirs, bench.rounds, millions)
    return figures | {
        "contribution_bytes": contribution_bytes(layout, bench.k, "sign"),
        "ddp_bytes": ddp_bytes(layout),
    }


def _apply(update: AggregateUpdate, layout: ParameterLayout, parameters: dict[int, Tensor]) -> None:
    apply_update(update, layout, parameters, (1e-3, 1e-3), (1.0, 1.0), lambda _: True)


def _compare(
    name: str, ours: Callable[[], object], theirs: Callable[[], object], rounds: int, millions: float
) -> dict[str, float]:
    """Milliseconds of CPU time per million parameters, in turn, and how many times faster ours is."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for function, own in zip((ours, theirs), times, strict=True):
            started = time.process_time()
            function()
            own.append((time.process_time() - started) * 1e3 / millions)
    mine, other = (statistics.median(own) for own in times)
    return {
        f"{name}_ms_per_million": round(mine, 3),
        f"{name}_spread": round((max(times[0]) - min(times[0])) / mine, 3),
        f"{name}_textbook_ms_per_million": round(other, 3),
        f"{name}_speedup": round(other / mine, 2),
    }


class _Textbook:
    """DeMo as the paper writes it down: momentum in the parameter domain, einsum, `torch.topk`, dense scatter."""

    def __init__(self, layout: ParameterLayout, k: int) -> None:
        self._layout = layout
        self._k = k
        self._basis = torch.from_numpy(basis("dct", _SIDE).orthonormal.copy()).float()
        self._momenta = [torch.zeros(tensor.shape) for tensor in layout.tensors]

    def encode(self, gradients: dict[int, Tensor]) -> list[tuple[Tensor, Tensor]]:
        picks = []
        for index, momentum in enumerate(self._momenta):
            momentum.mul_(_BETA).add_(gradients[index], alpha=1 - _BETA)
            coefficients = torch.einsum("ij,ajbk,lk->abil", self._basis, self._chunks(momentum), self._basis)
            flat = coefficients.reshape(-1, _SIDE * _SIDE)
            indices = flat.abs().topk(self._k, dim=1).indices
            values = flat.gather(1, indices)
            momentum.sub_(self._inverse(torch.zeros_like(flat).scatter_(1, indices, values), momentum.shape))
            picks.append((indices, values))
        return picks

    def aggregate(self, picks: list[list[tuple[Tensor, Tensor]]]) -> list[Tensor]:
        means = []
        for index, tensor in enumerate(self._layout.tensors):
            indices = torch.cat([site[index][0] for site in picks], dim=1)
            values = torch.cat([site[index][1] for site in picks], dim=1)
            zeros = torch.zeros(tensor.elements // _SIDE**2, _SIDE**2)
            means.append(zeros.scatter_reduce_(1, indices, values, reduce="mean", include_self=False))
        return means

    def decode_and_apply(self, picks: list[list[tuple[Tensor, Tensor]]], parameters: dict[int, Tensor]) -> None:
        for index, mean in enumerate(self.aggregate(picks)):
            shape = self._layout.tensors[index].shape
            parameters[index].view(shape).sub_(self._inverse(mean, shape).sign_(), alpha=1e-3)

    @staticmethod
    def _chunks(tensor: Tensor) -> Tensor:
        rows, cols = tensor.shape
        return tensor.view(rows // _SIDE, _SIDE, cols // _SIDE, _SIDE)

    def _inverse(self, flat: Tensor, shape: tuple[int, ...]) -> Tensor:
        rows, cols = shape
        grid = flat.view(rows // _SIDE, cols // _SIDE, _SIDE, _SIDE)
        return torch.einsum("ij,abil,lk->ajbk", self._basis, grid, self._basis).reshape(rows, cols)


if __name__ == "__main__":
    main()
