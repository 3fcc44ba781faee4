"""Copies of a fragment as regions uploaded them, read by ranges of elements.

Source: docs/decisions/0005-outer.md, section 4.
"""

import tempfile

import numpy as np
from numpy.typing import NDArray

from algorithms.coefficients import fragment_layout
from algorithms.compression import decode, encoded_range
from algorithms.layout import ParameterLayout
from api.encodings import read_coefficients, write_coefficients
from api.errors import InvalidError, ProblemError
from api.specs import OuterSpec
from coordinator.blobs import Blobs

__all__ = ["BLOCK_ELEMENTS", "UploadedCopies", "check_encoding", "read_floats"]

BLOCK_ELEMENTS = 1 << 19
"""Of each array that are in memory at once, 2 MiB; the bits of what is made of them do not depend on it."""

_MOST_BYTES = 8
"""Of coefficients, for each element, and `_HEADER_BYTES`: they are read at once."""
_HEADER_BYTES = 1 << 20

Values = NDArray[np.float32]


def read_floats(blobs: Blobs, digest: str, begin: int, end: int) -> Values:
    """Raises ProblemError if the blob ends before."""
    data = blobs.read(digest, 4 * begin, 4 * end)
    if len(data) != 4 * (end - begin):
        raise ProblemError("blob_too_short", f"blob {digest} ends before its element {end}: it is another fragment's")
    return np.frombuffer(data, "<f4")


class UploadedCopies:
    """What regions uploaded of a fragment, by digest: the copy itself, or an encoding of how far it is from the anchor.

    Coefficients, which lie in no order of elements, are spread into a temporary file first.
    """

    def __init__(self, fragment: int, layout: ParameterLayout, outer: OuterSpec, blobs: Blobs) -> None:
        self._outer = outer
        self._blobs = blobs
        self._layout = fragment_layout(layout, layout.fragments(outer.fragments)[fragment])
        self._spread: dict[str, Values] = {}

    @property
    def elements(self) -> int:
        return self._layout.parameter_count

    def read(self, digest: str, anchor: Values, begin: int) -> Values | NDArray[np.float64]:
        """The part of a copy that goes with that part of the anchor, which begins with element `begin`."""
        end = begin + anchor.size
        if self._outer.codec == "fp32":
            return read_floats(self._blobs, digest, begin, end)
        return anchor.astype(np.float64) - self._said(digest, begin, end)

    def _said(self, digest: str, begin: int, end: int) -> Values:
        codec = self._outer.codec
        assert codec != "fp32"
        if codec == "topk":
            return self._coefficients(digest)[begin:end]
        part = encoded_range(codec, begin, end)
        data = self._blobs.read(digest, part.start, part.stop)
        return decode(codec, np.frombuffer(data, np.uint8), end - begin)

    def _coefficients(self, digest: str) -> Values:
        if digest not in self._spread:
            with tempfile.TemporaryFile() as file:
                file.truncate(4 * self.elements)
                spread: Values = np.memmap(file, "<f4", "r+", shape=(self.elements,))
            picked = read_coefficients(self._blobs.read(digest), self._outer.k, self._layout)
            write_coefficients(picked, self._layout, spread)
            self._spread[digest] = spread
        return self._spread[digest]

    def check(self, digest: str, size: int) -> None:
        """Raises ValueError, with the reason, if a blob of so many bytes is no encoding of the fragment."""
        codec = self._outer.codec
        assert codec != "fp32"
        if codec == "topk":
            most = _MOST_BYTES * self.elements + _HEADER_BYTES
            if size > most:
                raise ValueError(f"coefficients of {self.elements} elements take at most {most} bytes, got {size}")
            read_coefficients(self._blobs.read(digest), self._outer.k, self._layout)
            return
        expected = encoded_range(codec, 0, self.elements).stop
        if size != expected:
            raise ValueError(f"{self.elements} values of {codec} take {expected} bytes, got {size}")
        for begin in range(0, self.elements, BLOCK_ELEMENTS):
            self._said(digest, begin, min(begin + BLOCK_ELEMENTS, self.elements))


def check_encoding(
    digest: str, size: int, fragment: int, layout: ParameterLayout, outer: OuterSpec, blobs: Blobs
) -> None:
    """Whether a blob of so many bytes is an encoding of the fragment.

    Raises:
        InvalidError: it is not, with the reason.
    """
    try:
        UploadedCopies(fragment, layout, outer, blobs).check(digest, size)
    except ValueError as error:
        raise InvalidError("bad_upload", f"upload {digest} of fragment {fragment}: {error}") from error
