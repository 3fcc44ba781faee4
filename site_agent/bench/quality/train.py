"""Trains one row of the table from one seed."""

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore
from torch.multiprocessing.spawn import spawn

from algorithms.schedule import learning_rate
from site_agent.bench.quality.averaging import Averaging, PowerSGD, adamw, muon_and_adamw
from site_agent.bench.quality.demo_sites import DeMoSites
from site_agent.bench.quality.float32 import Float32DeMo
from site_agent.bench.quality.local_steps import SparseLoCo
from site_agent.bench.quality.method import Method, Sites
from site_agent.bench.quality.streaming import DiLoCo
from site_agent.bench.quality.table import Row
from site_agent.bench.quality.task import Task

__all__ = ["METHODS", "Outcome", "Run", "check", "train"]

METHODS: Mapping[str, Callable[..., Method]] = {
    "adamw": partial(Averaging, optimizers=adamw),
    "muon": partial(Averaging, optimizers=muon_and_adamw),
    "powersgd": PowerSGD,
    "diloco": DiLoCo,
    "sparseloco": SparseLoCo,
    "float32": Float32DeMo,
    "demo": DeMoSites,
}

_IN_PROCESSES = "powersgd"
"""The method that has a process for each site."""

_WARMUP = 0.05
"""Of all steps, in which the learning rate rises; then it falls along a cosine."""


@dataclass(frozen=True)
class Run:
    """All that decides how a training ends."""

    row: Row
    seed: int
    task: Task
    sites: int
    steps: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Outcome:
    loss: float
    """Held-out, nats per byte; not a number if the training has diverged."""
    sent: int
    """Bytes, by one site."""


def train(run: Run) -> Outcome:
    """Raises TypeError or ValueError on a setting that the method does not have."""
    if run.row.method == _IN_PROCESSES:
        return _train_in_processes(run)
    model = run.task.model(run.seed)
    method = _method(run, model, run.sites)
    return _train(run, model, method, range(run.sites))


def check(row: Row) -> None:
    """Raises ValueError, which names the row, unless its method exists and takes all of its settings."""
    try:
        if row.method == _IN_PROCESSES:
            signature(METHODS[row.method]).bind(None, **row.settings)
            return
        sites = Sites(
            nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), lambda model, batch: torch.sum(model(batch)), 1, 1
        )
        METHODS[row.method](sites, **row.settings).step([torch.ones(1, 16)], 1e-3)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"row {row.name!r}: {error}") from error


def _method(run: Run, model: nn.Module, sites: int) -> Method:
    return METHODS[run.row.method](Sites(model, _loss, sites, run.steps), **run.row.settings)


def _train(run: Run, model: nn.Module, method: Method, sites: range) -> Outcome:
    """The steps of the sites that this process has."""
    streams = [run.task.batches(run.seed, site) for site in sites]
    warmup = round(_WARMUP * run.steps)
    for step in range(1, run.steps + 1):
        lr = learning_rate(step, lr=run.row.lr, steps=run.steps, warmup=warmup, schedule="cosine")
        method.step([next(stream) for stream in streams], lr)
    return Outcome(run.task.held_out_loss(model), method.sent)


def _train_in_processes(run: Run) -> Outcome:
    """One process per site, which meet in a file."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_train_rank, (run, Path(folder)), run.sites)  # type: ignore[no-untyped-call]
        return Outcome(**json.loads((Path(folder) / "outcome").read_text()))


def _train_rank(rank: int, run: Run, folder: Path) -> None:
    torch.set_num_threads(1)
    store = FileStore(str(folder / "store"), run.sites)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=run.sites)
    model = run.task.model(run.seed)
    torch.manual_seed(run.seed)
    outcome = _train(run, model, _method(run, model, 1), range(rank, rank + 1))
    if rank == 0:
        (folder / "outcome").write_text(json.dumps(asdict(outcome)))
    dist.barrier()
    dist.destroy_process_group()


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch)
    return loss
