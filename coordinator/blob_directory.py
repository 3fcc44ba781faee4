"""Blobs in a directory: files named by their digests, in folders of two digits."""

import os
from collections.abc import AsyncIterator
from io import RawIOBase
from pathlib import Path

from api.errors import UnavailableError
from coordinator.blobs import BLOCK, MAX_BYTES, checked, in_thread, not_found
from coordinator.drafts import Draft, Drafts, Upload

__all__ = ["BlobDirectory"]


class BlobDirectory:
    """Implements `coordinator.blobs.Blobs`."""

    def __init__(self, root: Path, max_bytes: int = MAX_BYTES) -> None:
        self.root = root.absolute()
        self.max_bytes = max_bytes
        self._drafts = Drafts(self.root, self._keep, max_bytes)

    async def check(self) -> None:
        if not self.root.is_dir():
            raise UnavailableError("blobs_unavailable", f"the blob directory {self.root} is gone: mount or restore it")

    async def has(self, digest: str) -> bool:
        return self._path(digest).is_file()

    async def size(self, digest: str) -> int:
        try:
            return self._path(digest).stat().st_size
        except FileNotFoundError:
            raise not_found(digest) from None

    async def open(self, digest: str, start: int = 0, stop: int | None = None) -> AsyncIterator[bytes]:
        """What was opened is read to its end, also if it is removed meanwhile."""
        path = self._path(digest)
        try:
            file = await in_thread(lambda: path.open("rb", buffering=0))
        except FileNotFoundError:
            raise not_found(digest) from None
        return _blocks(file, start, stop)

    async def remove(self, digest: str) -> None:
        await in_thread(lambda: self._path(digest).unlink(missing_ok=True))

    def read(self, digest: str, start: int = 0, stop: int | None = None) -> bytes:
        try:
            with self._path(digest).open("rb", buffering=0) as file:
                return _read_all(file, start, os.fstat(file.fileno()).st_size if stop is None else stop)
        except FileNotFoundError:
            raise not_found(digest) from None

    def draft(self) -> Draft:
        return self._drafts.draft()

    def upload(self, digest: str, owner: str) -> Upload:
        return self._drafts.upload(checked(digest), owner)

    def remove_stale_uploads(self) -> None:
        self._drafts.remove_stale_uploads()

    def _path(self, digest: str) -> Path:
        return self.root / checked(digest)[:2] / digest

    def _keep(self, path: Path, digest: str) -> None:
        target = self._path(digest)
        if not target.parent.is_dir():
            target.parent.mkdir(exist_ok=True)
            _sync_directory(target.parent.parent)
        path.rename(target)
        _sync_directory(target.parent)


def _read_all(file: RawIOBase, start: int, stop: int) -> bytes:
    file.seek(start)
    pieces = []
    while start < stop and (piece := file.read(stop - start)):
        pieces.append(piece)
        start += len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


async def _blocks(file: RawIOBase, start: int, stop: int | None) -> AsyncIterator[bytes]:
    with file:
        file.seek(start)
        while stop is None or start < stop:
            block = await in_thread(file.read, BLOCK if stop is None else min(BLOCK, stop - start))
            if not block:
                return
            start += len(block)
            yield block


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
