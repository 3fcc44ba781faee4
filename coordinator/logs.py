"""The logs of runs, wherever their parts lie: messages of entries in Redis, large ones in the blob directory."""

import asyncio
import hashlib
from collections import OrderedDict

from api.errors import NotFoundError
from api.payload import encode_message
from coordinator.blobs import BlobDirectory
from coordinator.entries import Header
from coordinator.store import Store

__all__ = ["Logs"]

IN_REDIS = 8 << 20
"""Bytes of the largest message that goes into a Redis value."""
IN_COMMIT = 1 << 20
"""Bytes of the largest message that goes to Redis together with the commit that refers to it."""
_KEPT = 16
"""Messages in memory: whoever exchanges asks for the same one."""


class Logs:
    def __init__(self, store: Store, blobs: BlobDirectory) -> None:
        self._store = store
        self._blobs = blobs
        self._messages: OrderedDict[tuple[str, str, int, int], bytes] = OrderedDict()

    async def keep(self, run: str, message: bytes) -> str:
        """Stores the message of an entry, so that a commit can refer to it by the digest that this returns (A5)."""
        if len(message) > IN_REDIS:
            return await asyncio.to_thread(self._blobs.put_bytes, message)
        digest = hashlib.sha256(message).hexdigest()
        await self._store.put_payload(run, digest, message)
        return digest

    async def kept_or_carried(self, run: str, message: bytes) -> tuple[str, dict[str, bytes]]:
        """As `keep`; but a small message is for the commit itself to store, by its digest."""
        if len(message) > IN_COMMIT:
            return await self.keep(run, message), {}
        digest = hashlib.sha256(message).hexdigest()
        return digest, {digest: message}

    async def headers(self, run: str, region: str, start: int, stop: int) -> list[Header]:
        """Of entries start..stop-1, as far as there are."""
        return await self._store.entries(run, region, start, stop)

    async def header(self, run: str, region: str, seq: int) -> Header:
        headers = await self.headers(run, region, seq, seq + 1)
        if not headers:
            raise NotFoundError("entry_not_found", f"the log of region {region} in run {run} has no entry {seq} yet")
        return headers[0]

    async def seq_of_step(self, run: str, region: str, step: int) -> int | None:
        return await self._store.seq_of_step(run, region, step)

    async def message(self, run: str, region: str, seq: int, part: int) -> bytes:
        """One part of an entry; part 0 of an entry without arrays is its header alone."""
        key = (run, region, seq, part)
        if key not in self._messages:
            self._messages[key] = await self._read(*key)
            while len(self._messages) > _KEPT:
                self._messages.popitem(last=False)
        return self._messages[key]

    async def _read(self, run: str, region: str, seq: int, part: int) -> bytes:
        header = await self.header(run, region, seq)
        digests = await self._store.messages(run, region, seq)
        if part >= max(len(digests), 1):
            raise NotFoundError(
                "part_not_found", f"part {part}: entry {seq} has {max(len(digests), 1)}, numbered from 0"
            )
        if not digests:
            return encode_message("entry", header, {})
        message = await self._store.payload(run, digests[part])
        return await self._large(digests[part]) if message is None else message

    async def _large(self, digest: str) -> bytes:
        self._blobs.size(digest)  # which says what is missing
        return await asyncio.to_thread(self._blobs.path(digest).read_bytes)
