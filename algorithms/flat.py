"""What a replica of the parameters lives in: tensors in layout order, read and written as flat float32."""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from algorithms.codec import parameters_digest
from algorithms.layout import ParameterLayout
from algorithms.masters import write_flat

__all__ = ["FlatParameters"]

_BLOCK = 1 << 20


class FlatParameters:
    """Of a model, in the order of its layout; with what remembers of earlier steps, which may be told to forget.

    Attributes:
        steps: inner steps that are in the parameters.
    """

    layout: ParameterLayout
    steps: int
    _parameters: tuple[Tensor, ...]

    def _flat(self, index: int) -> Tensor:
        """The float32 values (elements,) of a tensor, to be given back to `write_flat`."""
        raise NotImplementedError

    def reset_momentum(self) -> None:
        """Forgets what is this site's own: momentum, and whatever else an inner optimizer keeps."""
        raise NotImplementedError

    def values(self, tensors: range) -> Iterator[NDArray[np.float32]]:
        """The float32 values of consecutive tensors of the layout, flat, one at a time; not copied on a CPU."""
        return (self._flat(index).cpu().numpy() for index in tensors)

    def read_parameters(self, tensors: range) -> NDArray[np.float32]:
        """The float32 values of consecutive tensors of the layout, concatenated."""
        return np.concatenate([np.empty(0, np.float32), *self.values(tensors)])

    def blocks(self, tensors: range, start: int = 0) -> Iterator[bytes]:
        """What `parameters_digest` is of, from a byte on, in blocks of at most a MiB."""
        for values in self.values(tensors):
            data = values.astype("<f4", copy=False).view(np.uint8)
            yield from (data[begin : begin + _BLOCK].tobytes() for begin in range(start, data.size, _BLOCK))
            start = max(start - data.size, 0)

    @torch.no_grad()
    def write_parameters(self, tensors: range, data: NDArray[np.float32]) -> None:
        """Sets consecutive tensors of the layout, masters and casts. Raises ValueError unless data has their size."""
        expected = self.layout.fragment_elements(tensors)
        if data.dtype != np.float32 or data.shape != (expected,):
            raise ValueError(f"tensors {tensors} have {expected} float32 elements, got {data.dtype} {data.shape}")
        start = 0
        for index in tensors:
            flat = self._flat(index)
            flat.copy_(torch.from_numpy(data[start : start + flat.numel()].copy()))
            write_flat(self._parameters[index], flat)
            start += flat.numel()

    def parameters_digest(self, tensors: range | None = None) -> str:
        """SHA-256 (hex) of the float32 values of consecutive tensors of the layout, by default all (rule C3)."""
        return parameters_digest(self.values(range(len(self._parameters)) if tensors is None else tensors))
