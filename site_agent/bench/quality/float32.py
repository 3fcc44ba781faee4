"""DeMo as the paper writes it down, in float32 throughout: the yardstick for what values in few bits lose.

The chunks are those of our layout. Nothing is quantised, on the way up or down, and nothing is an integer.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from algorithms.bits import packed_size
from algorithms.codec import index_bits
from algorithms.grid import Block
from algorithms.layout import ParameterLayout, TensorSpec, is_dense, kept
from algorithms.transforms import Transform, basis
from site_agent.bench.quality.method import Sites

__all__ = ["Float32DeMo", "block_view", "layout_of", "pick", "tensors_of"]


def layout_of(model: nn.Module, transform: Transform = "dct") -> ParameterLayout:
    """All parameters in one group, in chunks of 64 x 64."""
    specs = [TensorSpec(name, tuple(parameter.shape), 0) for name, parameter in model.named_parameters()]
    return ParameterLayout(specs, 64, ("all",), transform)


def tensors_of(model: nn.Module, layout: ParameterLayout) -> list[nn.Parameter]:
    """The parameters in layout order."""
    named = dict(model.named_parameters())
    return [named[tensor.name] for tensor in layout.tensors]


def block_view(tensor: Tensor, block: Block) -> Tensor:
    """All chunks of a block as a view (batch, grid rows, grid cols, rows, cols) of a contiguous tensor."""
    return tensor.as_strided(block.size, block.strides, tensor.storage_offset() + block.offset)


def pick(rows: Tensor, k: int, chunk: int) -> Tensor:
    """Positions (m, k_c) of what is sent of the chunks (m, elements): all of a dense chunk, else the largest."""
    elements = rows.shape[1]
    if is_dense(elements):
        return torch.arange(elements).expand(len(rows), elements)
    return rows.abs().topk(kept(k, elements, chunk), dim=1).indices


class Float32DeMo:
    """DeMo with local subtraction and signum, without any quantisation. Sent: packed indices and float32 values."""

    def __init__(self, sites: Sites, *, k: int = 32, beta: float = 0.99, alpha: float = 1.0) -> None:
        self.sent = 0
        self._sites = sites
        self._k, self._beta, self._alpha = k, beta, alpha
        self._layout = layout_of(sites.model)
        self._parameters = tensors_of(sites.model, self._layout)
        self._momenta = [self._zeros() for _ in range(sites.count)]

    def step(self, batches: Sequence[Tensor], lr: float) -> None:
        totals, counts = self._zeros(), self._zeros()
        for site, batch in enumerate(batches):
            self._sites.backward(self._sites.model, batch)
            self._sites.clip(self._sites.model)
            self._contribute(site, totals, counts)
        for block, total, count in zip(self._layout.blocks, totals, counts, strict=True):
            mean = (total / count.clamp(min=1)).view(-1, *block.shape)
            direction = (mean if is_dense(block.elements) else _inverse(mean)).sign().view(block.size)
            block_view(self._parameters[block.tensor].data, block).sub_(direction, alpha=lr)

    def _zeros(self) -> list[Tensor]:
        """Per block (chunks, elements)."""
        return [torch.zeros(len(block), block.elements) for block in self._layout.blocks]

    def _contribute(self, site: int, totals: list[Tensor], counts: list[Tensor]) -> None:
        """Adds what a site sends to `totals`, and 1 to `counts` for each of its coefficients."""
        for block, momentum, total, count in zip(self._layout.blocks, self._momenta[site], totals, counts, strict=True):
            gradient = self._parameters[block.tensor].grad
            assert gradient is not None
            chunks = block_view(gradient, block).reshape(-1, *block.shape)
            coefficients = chunks if is_dense(block.elements) else _forward(chunks)
            momentum.lerp_(coefficients.reshape(momentum.shape), 1 - self._beta)
            places = pick(momentum, self._k, self._layout.chunk)
            values = momentum.gather(1, places)
            momentum.scatter_add_(1, places, -self._alpha * values)
            total.scatter_add_(1, places, values)
            count.scatter_add_(1, places, torch.ones_like(values))
            if site == 0:
                self.sent += packed_size(values.numel(), index_bits(block.elements)) + 4 * values.numel()


def _sides(chunks: Tensor) -> tuple[Tensor, Tensor]:
    _, rows, cols = chunks.shape
    left, right = (torch.from_numpy(basis("dct", length).orthonormal.copy()).float() for length in (rows, cols))
    return left, right


def _forward(chunks: Tensor) -> Tensor:
    """`L X R'` of (m, rows, cols)."""
    left, right = _sides(chunks)
    return left @ chunks @ right.T


def _inverse(coefficients: Tensor) -> Tensor:
    """`L' Q R` of (m, rows, cols)."""
    left, right = _sides(coefficients)
    return left.T @ coefficients @ right
