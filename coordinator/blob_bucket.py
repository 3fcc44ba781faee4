"""Blobs in a bucket of an S3-compatible object store, as objects named by their digests, in folders of two digits.

Where it is and what for a key it wants is told by the variables of the AWS tools (AWS_ACCESS_KEY_ID, AWS_REGION,
AWS_ENDPOINT_URL, ...). Drafts are local files.
"""

import contextlib
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from api.errors import UnavailableError
from coordinator.blobs import BLOCK, MAX_BYTES, checked, in_thread, not_found
from coordinator.drafts import Draft, Drafts, Upload
from coordinator.read_ahead import ReadAhead

if TYPE_CHECKING:
    from obstore.store import S3Config

__all__ = ["BlobBucket"]

_WINDOW = 8 << 20
"""Bytes asked for at once, and of a part of an upload: S3 takes 10,000 of them."""
_PARTS_AT_ONCE = 4
_PATIENCE = timedelta(seconds=30)


class BlobBucket:
    """Implements `coordinator.blobs.Blobs`.

    Args:
        url: `s3://BUCKET/PREFIX`.
        drafts: a local directory for drafts.
        config: overrides what the variables say.
    """

    def __init__(self, url: str, drafts: Path, config: "S3Config | None" = None, max_bytes: int = MAX_BYTES) -> None:
        self.url = url
        self.max_bytes = max_bytes
        self._store = S3Store.from_url(
            url,
            config=config,
            client_options={"allow_http": True},  # as AWS_ENDPOINT_URL says: many a store in a data center has no TLS
            retry_config={"max_retries": 5, "retry_timeout": _PATIENCE},
        )
        self._ahead = ReadAhead(self._window)
        self._drafts = Drafts(drafts.absolute(), self._keep, max_bytes)

    async def check(self) -> None:
        with self._errors():
            await in_thread(lambda: next(iter(obstore.list(self._store, chunk_size=1)), None))

    async def has(self, digest: str) -> bool:
        return await in_thread(self._size, digest) is not None

    async def size(self, digest: str) -> int:
        size = await in_thread(self._size, digest)
        if size is None:
            raise not_found(digest)
        return size

    async def open(self, digest: str, start: int = 0, stop: int | None = None) -> AsyncIterator[bytes]:
        size = await self.size(digest)
        return self._blocks(digest, start, size if stop is None else min(stop, size))

    async def remove(self, digest: str) -> None:
        with self._errors(), contextlib.suppress(FileNotFoundError):
            await in_thread(obstore.delete, self._store, _key(digest))

    def read(self, digest: str, start: int = 0, stop: int | None = None) -> bytes:
        if stop is None:
            size = self._size(digest)
            if size is None:
                raise not_found(digest)
            return b"".join(self._window(digest, *window) for window in _windows(start, size))
        pieces: list[bytes] = []
        for window in _windows(start, stop):
            pieces.append(self._ahead.read(digest, *window))
            if len(pieces[-1]) < window[1] - window[0]:
                break
        return b"".join(pieces)

    def draft(self) -> Draft:
        return self._drafts.draft()

    def upload(self, digest: str, owner: str) -> Upload:
        return self._drafts.upload(checked(digest), owner)

    def remove_stale_uploads(self) -> None:
        self._drafts.remove_stale_uploads()

    def _size(self, digest: str) -> int | None:
        key = _key(digest)
        with self._errors():
            try:
                return obstore.head(self._store, key)["size"]
            except FileNotFoundError:
                return None

    def _window(self, digest: str, start: int, stop: int) -> bytes:
        with self._errors():
            try:
                return obstore.get_range(self._store, _key(digest), start=start, end=stop).to_bytes()
            except FileNotFoundError:
                raise not_found(digest) from None
            except BaseError:
                size = self._size(digest)
                if size is None or start < size:
                    raise
                return b""  # there is no range behind the end

    async def _blocks(self, digest: str, start: int, stop: int) -> AsyncIterator[bytes]:
        for window in _windows(start, stop):
            data = memoryview(await in_thread(self._window, digest, *window))
            for begin in range(0, len(data), BLOCK):
                yield bytes(data[begin : begin + BLOCK])

    def _keep(self, path: Path, digest: str) -> None:
        with self._errors():
            obstore.put(self._store, _key(digest), path, chunk_size=_WINDOW, max_concurrency=_PARTS_AT_ONCE)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (BaseError, FileNotFoundError, PermissionError) as error:
            cause = str(error).partition("\n")[0].partition(": <")[0]
            raise UnavailableError(
                "blobs_unavailable",
                f"the blob store {self.url} refuses or does not answer: {cause}; does the bucket exist, and are the "
                "coordinator's AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and AWS_ENDPOINT_URL right?",
            ) from error


def _key(digest: str) -> str:
    return f"{checked(digest)[:2]}/{digest}"


def _windows(start: int, stop: int) -> Iterator[tuple[int, int]]:
    return ((begin, min(begin + _WINDOW, stop)) for begin in range(start, stop, _WINDOW))
