"""ParameterLayout: which elements of which tensors form which chunk. It fixes names, order, numbering and digest.

numpy only. It knows shapes and names, not values, dtypes or devices. Source: docs/decisions/0001-first-slice.md,
section 1; rules B5, B6, C2, C3.
"""

import hashlib
import json
import math
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from algorithms.grid import Block, Tile, tensor_blocks
from algorithms.transforms import TRANSFORMS, Transform, basis_digest

__all__ = ["CHUNKS", "Block", "ParameterLayout", "TensorSpec", "Tile", "canonical_name", "is_dense", "kept"]

CHUNKS = (32, 64, 128)
"""Supported chunk sizes s: a chunk has at most s x s elements."""

DENSE_LIMIT = 64
VERSION = 2

MAX_TENSORS = 1_000_000
MAX_ELEMENTS = 2**44
MAX_CHUNKS = 2**28
MAX_DIMENSIONS = 8
MAX_NAME = 1024
MAX_GROUPS = 1024


def canonical_name(name: str) -> str:
    """The name without the components `module` (DDP) and `_orig_mod` (torch.compile) that wrappers add."""
    *path, leaf = name.split(".")
    return ".".join([part for part in path if part not in ("module", "_orig_mod")] + [leaf])


def is_dense(elements: int) -> bool:
    """Whether a chunk of so many elements is sent whole, without indices (rule B6)."""
    return elements <= DENSE_LIMIT


def kept(k: int, elements: int, chunk: int) -> int:
    """Coefficients sent of a chunk: `clamp(round(k * n / s^2), 1, n)`, all of them if it is dense (rule B6).

    `round` is to even; the quotient is exact because s^2 is a power of two. Raises ValueError unless 1 <= k <= s^2.
    """
    if not 1 <= k <= chunk * chunk:
        raise ValueError(f"k must be 1 to {chunk * chunk} for chunks of {chunk} x {chunk}, got {k}")
    if is_dense(elements):
        return elements
    return min(max(round(k * elements / (chunk * chunk)), 1), elements)


@dataclass(frozen=True)
class TensorSpec:
    """A named tensor, its shape and the index of its parameter group."""

    name: str
    shape: tuple[int, ...]
    group: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


