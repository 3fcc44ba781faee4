"""Reading packed arrays from an untrusted source: exact sizes, no array unasked for, errors that name what is wrong."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from algorithms.bits import packed_size, unpack_bits
from algorithms.layout import ParameterLayout
from algorithms.updates import Shape

__all__ = ["ArrayReader", "array_name"]


def array_name(shape: Shape, field: str) -> str:
    """`{rows}x{cols}.{field}`."""
    return f"{shape[0]}x{shape[1]}.{field}"


class ArrayReader:
    """Takes arrays of exact size, and knows which of them nobody has asked for."""

    def __init__(self, arrays: Mapping[str, NDArray[np.uint8]], layout: ParameterLayout) -> None:
        self._arrays = arrays
        self._layout = layout
        self._left = set(arrays)

    def take(self, name: str, size: int) -> NDArray[np.uint8]:
        """The array of that name, of exactly `size` bytes; one of no bytes must be missing."""
        if size == 0:
            return np.empty(0, np.uint8)
        array = self._arrays.get(name)
        if array is None:
            raise ValueError(f"array {name} is missing")
        if array.dtype != np.uint8 or array.shape != (size,):
            raise ValueError(f"array {name} must be {size} uint8, got {array.dtype} of shape {array.shape}")
        self._left.discard(name)
        return array

    def bytes(self, shape: Shape, field: str, size: int) -> NDArray[np.uint8]:
        return np.ascontiguousarray(self.take(array_name(shape, field), size))

    def words(self, shape: Shape, field: str, count: int) -> NDArray[np.uint16]:
        return self.bytes(shape, field, 2 * count).view("<u2").astype(np.uint16)

    def unpack(self, shape: Shape, field: str, count: int, width: int) -> NDArray[np.uint8 | np.uint16]:
        data = self.bytes(shape, field, packed_size(count, width))
        with self.naming(shape, field):
            return unpack_bits(data, width, count)

    @contextmanager
    def naming(self, shape: Shape, field: str) -> Iterator[None]:
        """Says in a ValueError which array it is about."""
        try:
            yield
        except ValueError as error:
            raise ValueError(f"array {array_name(shape, field)}: {error}") from None

    def check(self, shape: Shape, wrong: NDArray[np.bool_], numbers: NDArray[np.int64], reason: str) -> None:
        """Raises ValueError about the first of the chunks (m,) for which `wrong` (m,) or (m, any) holds somewhere."""
        if np.any(wrong):
            row = np.argmax(wrong.reshape(numbers.size, -1).any(axis=1))
            chunk = int(numbers[row])
            raise ValueError(f"tensor {self._layout.tensor_of(chunk)!r}, chunk {chunk} {shape}: {reason}")

    def finish(self) -> None:
        """Raises ValueError if there are arrays that were not taken."""
        if self._left:
            raise ValueError(f"unexpected arrays: {', '.join(sorted(self._left)[:5])}")
