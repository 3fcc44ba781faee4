"""Content-addressed blobs in a directory: files named by the SHA-256 of their bytes, in folders of two digits.

A blob is either whole and on the disk, or not there. Several processes may share the directory. Knows nothing of runs.
"""

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import os
import re
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

from api.errors import InvalidError, NotFoundError, StorageFullError, TooLargeError

__all__ = ["BLOCK", "BlobDirectory"]

BLOCK = 1 << 20
"""Bytes read or written at once."""

_DIGEST = re.compile(r"[0-9a-f]{64}")
_T = TypeVar("_T")


class BlobDirectory:
    """`max_bytes` bounds one blob, not the directory."""

    def __init__(self, root: Path, max_bytes: int = 64 << 30) -> None:
        self.root = root.absolute()
        self.max_bytes = max_bytes
        self._drafts = self.root / "incoming"
        with self._storage_errors():
            self._drafts.mkdir(parents=True, exist_ok=True)
        self._remove_stale_drafts()

    async def put(self, digest: str, body: AsyncIterator[bytes]) -> bool:
        """Stores what `body` yields; False if it was there already, and then the body is read and dropped."""
        if self.has(digest):
            await self._drain(digest, body)
            return False
        draft = await _in_thread(self._draft)
        try:
            async for piece in _gathered(body):
                self._check_size(digest, draft.size + len(piece))
                with self._storage_errors():
                    await _in_thread(draft.write, piece)
            if draft.digest() != digest:
                raise InvalidError(
                    "digest_mismatch",
                    f"the {draft.size} bytes received for blob {digest} have the digest {draft.digest()}; "
                    "they were damaged or cut off on the way: send them again",
                    context={"digest": digest, "received": draft.digest(), "size": draft.size},
                )
            with self._storage_errors():
                return await _in_thread(draft.commit, self.path(digest))
        finally:
            draft.discard()

    def put_bytes(self, data: bytes) -> str:
        """Stores `data` and returns its digest."""
        digest = hashlib.sha256(data).hexdigest()
        if not self.has(digest):
            self._check_size(digest, len(data))
            draft = self._draft()
            try:
                with self._storage_errors():
                    draft.write(data)
                    draft.commit(self.path(digest))
            finally:
                draft.discard()
        return digest

    def remove(self, digest: str) -> None:
        """Nothing may refer to it any more."""
        self.path(digest).unlink(missing_ok=True)

    def has(self, digest: str) -> bool:
        return self.path(digest).is_file()

    def size(self, digest: str) -> int:
        """In bytes."""
        try:
            return self.path(digest).stat().st_size
        except FileNotFoundError:
            raise _not_found(digest) from None

    async def open(self, digest: str) -> AsyncIterator[bytes]:
        """The blob in blocks of at most 1 MiB. A missing blob is an error here, not at the first block."""
        path = self.path(digest)
        try:
            file = await _in_thread(lambda: path.open("rb", buffering=0))
        except FileNotFoundError:
            raise _not_found(digest) from None
        return _blocks(file)

    def path(self, digest: str) -> Path:
        """Where the blob is, or would be."""
        if not _DIGEST.fullmatch(digest):
            raise InvalidError("bad_digest", f"{digest[:80]!r} is not a SHA-256 in 64 lower-case hexadecimal digits")
        return self.root / digest[:2] / digest

    async def _drain(self, digest: str, body: AsyncIterator[bytes]) -> None:
        size = 0
        async for piece in body:
            size += len(piece)
            self._check_size(digest, size)

    def _check_size(self, digest: str, size: int) -> None:
        if size > self.max_bytes:
            raise TooLargeError(
                "blob_too_large",
                f"blob {digest} is larger than the {self.max_bytes} bytes that this coordinator accepts for one blob",
                context={"digest": digest, "max_bytes": self.max_bytes},
            )

    @contextlib.contextmanager
    def _storage_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise StorageFullError(
                "storage_full",
                f"the disk under the blob directory {self.root} is full ({error.strerror}); free some space on it",
            ) from error

    def _draft(self) -> "_Draft":
        with self._storage_errors():
            return _Draft(self._drafts)

    def _remove_stale_drafts(self) -> None:
        """Of killed processes: a living one holds a lock on each of its own."""
        for path in self._drafts.iterdir():
            with contextlib.suppress(FileNotFoundError, BlockingIOError), path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()


class _Draft:
    """A blob in the making: a temporary file, locked while it is in use, that knows its size and digest so far."""

    def __init__(self, directory: Path) -> None:
        self.size = 0
        self._hash = hashlib.sha256()
        while True:
            self._path = directory / os.urandom(16).hex()
            self._file = self._path.open("xb", buffering=0)
            fcntl.flock(self._file, fcntl.LOCK_EX)
            if os.fstat(self._file.fileno()).st_nlink:
                return
            self._file.close()  # a process that started just then took it for a stale one

    def write(self, data: bytes) -> None:
        self._hash.update(data)
        self.size += len(data)
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]

    def digest(self) -> str:
        return self._hash.hexdigest()

    def commit(self, target: Path) -> bool:
        """On the disk and then under its name; False if another writer was first."""
        os.fsync(self._file.fileno())
        if not target.parent.is_dir():
            target.parent.mkdir(exist_ok=True)
            _sync_directory(target.parent.parent)
        new = not target.exists()
        self._path.rename(target)
        _sync_directory(target.parent)
        return new

    def discard(self) -> None:
        """Leaves nothing behind; after a commit it only closes the file."""
        self._path.unlink(missing_ok=True)
        self._file.close()


async def _gathered(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The same bytes in pieces of about `BLOCK`, so that a thread is asked once a mebibyte, not once a packet."""
    pieces: list[bytes] = []
    size = 0
    async for piece in body:
        pieces.append(piece)
        size += len(piece)
        if size >= BLOCK:
            yield b"".join(pieces)
            pieces, size = [], 0
    if size:
        yield b"".join(pieces)


async def _blocks(file: BinaryIO) -> AsyncIterator[bytes]:
    with file:
        while block := await _in_thread(file.read, BLOCK):
            yield block


async def _in_thread(function: Callable[..., _T], *args: object) -> _T:
    """Runs in a thread. When cancelled it still waits for the thread, which may not use a file that we close."""
    task = asyncio.ensure_future(asyncio.to_thread(function, *args))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        raise


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _not_found(digest: str) -> NotFoundError:
    return NotFoundError(
        "blob_not_found", f"blob {digest} is not stored here; upload it first", context={"digest": digest}
    )
