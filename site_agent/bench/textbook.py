"""DeMo as a competent reader of the paper writes it in PyTorch: what our pieces are measured against.

One parameter at a time and no loop over chunks: momentum in the domain of the parameters, an einsum over chunks of
64 x 64 (the contraction in this order is the fastest einsum of those we tried, in both directions), `torch.topk`, a
dense scatter and an inverse einsum for what is subtracted. It is sent as it is, int64 indices and float32 values: 12
bytes per coefficient, and nothing to pack. Every site gathers the contributions of all, averages them by
`scatter_reduce_`, transforms back and moves by the sign. Source: Peng et al., "DeMo: Decoupled Momentum Optimization".

`Tuned` is the same with the fastest dense forms we know: matrix products of chunks made contiguous instead of einsum,
and the mean as two sums. It is measured, too, so that nobody has to wonder how much is due to the choice of call.

A vector of 64 r elements is one matrix of r x 64 here as in our layout, so that both do the same work.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from algorithms.grid import Block
from algorithms.layout import ParameterLayout, kept
from algorithms.transforms import basis

__all__ = ["BETA", "Picks", "Textbook", "Tuned", "single_block"]

BETA = 0.99

Picks = list[tuple[Tensor, Tensor]]
"""Per tensor, of every chunk: indices int64 (chunks, k) and values float32 (chunks, k)."""


def single_block(layout: ParameterLayout, tensor: int) -> Block:
    """The block of a tensor all of whose chunks have one shape. Raises ValueError if it is cut in another way."""
    blocks = layout.tensor_blocks[tensor]
    if len(blocks) != 1 or blocks[0].size[0] != 1:
        raise ValueError(f"the textbook cannot cut tensor {layout.tensors[tensor].name!r} into equal chunks")
    return blocks[0]


class Textbook:
    """One site's momentum, and the four pieces of a step."""

    def __init__(self, layout: ParameterLayout, k: int) -> None:
        self._blocks = [single_block(layout, tensor) for tensor in range(len(layout.tensors))]
        self._kept = [kept(k, block.elements, layout.chunk) for block in self._blocks]
        self._momenta = [torch.zeros(tensor.elements) for tensor in layout.tensors]
        lengths = {length for block in self._blocks for length in block.shape}
        self._basis = {length: torch.from_numpy(basis("dct", length).orthonormal.copy()).float() for length in lengths}

    def encode(self, gradients: Mapping[int, Tensor]) -> Picks:
        """Momentum, transform, top-k, and the subtraction of what is sent."""
        picks = []
        for tensor, (block, momentum, k) in enumerate(zip(self._blocks, self._momenta, self._kept, strict=True)):
            momentum.mul_(BETA).add_(gradients[tensor].view(-1), alpha=1 - BETA)
            coefficients = self._transform(momentum, block)
            indices = coefficients.abs().topk(k, dim=1, sorted=False).indices
            values = coefficients.gather(1, indices)
            sent = torch.zeros_like(coefficients).scatter_(1, indices, values)
            momentum.sub_(self._inverse(sent, block))
            picks.append((indices, values))
        return picks

    def means(self, sites: Sequence[Picks]) -> Iterator[Tensor]:
        """Of each tensor in turn the mean over those sites that sent a coefficient, dense (chunks, elements)."""
        for tensor, block in enumerate(self._blocks):
            indices = torch.cat([site[tensor][0] for site in sites], dim=1)
            values = torch.cat([site[tensor][1] for site in sites], dim=1)
            yield self._mean(indices, values, block)

    def decode_and_apply(self, sites: Sequence[Picks], parameters: Mapping[int, Tensor], lr: float) -> None:
        """The mean, its inverse transform, and `X - lr * sign`."""
        for tensor, mean in enumerate(self.means(sites)):
            parameters[tensor].sub_(self._inverse(mean, self._blocks[tensor]).sign_(), alpha=lr)

    def _transform(self, flat: Tensor, block: Block) -> Tensor:
        """Coefficients (chunks, elements) of a flat tensor."""
        left, right = (self._basis[length] for length in block.shape)
        return torch.einsum("ij,ajbk,lk->abil", left, _view(flat, block), right).reshape(-1, block.elements)

    def _inverse(self, coefficients: Tensor, block: Block) -> Tensor:
        """The flat tensor of coefficients (chunks, elements)."""
        left, right = (self._basis[length] for length in block.shape)
        _, grid_rows, grid_cols, rows, cols = block.size
        grid = coefficients.view(grid_rows, grid_cols, rows, cols)
        tensor: Tensor = torch.einsum("ij,abil,lk->ajbk", left, grid, right)
        return tensor.reshape(-1)

    def _mean(self, indices: Tensor, values: Tensor, block: Block) -> Tensor:
        zeros = torch.zeros(len(block), block.elements)
        return zeros.scatter_reduce_(1, indices, values, reduce="mean", include_self=False)


class Tuned(Textbook):
    """The textbook with the fastest dense forms that we know."""

    def _transform(self, flat: Tensor, block: Block) -> Tensor:
        left, right = (self._basis[length] for length in block.shape)
        chunks = _view(flat, block).transpose(1, 2).reshape(-1, *block.shape)
        return (left @ (chunks @ right.T)).view(-1, block.elements)

    def _inverse(self, coefficients: Tensor, block: Block) -> Tensor:
        left, right = (self._basis[length] for length in block.shape)
        _, grid_rows, grid_cols, rows, cols = block.size
        chunks = left.T @ (coefficients.view(-1, rows, cols) @ right)
        return chunks.view(grid_rows, grid_cols, rows, cols).transpose(1, 2).reshape(-1)

    def _mean(self, indices: Tensor, values: Tensor, block: Block) -> Tensor:
        zeros = torch.zeros(len(block), block.elements)
        counts = zeros.scatter_add(1, indices, torch.ones_like(values))
        return zeros.scatter_add_(1, indices, values).div_(counts.clamp_(min=1))


def _view(flat: Tensor, block: Block) -> Tensor:
    """(grid rows, rows, grid cols, cols) of a flat tensor."""
    _, grid_rows, grid_cols, rows, cols = block.size
    return flat.view(grid_rows, rows, grid_cols, cols)
