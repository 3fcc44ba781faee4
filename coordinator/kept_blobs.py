"""Blobs that are on the list `garbage` before they are written, and removed once nothing refers to them.

`run` is who relies on a blob: the run for which it is written or asked for, or nothing.
"""

import asyncio
from collections.abc import AsyncIterator

import structlog

from api.errors import StorageFullError
from coordinator.blobs import Blobs, in_thread, not_found, received
from coordinator.drafts import Draft, check_size
from coordinator.garbage import QuotaExceeded
from coordinator.store import Store

__all__ = ["KeptBlobs"]

log = structlog.get_logger()


class KeptBlobs:
    """`stored` is for reading; whatever is written or referred to goes through here.

    Args:
        quota_gb: gigabytes of all blobs, at most.
    """

    def __init__(self, blobs: Blobs, store: Store, quota_gb: float | None = None) -> None:
        self.stored = blobs
        self._store = store
        self._garbage = store.garbage
        self._quota = None if quota_gb is None else int(quota_gb * 1e9)

    async def stays(self, digest: str, run: str) -> bool:
        """Whether the blob is there; then it stays for an hour, for something to refer to it."""
        await self._garbage.tell(digest, run)
        return await self.stored.has(digest)

    async def require(self, digest: str, run: str) -> int:
        """The size of a blob that is to be referred to, and stays for that.

        Raises:
            NotFoundError: it is not there.
        """
        if not await self.stays(digest, run):
            raise not_found(digest)
        return await self.stored.size(digest)

    async def put(self, digest: str, body: AsyncIterator[bytes], run: str) -> bool:
        """Stores what `body` yields; False if it was there already, and then the body is read and dropped."""
        if await self.stays(digest, run):
            await self.drop(body)
            return False
        draft = await received(self.stored, digest, body)
        with draft:
            await self.keep(draft, run)
        return True

    async def drop(self, body: AsyncIterator[bytes]) -> None:
        size = 0
        async for piece in body:
            size += len(piece)
            check_size(size, self.stored.max_bytes)

    async def store(self, data: bytes, run: str) -> str:
        """Stores `data` and returns its digest."""
        draft = await in_thread(self.stored.draft)
        with draft:
            await in_thread(draft.write, data)
            return await self.keep(draft, run)

    async def keep(self, draft: Draft, run: str) -> str:
        """Commits a draft; returns its digest. The caller still discards it."""
        await self._admit(draft.digest, run, draft.size)
        if not await self.stored.has(draft.digest):
            await in_thread(draft.commit)
        return draft.digest

    async def _admit(self, digest: str, run: str, size: int) -> None:
        try:
            await self._garbage.admit(digest, run, size, self._quota)
        except QuotaExceeded as error:
            raise self._full(error.total) from None

    async def require_room(self, size: int) -> None:
        """Raises StorageFullError if that many more bytes are more than the quota."""
        if self._quota is not None and (total := await self._garbage.total() + size) > self._quota:
            raise self._full(total)

    def _full(self, total: int) -> StorageFullError:
        assert self._quota is not None
        return StorageFullError(
            "blob_quota",
            f"that would make {total} bytes of blobs, and the coordinator's setting blob_quota_gb allows "
            f"{self._quota}: delete runs that are over (`isthmus run delete`), set log_keep, or raise it",
            context={"total": total, "quota": self._quota},
        )

    async def remove_unreferred(self) -> None:
        """Removes what is due and what nothing refers to. Any number of processes may do it at once."""
        while claimed := await self._garbage.claim():
            referred = await self._store.referred()
            for digest in claimed:
                if digest not in referred:
                    await self.stored.remove(digest)
                await self._garbage.release(digest, removed=digest not in referred)
            log.info("blobs looked at", removed=len(set(claimed) - referred), kept=len(referred & set(claimed)))

    async def remove_stale_uploads(self) -> None:
        await asyncio.to_thread(self.stored.remove_stale_uploads)
