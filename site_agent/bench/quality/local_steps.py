"""Sites that take many steps of AdamW alone, and then send how far they came: DiLoCo and SparseLoCo."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from algorithms.bits import packed_size
from algorithms.codec import Codec, index_bits, quantise
from algorithms.grid import Block
from algorithms.outer import nesterov, weighted_mean
from algorithms.schedule import outer_due
from algorithms.updates import CODEC_BITS
from site_agent.bench.quality.averaging import adamw
from site_agent.bench.quality.float32 import block_view, layout_of, pick, tensors_of
from site_agent.bench.quality.method import Sites, set_rate

__all__ = ["DiLoCo", "SparseLoCo"]


class _LocalSteps:
    """A replica and an AdamW per site; whether an outer step is due is the only thing that they share."""

    def __init__(self, sites: Sites, every: int) -> None:
        self.replicas = sites.replicas()
        self._sites = sites
        self._every = every
        self._steps = 0
        self._optimizers = [adamw(replica) for replica in self.replicas]

    def step(self, batches: Sequence[Tensor], lr: float) -> bool:
        """One step at every site; whether an outer step follows."""
        for replica, optimizers, batch in zip(self.replicas, self._optimizers, batches, strict=True):
            self._sites.backward(replica, batch)
            self._sites.clip(replica)
            set_rate(optimizers, lr)
            for optimizer in optimizers:
                optimizer.step()
        self._steps += 1
        return outer_due(self._steps, self._every, self._sites.steps)


class DiLoCo:
    """DiLoCo (Douillard et al.): AdamW inside, Nesterov outside. Sent: the pseudo-gradient in bfloat16 per round."""

    def __init__(self, sites: Sites, *, every: int = 50, outer_lr: float = 0.7, outer_momentum: float = 0.5) -> None:
        self.sent = 0
        self._local = _LocalSteps(sites, every)
        self._outer = (outer_lr, outer_momentum)
        self._anchor = _vector(sites.model)
        self._buffer = np.zeros_like(self._anchor)

    def step(self, batches: Sequence[Tensor], lr: float) -> None:
        if not self._local.step(batches, lr):
            return
        sent = [_bfloat16(self._anchor - _vector(replica)) for replica in self._local.replicas]
        mean = self._anchor.astype(np.float64) - weighted_mean(sent, [1] * len(sent))
        self._anchor, self._buffer = nesterov(self._anchor, self._buffer, mean, *self._outer)
        self.sent += 2 * self._anchor.size
        for replica in self._local.replicas:
            vector_to_parameters(torch.from_numpy(self._anchor.copy()), replica.parameters())


class SparseLoCo:
    """SparseLoCo (Sarfi et al.): of each chunk of the pseudo-gradient the largest elements in few bits, the rest kept
    as error feedback, and their mean over all sites subtracted. Sent: packed indices, values and a scale per chunk.
    """

    def __init__(
        self,
        sites: Sites,
        *,
        every: int = 15,
        k: int = 128,
        codec: Codec,
        beta: float = 0.95,
        outer_lr: float = 1.0,
    ) -> None:
        self.sent = 0
        self._local = _LocalSteps(sites, every)
        self._k, self._codec, self._beta, self._outer_lr = k, codec, beta, outer_lr
        self._layout = layout_of(sites.model, "identity")
        self._anchor = [parameter.detach().clone() for parameter in tensors_of(sites.model, self._layout)]
        self._errors = [self._zeros() for _ in range(sites.count)]

    def step(self, batches: Sequence[Tensor], lr: float) -> None:
        if not self._local.step(batches, lr):
            return
        means = self._zeros()
        for site, replica in enumerate(self._local.replicas):
            parameters = tensors_of(replica, self._layout)
            deltas = [anchor - parameter.detach() for anchor, parameter in zip(self._anchor, parameters, strict=True)]
            for block, error, mean in zip(self._layout.blocks, self._errors[site], means, strict=True):
                error.mul_(self._beta).add_(block_view(deltas[block.tensor], block).reshape(error.shape))
                places, values = self._send(error, block, counted=site == 0)
                error.scatter_add_(1, places, -values)
                mean.scatter_add_(1, places, values / len(self._errors))
        for block, mean in zip(self._layout.blocks, means, strict=True):
            block_view(self._anchor[block.tensor], block).sub_(mean.view(block.size), alpha=self._outer_lr)
        for replica in self._local.replicas:
            for parameter, anchor in zip(tensors_of(replica, self._layout), self._anchor, strict=True):
                parameter.data.copy_(anchor)

    def _zeros(self) -> list[Tensor]:
        """Per block (chunks, elements)."""
        return [torch.zeros(len(block), block.elements) for block in self._layout.blocks]

    def _send(self, rows: Tensor, block: Block, *, counted: bool) -> tuple[Tensor, Tensor]:
        """Positions and values, as sent, of the chunks (m, elements) of a block."""
        places = pick(rows, self._k, self._layout.chunk)
        values, scales = quantise(rows.gather(1, places).numpy(), self._codec)
        if counted:
            self.sent += packed_size(values.size, index_bits(block.elements))
            self.sent += packed_size(values.size, CODEC_BITS[self._codec])
            self.sent += 2 * scales.size
        return places, torch.from_numpy(values * scales[:, None])


def _vector(model: nn.Module) -> NDArray[np.float32]:
    values: NDArray[np.float32] = parameters_to_vector(model.parameters()).detach().numpy().copy()
    return values


def _bfloat16(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """What is left of the values when they are sent in bfloat16."""
    rounded: NDArray[np.float32] = torch.from_numpy(values).bfloat16().float().numpy()
    return rounded
