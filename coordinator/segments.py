"""Segments: consecutive entries of a log in one safetensors blob, of which any one can be read without the others.

The headers are in the blob's metadata, each message is an array `SEQ.PART`; messages that are blobs of their own are
named there by their digests. Knows ranges of bytes, no runs.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import safetensors.numpy

from api.payload import canonical_json

__all__ = ["SegmentIndex", "pack_segment", "read_index", "read_span"]

Header = dict[str, Any]
Read = Callable[[int, int], bytes]
"""Bytes start to stop of a segment; fewer if it ends before."""
_MAX_INDEX = 100 << 20


@dataclass(frozen=True)
class SegmentIndex:
    """What a segment has, and where.

    Attributes:
        headers: of entries first, first + 1, ...
        spans: place of each message in the file, by entry and part.
        blobs: digest of each message that is a blob of its own, by entry and part.
    """

    first: int
    headers: tuple[Header, ...]
    spans: Mapping[tuple[int, int], tuple[int, int]]
    blobs: Mapping[tuple[int, int], str]


def pack_segment(
    place: Mapping[str, str], headers: Sequence[Header], messages: Mapping[int, Sequence[bytes | str]]
) -> bytes:
    """A segment's bytes.

    Args:
        place: whose entries they are; goes into the bytes, so that no two logs share a segment.
        headers: of consecutive entries.
        messages: parts of the entries that have some, by seq; a string is the digest of a blob.
    """
    named = {(seq, part): body for seq, parts in messages.items() for part, body in enumerate(parts)}
    arrays = {_name(*key): np.frombuffer(body, np.uint8) for key, body in named.items() if isinstance(body, bytes)}
    blobs = {_name(*key): body for key, body in named.items() if isinstance(body, str)}
    segment = {**place, "first": headers[0]["seq"], "headers": list(headers), "blobs": blobs}
    return safetensors.numpy.save(arrays, metadata={"segment": canonical_json(segment)})


def read_index(read: Read) -> SegmentIndex:
    """Reads the metadata only. Raises ValueError if it is no segment, or damaged."""
    start, listed = _metadata(read)
    try:
        segment = json.loads(listed.pop("__metadata__")["segment"])
        ends = {_key(name): array["data_offsets"] for name, array in listed.items()}
        return SegmentIndex(
            first=segment["first"],
            headers=tuple(segment["headers"]),
            spans={key: (start + begin, start + end) for key, (begin, end) in ends.items()},
            blobs={_key(name): digest for name, digest in segment["blobs"].items()},
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a segment: {error!r}") from None


def _metadata(read: Read) -> tuple[int, dict[str, Any]]:
    """Where the arrays begin, and what is said of them."""
    size = int.from_bytes(read(0, 8), "little")
    if not 2 <= size <= _MAX_INDEX:
        raise ValueError(f"its header cannot have {size} bytes")
    listed = json.loads(read(8, 8 + size))
    if not isinstance(listed, dict):
        raise ValueError("its header is not an object")
    return 8 + size, listed


def read_span(read: Read, span: tuple[int, int]) -> bytes:
    """A message, from its place in the segment. Raises ValueError if the segment is shorter."""
    start, stop = span
    body = read(start, stop)
    if len(body) != stop - start:
        raise ValueError(f"it ends before byte {stop}")
    return body


def _name(seq: int, part: int) -> str:
    return f"{seq}.{part}"


def _key(name: str) -> tuple[int, int]:
    seq, _, part = name.partition(".")
    return int(seq), int(part)
