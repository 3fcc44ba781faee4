"""Sites that take many steps of AdamW alone, and then send how far they came: SparseLoCo (DiLoCo: `streaming.py`)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from algorithms.bits import packed_size
from algorithms.codec import Codec, index_bits, quantise
from algorithms.grid import Block
from algorithms.schedule import outer_due
from algorithms.updates import CODEC_BITS
from site_agent.bench.quality.averaging import adamw
from site_agent.bench.quality.float32 import block_view, layout_of, pick, tensors_of
from site_agent.bench.quality.method import Sites, set_rate

__all__ = ["LocalSteps", "SparseLoCo"]


class LocalSteps:
    """A replica and an AdamW per site."""

    def __init__(self, sites: Sites) -> None:
        self.replicas = sites.replicas()
        self.taken = 0
        self._sites = sites
        self._optimizers = [adamw(replica) for replica in self.replicas]

    def step(self, batches: Sequence[Tensor], lr: float) -> None:
        """One step at every site."""
        for replica, optimizers, batch in zip(self.replicas, self._optimizers, batches, strict=True):
            self._sites.backward(replica, batch)
            self._sites.clip(replica)
            set_rate(optimizers, lr)
            for optimizer in optimizers:
                optimizer.step()
        self.taken += 1


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
        self._local = LocalSteps(sites)
        self._every, self._steps = every, sites.steps
        self._k, self._codec, self._beta, self._outer_lr = k, codec, beta, outer_lr
        self._layout = layout_of(sites.model, "identity")
        self._anchor = [parameter.detach().clone() for parameter in tensors_of(sites.model, self._layout)]
        self._errors = [self._zeros() for _ in range(sites.count)]

    def step(self, batches: Sequence[Tensor], lr: float) -> None:
        self._local.step(batches, lr)
        if not outer_due(self._local.taken, self._every, self._steps):
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
