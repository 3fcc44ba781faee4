"""The chunk grid: how one tensor is cut into matrices, pieces and blocks of equal chunks, without padding.

Source: docs/decisions/0001-first-slice.md, section 1; rule B5.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Block", "Tile", "matrices", "tensor_blocks"]

VECTOR_ROW = 64
CONV_LIMIT = 16


class Tile(NamedTuple):
    """Chunks `start` to `stop` of a block as one strided view of the flat tensor, in elements."""

    start: int
    stop: int
    offset: int
    size: tuple[int, int, int, int, int]
    strides: tuple[int, int, int, int, int]


@dataclass(frozen=True)
class Block:
    """All chunks of one tensor that have one shape: a strided view of the flat, row-major tensor.

    `size` is (batch, grid rows, grid cols, rows, cols); `offset` and `strides` count elements.
    """

    tensor: int
    offset: int
    size: tuple[int, int, int, int, int]
    strides: tuple[int, int, int, int, int]
    first_chunk: int
    chunk_strides: tuple[int, int]
    """How much the chunk number grows per batch item and per grid row; per grid column it is 1."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.size[3], self.size[4]

    @property
    def elements(self) -> int:
        """Elements of one chunk."""
        return self.size[3] * self.size[4]

    def __len__(self) -> int:
        """Number of chunks."""
        return math.prod(self.size[:3])

    @cached_property
    def chunks(self) -> NDArray[np.int64]:
        """Ascending chunk numbers, int64 (len(self),), in the order of the view."""
        batch, rows, cols = (np.arange(count, dtype=np.int64) for count in self.size[:3])
        per_batch, per_row = self.chunk_strides
        ids = self.first_chunk + batch[:, None, None] * per_batch + rows[:, None] * per_row + cols
        ids = ids.reshape(-1)
        ids.setflags(write=False)
        return ids

    def within(self, chunks: range) -> tuple[int, int]:
        """The positions start, stop of the block's chunks that lie in a contiguous range of chunk numbers."""
        start, stop = np.searchsorted(self.chunks, (chunks.start, chunks.stop))
        return int(start), int(max(start, stop))

    def tiles(self, start: int, stop: int, limit: int) -> Iterator[Tile]:
        """Cuts positions `start` to `stop` into views of at most `limit` chunks each."""
        batch, grid_rows, grid_cols, *chunk = self.size
        while start < stop:
            item, rest = divmod(start, grid_rows * grid_cols)
            row, col = divmod(rest, grid_cols)
            room = min(stop - start, limit)
            if col or room < grid_cols:
                counts = (1, 1, min(room, grid_cols - col))
            elif row or room < grid_rows * grid_cols:
                counts = (1, min(room // grid_cols, grid_rows - row), grid_cols)
            else:
                counts = (min(room // (grid_rows * grid_cols), batch - item), grid_rows, grid_cols)
            offset = self.offset + item * self.strides[0] + row * self.strides[1] + col * self.strides[2]
            end = start + math.prod(counts)
            yield Tile(start, end, offset, (*counts, chunk[0], chunk[1]), self.strides)
            start = end


class _Run(NamedTuple):
    """Consecutive pieces of equal size of one dimension."""

    size: int
    pieces: int
    first: int
    offset: int


def _runs(length: int, limit: int) -> list[_Run]:
    """Cuts a dimension into ceil(length / limit) nearly equal pieces, larger first: at most two runs."""
    if length == 0:
        return []
    count = -(-length // limit)
    base, extra = divmod(length, count)
    runs = (_Run(base + 1, extra, 0, 0), _Run(base, count - extra, extra, extra * (base + 1)))
    return [run for run in runs if run.pieces]


def matrices(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """The tensor as (batch, rows, cols); a vector has one row."""
    if len(shape) < 2:
        return 1, 1, math.prod(shape)
    if len(shape) > 2 and max(shape[2:]) > CONV_LIMIT:
        return math.prod(shape[:-2]), shape[-2], shape[-1]
    return 1, shape[0], math.prod(shape[1:])


def tensor_blocks(tensor: int, shape: tuple[int, ...], chunk: int, first: int) -> tuple[list[Block], int]:
    """The blocks of a tensor whose chunks are numbered from `first`, and how many chunks it has."""
    if 0 in shape:
        return [], 0
    batch, rows, cols = matrices(shape)
    if rows == 1 or cols == 1:
        width = min(VECTOR_ROW, chunk)
        stacked, tail = divmod(rows * cols, width)
        pitch, columns = width, [_Run(width, 1, 0, 0)]
        parts = [(run, run.offset * width, columns[0]) for run in _runs(stacked, chunk)]
        if tail:
            last = _Run(1, 1, sum(run.pieces for run, _, _ in parts), stacked)
            parts.append((last, stacked * width, _Run(tail, 1, 0, 0)))
    else:
        pitch, columns = cols, _runs(cols, chunk)
        parts = [(run, run.offset * cols + col.offset, col) for run in _runs(rows, chunk) for col in columns]
    grid_cols = sum(run.pieces for run in columns)
    per_item = sum(run.pieces * column.pieces for run, _, column in parts)
    blocks = [
        Block(
            tensor=tensor,
            offset=offset,
            size=(batch, run.pieces, column.pieces, run.size, column.size),
            strides=(rows * cols, run.size * pitch, column.size, pitch, 1),
            first_chunk=first + run.first * grid_cols + column.first,
            chunk_strides=(per_item, grid_cols),
        )
        for run, offset, column in parts
    ]
    return blocks, batch * per_item
