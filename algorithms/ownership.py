"""Which part of the momentum a rank keeps, and the tiles in which it is worked on."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from algorithms.grid import Block, Tile
from algorithms.layout import ParameterLayout, is_dense
from algorithms.sparsify import Sides, sides
from algorithms.updates import Shape

__all__ = ["OwnedBlock", "OwnedTile", "Ownership", "Scratch", "tile_limit", "tile_view"]

TILE_ELEMENTS = 1 << 20
"""Elements of momentum worked on at a time on a CPU: 4 MiB, 256 chunks of 64 x 64."""

DEVICE_TILE_ELEMENTS = 1 << 24
"""The same elsewhere: 64 MiB."""


def tile_limit(device: torch.device) -> int:
    """Chunks worked on at a time: on a CPU so few that they stay in cache."""
    return 128 if device.type == "cpu" else 4096


def tile_view(flat: Tensor, tile: Tile) -> Tensor:
    """The chunks of a tile as a view (batch, grid rows, grid cols, rows, cols) of a contiguous flat tensor."""
    return flat.as_strided(tile.size, tile.strides, flat.storage_offset() + tile.offset)


class OwnedBlock(NamedTuple):
    """The chunks at positions `start` to `stop` of a block, which lie at `offset` in the momentum of its tensor."""

    block: Block
    start: int
    stop: int
    offset: int

    def rows(self, momentum: Mapping[int, Tensor]) -> Tensor:
        """The momentum of these chunks, a view (stop - start, elements)."""
        elements = self.block.elements
        size = (self.stop - self.start) * elements
        return momentum[self.block.tensor].narrow(0, self.offset, size).view(-1, elements)


@dataclass(frozen=True)
class Ownership:
    """Which part of the momentum a rank keeps: a contiguous range of chunk numbers."""

    layout: ParameterLayout
    chunks: range

    @cached_property
    def blocks(self) -> tuple[OwnedBlock, ...]:
        """In layout order; blocks of which nothing is owned are left out."""
        owned = []
        sizes = [0] * len(self.layout.tensors)
        for block in self.layout.blocks:
            start, stop = block.within(self.chunks)
            if start < stop:
                owned.append(OwnedBlock(block, start, stop, sizes[block.tensor]))
                sizes[block.tensor] += (stop - start) * block.elements
        return tuple(owned)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements of the momentum of each tensor."""
        sizes = [0] * len(self.layout.tensors)
        for owned in self.blocks:
            sizes[owned.block.tensor] += (owned.stop - owned.start) * owned.block.elements
        return tuple(sizes)

    def of_shape(self, shape: Shape, momentum: Mapping[int, Tensor]) -> list[OwnedBlock]:
        """The owned blocks of a chunk shape whose tensors have a momentum."""
        return [owned for owned in self.blocks if owned.block.shape == shape and owned.block.tensor in momentum]

    def sides(self, shape: Shape, step: int, device: torch.device) -> Sides | None:
        """The bases of chunks of a shape at a step; None where nothing is transformed."""
        return None if is_dense(shape[0] * shape[1]) else sides(self.layout.transform, *shape, step, device)

    @property
    def holds_elements(self) -> bool:
        """Whether the momentum is of the parameters' elements: the basis changes; else it is of coefficients."""
        return self.layout.transform == "random"


class OwnedTile(NamedTuple):
    """Some chunks of an owned block, and two buffers for working on them."""

    view: Tile
    rows: slice
    """Among the rows of the owned block."""
    one: Tensor
    """Float32 (chunks, rows, cols), of no defined content."""
    two: Tensor


class Scratch:
    """Two buffers on each device, used again for every tile."""

    def __init__(self, ownership: Ownership) -> None:
        self._most = max(((owned.stop - owned.start) * owned.block.elements for owned in ownership.blocks), default=0)
        self._buffers: dict[torch.device, Tensor] = {}

    def tiles(self, owned: OwnedBlock, device: torch.device) -> Iterator[OwnedTile]:
        """Cuts an owned block."""
        if device not in self._buffers:
            size = min(self._most, TILE_ELEMENTS if device.type == "cpu" else DEVICE_TILE_ELEMENTS)
            self._buffers[device] = torch.empty(2, size, dtype=torch.float32, device=device)
        block, buffers = owned.block, self._buffers[device]
        for tile in block.tiles(owned.start, owned.stop, buffers.shape[1] // block.elements):
            rows = slice(tile.start - owned.start, tile.stop - owned.start)
            one, two = buffers[:, : (tile.stop - tile.start) * block.elements].view(2, -1, *block.shape)
            yield OwnedTile(tile, rows, one, two)
