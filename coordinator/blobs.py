"""The port for blobs: bytes under their SHA-256, whole or not there. Who uses it knows of ranges, not of files.

`coordinator.blob_directory` and `coordinator.blob_bucket` are behind it. Several processes may share a store. Knows
nothing of runs; what need not be kept, `coordinator.kept_blobs` knows.
"""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable
from typing import Protocol, TypeVar

from api.errors import InvalidError, NotFoundError
from coordinator.drafts import Draft, Upload, check_size

__all__ = [
    "BLOCK",
    "MAX_BYTES",
    "Blobs",
    "blocks",
    "checked",
    "in_thread",
    "not_found",
    "put",
    "received",
]

BLOCK = 1 << 20
"""Bytes written at once, and of a block that `open` yields at most."""
MAX_BYTES = 64 << 30

_DIGEST = re.compile(r"[0-9a-f]{64}")
_T = TypeVar("_T")


class Blobs(Protocol):
    """`read` and `draft` block and are for threads. A missing blob is a NotFoundError `blob_not_found`."""

    max_bytes: int
    """Of one blob, not of the store."""

    async def check(self) -> None:
        """Raises UnavailableError if nothing can be stored or read, as far as that can be told without trying."""
        ...

    async def has(self, digest: str) -> bool: ...

    async def size(self, digest: str) -> int:
        """In bytes."""
        ...

    async def open(self, digest: str, start: int = 0, stop: int | None = None) -> AsyncIterator[bytes]:
        """Bytes start to stop (exclusive) in blocks. A missing blob is an error here, not at the first block."""
        ...

    async def remove(self, digest: str) -> None:
        """Nothing may refer to it any more; it need not be there."""
        ...

    def read(self, digest: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes start to stop (exclusive); fewer only if the blob ends before."""
        ...

    def draft(self) -> Draft:
        """A new blob in the making."""
        ...

    def upload(self, digest: str, owner: str) -> Upload:
        """A blob of which one owner sends one piece after the other, over hours and connections, if need be."""
        ...

    def remove_stale_uploads(self) -> None:
        """To which nothing was added for an hour."""
        ...


def checked(digest: str) -> str:
    if not _DIGEST.fullmatch(digest):
        raise InvalidError("bad_digest", f"{digest[:80]!r} is not a SHA-256 in 64 lower-case hexadecimal digits")
    return digest


def not_found(digest: str) -> NotFoundError:
    return NotFoundError(
        "blob_not_found", f"blob {digest} is not stored here; upload it first", context={"digest": digest}
    )


async def put(blobs: Blobs, digest: str, body: AsyncIterator[bytes]) -> bool:
    """Stores what `body` yields; False if it was there already, and then the body is read and dropped."""
    if await blobs.has(digest):
        size = 0
        async for piece in body:
            size += len(piece)
            check_size(size, blobs.max_bytes)
        return False
    draft = await received(blobs, digest, body)
    with draft:
        await in_thread(draft.commit)
    return True


async def received(blobs: Blobs, digest: str, body: AsyncIterator[bytes]) -> Draft:
    """A draft of what `body` yields, for the caller to commit; its digest is the one announced, or it is refused."""
    draft = await in_thread(blobs.draft)
    try:
        async for piece in blocks(body):
            await in_thread(draft.write, piece)
        if draft.digest != digest:
            raise InvalidError(
                "digest_mismatch",
                f"the {draft.size} bytes received for blob {digest} have the digest {draft.digest}; "
                "they were damaged or cut off on the way: send them again",
                context={"digest": digest, "received": draft.digest, "size": draft.size},
            )
    except BaseException:
        draft.discard()
        raise
    return draft


async def blocks(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The same bytes in pieces of about `BLOCK`, so that a thread is asked once a mebibyte, not once a packet.

    What came before an error is yielded before the error is raised.
    """
    pieces: list[bytes] = []
    size = 0
    try:
        async for piece in body:
            pieces.append(piece)
            size += len(piece)
            if size >= BLOCK:
                yield b"".join(pieces)
                pieces, size = [], 0
    except Exception:
        if size:
            yield b"".join(pieces)
        raise
    if size:
        yield b"".join(pieces)


async def in_thread(function: Callable[..., _T], *args: object) -> _T:
    """Runs in a thread. When cancelled it still waits for the thread, which may not use a file that we close."""
    task = asyncio.ensure_future(asyncio.to_thread(function, *args))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        raise
