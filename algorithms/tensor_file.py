"""safetensors files by ranges of bytes: their header, and the values of tensors as float32. numpy only.

safetensors itself reads a file as a whole, and its numpy side knows no bfloat16.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from algorithms.values import from_bfloat16

__all__ = ["FLOATS", "ITEM_BYTES", "StoredTensor", "TensorFile", "as_floats", "file_header", "read_header"]

Read = Callable[[int, int], bytes]
"""Bytes start to stop (exclusive) of a file."""

ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"), 1),
}
FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
"""numpy's names of the floating-point types that it knows; BF16 is the other one that is read here."""
_MAX_HEADER = 100 << 20


@dataclass(frozen=True)
class StoredTensor:
    """Bytes `start` to `stop` of a file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class TensorFile:
    """By name, in the order of the file."""

    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]


def read_header(read: Read, size: int) -> TensorFile:
    """What a file of `size` bytes holds.

    Raises:
        ValueError: it is no safetensors file, or not one with tensors of known types; with the reason.
    """
    length = int.from_bytes(read(0, 8), "little") if size >= 8 else 0
    if not 2 <= length <= min(_MAX_HEADER, size - 8):
        raise ValueError("not a safetensors file: its header's length is out of range")
    try:
        listed = json.loads(read(8, 8 + length))
        metadata = listed.pop("__metadata__", {})
        tensors = {name: _tensor(name, line, 8 + length, size) for name, line in listed.items()}
    except (KeyError, TypeError, AttributeError, RecursionError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"not a safetensors file: its header is damaged ({type(error).__name__})") from None
    ordered = sorted(tensors.items(), key=lambda item: item[1].start)
    return TensorFile(dict(ordered), {str(name): str(text) for name, text in metadata.items()})


def _tensor(name: str, line: Mapping[str, Any], first: int, size: int) -> StoredTensor:
    dtype, shape, (start, stop) = line["dtype"], tuple(line["shape"]), line["data_offsets"]
    if dtype not in ITEM_BYTES:
        raise ValueError(f"tensor {name!r} is of type {str(dtype)[:20]!r}, which is not known here")
    if not all(isinstance(number, int) and number >= 0 for number in (*shape, start, stop)):
        raise ValueError(f"tensor {name!r} has a damaged shape or place")
    if stop - start != math.prod(shape) * ITEM_BYTES[dtype] or first + stop > size:
        raise ValueError(f"tensor {name!r} has not the bytes that its shape takes")
    return StoredTensor(dtype, shape, first + start, first + stop)


def file_header(tensors: Sequence[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str]) -> bytes:
    """What a file begins with whose tensors, given by name, type and shape, follow in this order without gaps.

    Readers want every tensor at a multiple of its item's bytes: put larger items first.
    """
    listed: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, dtype, shape in tensors:
        start, end = end, end + math.prod(shape) * ITEM_BYTES[dtype]
        listed[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(listed, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def as_floats(data: bytes, dtype: str) -> NDArray[Any]:
    """The values (n,) in floating point: bfloat16 as float32, others in their own type.

    Raises ValueError for types that are not floating-point, or not known to numpy.
    """
    if dtype == "BF16":
        return from_bfloat16(np.frombuffer(data, "<u2"))
    if dtype not in FLOATS:
        raise ValueError(f"{dtype} is not read as floating point; F64, F32, F16 and BF16 are")
    return np.frombuffer(data, FLOATS[dtype])