class ParameterLayout:
    """Names, shapes, groups, the chunk grid and the transform of a model, in canonical order.

    Raises ValueError on duplicate names, an unsupported chunk size or transform, a bad shape or a group that does not
    exist.
    """

    def __init__(
        self,
        tensors: Iterable[TensorSpec],
        chunk: int = 64,
        groups: Sequence[str] = ("decay", "no_decay"),
        transform: Transform = "dct",
    ) -> None:
        if chunk not in CHUNKS:
            raise ValueError(f"chunk must be one of {CHUNKS}, got {chunk}")
        if transform not in TRANSFORMS:
            raise ValueError(f"transform must be one of {TRANSFORMS}, got {transform!r}")
        if len(set(groups)) != len(groups):
            raise ValueError(f"group names must differ, got {list(groups)}")
        named = (replace(tensor, name=canonical_name(tensor.name)) for tensor in tensors)
        self.tensors = tuple(sorted(named, key=lambda tensor: tensor.name))
        self.chunk = chunk
        self.groups = tuple(groups)
        self.transform = transform
        for one, other in pairwise(self.tensors):
            if one.name == other.name:
                raise ValueError(f"two tensors have the canonical name {one.name!r}")
        for tensor in self.tensors:
            if not 0 <= tensor.group < len(self.groups):
                raise ValueError(f"tensor {tensor.name!r}: group {tensor.group} of {len(self.groups)} groups")
            if min(tensor.shape, default=0) < 0:
                raise ValueError(f"tensor {tensor.name!r}: negative size in shape {tensor.shape}")
        self._build()

    def _build(self) -> None:
        blocks: list[Block] = []
        starts = [0]
        for index, tensor in enumerate(self.tensors):
            own, count = tensor_blocks(index, tensor.shape, self.chunk, starts[-1])
            blocks += own
            starts.append(starts[-1] + count)
        self.blocks = tuple(blocks)
        self.tensor_chunks = tuple(pairwise(starts))
        """(start, stop) chunk numbers per tensor."""
        self.chunk_count = starts[-1]
        *offsets, self.parameter_count = accumulate((tensor.elements for tensor in self.tensors), initial=0)
        self.offsets = tuple(offsets)
        """Element offset of each tensor in the parameter bytes."""

    @cached_property
    def shapes(self) -> dict[tuple[int, int], tuple[Block, ...]]:
        """Chunk shape -> its blocks in layout order; their chunk numbers, concatenated, ascend."""
        shapes: dict[tuple[int, int], list[Block]] = {}
        for block in self.blocks:
            shapes.setdefault(block.shape, []).append(block)
        return {shape: tuple(blocks) for shape, blocks in sorted(shapes.items())}

    @cached_property
    def tensor_blocks(self) -> tuple[tuple[Block, ...], ...]:
        """The blocks of each tensor."""
        blocks: list[list[Block]] = [[] for _ in self.tensors]
        for block in self.blocks:
            blocks[block.tensor].append(block)
        return tuple(tuple(own) for own in blocks)

    @cached_property
    def index(self) -> dict[str, int]:
        """Tensor name -> its position in `tensors`."""
        return {tensor.name: position for position, tensor in enumerate(self.tensors)}

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of the canonical JSON of `to_json()`: the identity of the layout (rule C2)."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(text.encode("ascii")).hexdigest()

    def tensor_of(self, chunk: int) -> str:
        """The name of the tensor to which a chunk belongs."""
        return self.tensors[bisect_right(self.tensor_chunks, chunk, key=lambda span: span[0]) - 1].name

    def select(
        self, shape: tuple[int, int], absent: Collection[int] = (), chunks: range | None = None
    ) -> NDArray[np.int64]:
        """Ascending chunk numbers of one shape, without the tensors `absent`, within the contiguous range `chunks`."""
        if not absent and chunks in (None, range(self.chunk_count)):
            return self._numbers[shape]
        parts = [np.empty(0, np.int64)]
        for block in self.shapes[shape]:
            if block.tensor not in absent:
                start, stop = (0, len(block)) if chunks is None else block.within(chunks)
                parts.append(block.chunks[start:stop])
        return np.concatenate(parts)

    @cached_property
    def _numbers(self) -> dict[tuple[int, int], NDArray[np.int64]]:
        """All chunk numbers of each shape."""
        numbers = {shape: np.concatenate([block.chunks for block in blocks]) for shape, blocks in self.shapes.items()}
        for array in numbers.values():
            array.setflags(write=False)
        return numbers

    def fragments(self, count: int) -> tuple[range, ...]:
        """`count` contiguous, non-empty ranges of tensor positions, nearly equal in elements.

        Raises ValueError if there are fewer tensors than fragments.
        """
        tensors = len(self.tensors)
        if not 1 <= count <= tensors:
            raise ValueError(f"cannot cut {tensors} tensors into {count} fragments of whole tensors")
        ends = [*self.offsets[1:], self.parameter_count]
        cuts = [0]
        for number in range(1, count):
            target = number * self.parameter_count
            low, high = cuts[-1] + 1, tensors - (count - number)
            cuts.append(min(range(low, high + 1), key=lambda cut: abs(ends[cut - 1] * count - target)))
        return tuple(range(start, stop) for start, stop in pairwise([*cuts, tensors]))

    def fragment_elements(self, tensors: range) -> int:
        """Elements of a contiguous range of tensors."""
        return sum(self.tensors[position].elements for position in tensors)

    def shard(self, rank: int, ranks: int) -> range:
        """The contiguous chunk numbers that a rank owns: the shards cover all chunks, nearly equal in elements."""
        if not 0 <= rank < ranks:
            raise ValueError(f"rank {rank} of {ranks} ranks")
        sizes = np.zeros(self.chunk_count, np.int64)
        for block in self.blocks:
            sizes[block.chunks] = block.elements
        middles = np.cumsum(sizes) - sizes // 2
        bounds = [number * self.parameter_count / ranks for number in (rank, rank + 1)]
        start, stop = (int(cut) for cut in np.searchsorted(middles, bounds))
        return range(0 if rank == 0 else start, self.chunk_count if rank == ranks - 1 else stop)

    @property
    def transformed(self) -> list[tuple[int, int]]:
        """The chunk shapes that are transformed: all but the dense ones, none by `identity`."""
        if self.transform == "identity":
            return []
        return [shape for shape in self.shapes if not is_dense(shape[0] * shape[1])]

    def to_json(self) -> dict[str, Any]:
        """The identity of the layout as JSON values; `from_json` is the inverse."""
        lengths = {length for shape in self.transformed for length in shape}
        return {
            "version": VERSION,
            "chunk": self.chunk,
            "transform": self.transform,
            "basis": basis_digest(self.transform, lengths),
            "groups": list(self.groups),
            "tensors": [[tensor.name, list(tensor.shape), tensor.group] for tensor in self.tensors],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "ParameterLayout":
        """Reads `to_json()` from an untrusted source. Raises ValueError naming the field or the tensor."""
        fields = {"version", "chunk", "transform", "basis", "groups", "tensors"}
        if set(value) != fields:
            raise ValueError(f"a layout has {', '.join(sorted(fields))}, got {', '.join(sorted(map(str, value)))}")
        if value["version"] != VERSION:
            raise ValueError(f"layout version {value['version']!r} is not {VERSION}")
        groups, tensors = value["groups"], value["tensors"]
        if not isinstance(groups, list) or len(groups) > MAX_GROUPS or not all(map(_is_name, groups)):
            raise ValueError(f"groups must be at most {MAX_GROUPS} names")
        if not isinstance(tensors, list) or len(tensors) > MAX_TENSORS:
            raise ValueError(f"tensors must be a list of at most {MAX_TENSORS}")
        if not _is_count(value["chunk"]):
            raise ValueError(f"chunk must be one of {CHUNKS}, got {value['chunk']!r}")
        layout = cls(_read_tensors(tensors), value["chunk"], groups, value["transform"])
        if layout.chunk_count > MAX_CHUNKS:
            raise ValueError(f"{layout.chunk_count} chunks are more than {MAX_CHUNKS}")
        if layout.to_json()["basis"] != value["basis"]:
            raise ValueError("the layout was made with other integer bases than those of this version")
        return layout


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_NAME


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_ELEMENTS


def _read_tensors(values: list[Any]) -> list[TensorSpec]:
    """Checks and converts `[[name, shape, group], ...]`."""
    specs = []
    total = 0
    for value in values:
        if not isinstance(value, list) or len(value) != 3 or not _is_name(value[0]):
            raise ValueError(f"a tensor is [name, shape, group], got {str(value)[:100]}")
        name, shape, group = value
        if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(map(_is_count, shape)):
            raise ValueError(f"tensor {name!r}: bad shape {str(shape)[:100]}")
        if not _is_count(group):
            raise ValueError(f"tensor {name!r}: bad group {str(group)[:100]}")
        specs.append(TensorSpec(name, tuple(shape), group))
        total += specs[-1].elements
        if total > MAX_ELEMENTS:
            raise ValueError(f"tensor {name!r}: more than {MAX_ELEMENTS} elements in all")
    return specs
