"""The mean of what sites hold of their buffers: from ranges of blobs to the draft of one. Blocks."""

from collections.abc import Iterator, Mapping, Sequence

import structlog

from algorithms.buffers import mean_block
from algorithms.tensor_file import StoredTensor, file_header, read_header
from api.errors import InvalidError
from coordinator.blobs import Blobs
from coordinator.drafts import Draft
from coordinator.kept_blobs import KeptBlobs

__all__ = ["mean_buffers", "require_buffers", "require_small_buffers"]

MAX_BYTES = 256 << 20
"""Of all buffers of a model."""
BLOCK = 1 << 20
"""Bytes of each copy that are in memory at once: a multiple of every item's."""

Tensors = Mapping[str, StoredTensor]

log = structlog.get_logger()


def require_small_buffers(size: int, whose: str) -> None:
    """Raises InvalidError if they are more than every site and the coordinator are sure to hold."""
    if size > MAX_BYTES:
        raise InvalidError(
            "buffers_too_large",
            f"the buffers of {whose} take {size} bytes, and at most {MAX_BYTES} are taken, since they are averaged and "
            "sent whole: register with persistent=False what the code can compute again, and make the rest parameters",
            context={"size": size, "limit": MAX_BYTES},
        )


async def require_buffers(blobs: KeptBlobs, digest: str | None, run: str, site: str) -> None:
    """What a site says that its buffers are, if it has some, is to be referred to, and stays for that.

    Raises:
        NotFoundError: it is not stored.
        InvalidError: it is too large.
    """
    if digest is not None:
        require_small_buffers(await blobs.require(digest, run), f"site {site}")


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
    if size > MAX_BYTES:  # a model's buffers may have grown since it joined
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
