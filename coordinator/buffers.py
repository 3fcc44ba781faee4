"""The mean of what sites hold of their buffers: from ranges of blobs to the draft of one. Blocks."""

from collections.abc import Iterator, Mapping, Sequence

import structlog

from algorithms.buffers import mean_block
from algorithms.tensor_file import StoredTensor, file_header, read_header
from coordinator.blobs import Blobs
from coordinator.drafts import Draft

__all__ = ["MAX_BYTES", "mean_buffers"]

MAX_BYTES = 256 << 20
"""Of all buffers of a model."""
BLOCK = 1 << 20
"""Bytes of each copy that are in memory at once: a multiple of every item's."""

Tensors = Mapping[str, StoredTensor]

log = structlog.get_logger()


def mean_buffers(blobs: Blobs, copies: Sequence[tuple[str, int]], sizes: Mapping[str, int]) -> Draft | None:
    """Of safetensors blobs with their weights, in order of sites; for the caller to commit or to discard.

    Copies that cannot be read, or have other tensors than the first one, are left out. None if none is left.
    """
    read = [(digest, weight, _tensors(blobs, digest, sizes[digest])) for digest, weight in copies]
    there = [(digest, weight, tensors) for digest, weight, tensors in read if tensors is not None]
    if not there:
        return None
    first = _listed(there[0][2])
    good = [(digest, weight, tensors) for digest, weight, tensors in there if _listed(tensors) == first]
    if len(good) < len(copies):
        log.warning("buffers of other sites are left out", left_out=len(copies) - len(good))
    draft = blobs.draft()
    try:
        for block in _blocks(blobs, good):
            draft.write(block)
    except BaseException:
        draft.discard()
        raise
    return draft


def _tensors(blobs: Blobs, digest: str, size: int) -> Tensors | None:
    if size > MAX_BYTES:
        return None
    try:
        return read_header(lambda start, stop: blobs.read(digest, start, stop), size).tensors
    except ValueError:
        return None


def _listed(tensors: Tensors) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]


def _blocks(blobs: Blobs, copies: Sequence[tuple[str, int, Tensors]]) -> Iterator[bytes]:
    listed = _listed(copies[0][2])
    yield file_header(listed, {})
    weights = [weight for _, weight, _ in copies]
    for name, dtype, _ in listed:
        places = [(digest, tensors[name].start) for digest, _, tensors in copies]
        size = copies[0][2][name].stop - copies[0][2][name].start
        for begin in range(0, size, BLOCK):
            end = min(begin + BLOCK, size)
            yield mean_block([blobs.read(digest, at + begin, at + end) for digest, at in places], weights, dtype)
