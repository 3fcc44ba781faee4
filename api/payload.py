"""Tensors <-> bytes: one safetensors message with a JSON header in its metadata. Never pickle."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

__all__ = [
    "MEDIA_TYPE",
    "canonical_json",
    "contribution_digest",
    "decode_message",
    "digest_json",
    "encode_message",
]

MEDIA_TYPE = "application/vnd.isthmus+safetensors"
_MAX_HEADER = 4 << 20

Arrays = Mapping[str, NDArray[Any]]


def canonical_json(value: object) -> str:
    """Sorted keys, no spaces, ASCII, no NaN: equal values have equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def digest_json(value: object) -> str:
    """SHA-256 of the canonical JSON; the hash of an entry's header."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def contribution_digest(parts: Iterable[str]) -> str:
    """The digest of a contribution, of the SHA-256 digests of its parts' messages, in order."""
    return hashlib.sha256(",".join(parts).encode()).hexdigest()


def encode_message(kind: str, header: Mapping[str, Any], arrays: Arrays) -> bytes:
    """One message: `kind` ("entry", "contribution") names the metadata key that holds the header."""
    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    return safetensors.numpy.save(contiguous, metadata={kind: canonical_json(header)})


def decode_message(kind: str, body: bytes) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Header and arrays of a message.

    Raises:
        ValueError: it is not a safetensors message of this kind, with the reason.
    """
    if len(body) < 8:
        raise ValueError(f"{len(body)} bytes are too few for a safetensors message")
    size = int.from_bytes(body[:8], "little")
    if not 2 <= size <= min(_MAX_HEADER, len(body) - 8):
        raise ValueError("not a safetensors message: its header's length is out of range")
    try:
        metadata = json.loads(body[8 : 8 + size])["__metadata__"]
        header = json.loads(metadata[kind])
    except (KeyError, TypeError):
        raise ValueError(f"the message's metadata has no {kind!r}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the message's header is not valid JSON: {error}") from None
    if not isinstance(header, dict):
        raise ValueError(f"the message's {kind!r} header is not an object")
    try:
        arrays = safetensors.numpy.load(body)
    except safetensors.SafetensorError as error:
        raise ValueError(f"not a safetensors message: {error}") from None
    except KeyError as error:
        raise ValueError(f"numpy has no arrays of dtype {error}") from None
    return header, arrays
