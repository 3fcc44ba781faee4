"""One tensor's part of an update, decoded strip by strip when it is asked for: what a base update works on."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from algorithms.decode import Inverse, signs, values
from algorithms.grid import Block, Tile
from algorithms.updates import Shape, UpdateCoefficients

__all__ = ["ShapeUpdate", "Strip", "TensorUpdate"]

CPU_TILE = 96 * 64 * 64
"""Elements decoded at a time on a CPU: 1.5 MiB, so that what is worked on stays in cache."""

DEVICE_TILE = 4096 * 64 * 64


class ShapeUpdate(NamedTuple):
    """The chunks of one shape, with the places where their coefficients begin."""

    part: UpdateCoefficients
    starts: NDArray[np.int64]
    """(m + 1,)"""

    @classmethod
    def of(cls, part: UpdateCoefficients) -> "ShapeUpdate":
        return cls(part, np.concatenate([[0], np.cumsum(part.counts)]))

    def rows(self, start: int, stop: int) -> UpdateCoefficients:
        """Chunks `start` to `stop`, as views."""
        rows, mine = slice(start, stop), slice(self.starts[start], self.starts[stop])
        part = self.part
        return UpdateCoefficients(
            chunks=part.chunks[rows],
            counts=part.counts[rows],
            indices=part.indices[mine],
            values=part.values[mine],
            exponents=part.exponents[rows],
            bits=part.bits[rows],
        )


class Strip(NamedTuple):
    """A tile of chunks. Its elements are ordered (rows, batch, grid rows, grid cols, cols) everywhere."""

    tile: Tile
    part: UpdateCoefficients
    inverse: Inverse

    @property
    def shape(self) -> Shape:
        return self.tile.size[3], self.tile.size[4]

    def of(self, flat: Tensor, first: int = 0) -> Tensor:
        """The elements of the strip as a view of a contiguous flat tensor, which begins at the element `first`."""
        start = flat.storage_offset() + self.tile.offset - first
        return flat.as_strided(self.tile.size, self.tile.strides, start).permute(3, 0, 1, 2, 4)

    def signs(self) -> Tensor:
        """Exact signs of the update, float32."""
        return self._ordered(signs(self.part, self.shape, self.inverse))

    def values(self) -> Tensor:
        """The update u, float32."""
        return self._ordered(values(self.part, self.shape, self.inverse))

    def _ordered(self, chunks: Tensor) -> Tensor:
        return chunks.view(self.shape[0], *self.tile.size[:3], self.shape[1])


@dataclass(frozen=True)
class TensorUpdate:
    """One tensor that has an update, and everything that moves it."""

    shape: tuple[int, ...]
    blocks: tuple[Block, ...]
    updates: Mapping[Shape, ShapeUpdate]
    parameters: Tensor
    """Contiguous float32 (elements,)."""
    state: dict[str, Tensor]
    """What the base update keeps from step to step."""
    lr: float
    decay: float
    beta2: float
    inverse: Inverse

    def strips(self, item: int | None = None) -> Iterator[Strip]:
        """All strips, or those of one matrix of the batch."""
        tile_elements = CPU_TILE if self.inverse.device.type == "cpu" else DEVICE_TILE
        for block in self.blocks:
            update = self.updates[block.shape]
            first = int(np.searchsorted(update.part.chunks, block.first_chunk))
            chunks = len(block) // block.size[0]
            start, stop = (0, len(block)) if item is None else (item * chunks, (item + 1) * chunks)
            for tile in block.tiles(start, stop, max(1, tile_elements // block.elements)):
                yield Strip(tile, update.rows(first + tile.start, first + tile.stop), self.inverse)
