"""Data-parallel training: the gradients of all sites are averaged at every step, for an optimizer of torch's own."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn, optim
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from site_agent.bench.quality.method import Sites, set_rate

__all__ = ["Averaging", "PowerSGD", "adamw", "muon_and_adamw"]

_BETAS = (0.9, 0.95)


def adamw(model: nn.Module) -> list[optim.Optimizer]:
    return [optim.AdamW(model.parameters(), betas=_BETAS, weight_decay=0.0)]


def muon_and_adamw(model: nn.Module) -> list[optim.Optimizer]:
    """Muon for the matrices inside, scaled so that AdamW's rate suits them, and AdamW for embeddings and vectors."""
    embeddings = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters()
    }
    inside: list[Tensor] = []
    others: list[Tensor] = []
    for parameter in model.parameters():
        (inside if parameter.ndim == 2 and id(parameter) not in embeddings else others).append(parameter)
    return [
        optim.Muon(inside, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        optim.AdamW(others, betas=_BETAS, weight_decay=0.0),
    ]


class Averaging:
    """DDP with gradients in bfloat16. Sent: two bytes per parameter and step, one way.

    All batches go through the model as one, whose gradient is the mean of theirs.
    """

    def __init__(self, sites: Sites, optimizers: Callable[[nn.Module], list[optim.Optimizer]]) -> None:
        self.sent = 0
        self._sites = sites
        self._optimizers = optimizers(sites.model)

    def step(self, batches: Sequence[Tensor], lr: float) -> None:
        model = self._sites.model
        self._sites.backward(model, torch.cat(list(batches)))
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad = parameter.grad.bfloat16().float()
            self.sent += 2 * parameter.numel()
        self._sites.clip(model)
        set_rate(self._optimizers, lr)
        for optimizer in self._optimizers:
            optimizer.step()


class PowerSGD:
    """One rank of DDP with torch's PowerSGD hook and AdamW; a site is a process of the default group.

    Sent, in float32: everything in the first `start` steps; then the two factors of each matrix that it compresses,
    and all other tensors, as the hook itself counts them.
    """

    def __init__(self, sites: Sites, *, rank: int, start: int = 10) -> None:
        self._sites = sites
        # one bucket: of several, gloo's threads would start the collectives in another order at every rank
        megabytes = 1 + sum(4 * parameter.numel() for parameter in sites.model.parameters()) // (1 << 20)
        self._ddp = DistributedDataParallel(sites.model, bucket_cap_mb=megabytes)
        self._state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=start)
        self._ddp.register_comm_hook(self._state, powerSGD_hook)
        self._optimizers = adamw(sites.model)

    @property
    def sent(self) -> int:
        parameters = sum(parameter.numel() for parameter in self._sites.model.parameters())
        uncompressed = min(self._state.iter, self._state.start_powerSGD_iter) * parameters
        return 4 * int(uncompressed + self._state.total_numel_after_compression)

    def step(self, batches: Sequence[Tensor], lr: float) -> None:
        (batch,) = batches
        self._sites.backward(self._ddp, batch)
        self._sites.clip(self._ddp)
        set_rate(self._optimizers, lr)
        for optimizer in self._optimizers:
            optimizer.step()
