"""Uploads that go on where they broke: piece by piece into a file of their own, and whole into the store."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from api.content_digest import DIGEST_MISMATCH
from api.errors import InvalidError, ProblemError
from api.service import FoundBlob
from coordinator.blobs import blocks, in_thread
from coordinator.drafts import Upload
from coordinator.kept_blobs import KeptBlobs

__all__ = ["Uploads"]

_ANSWER_S = 20.0
"""After which a blob that is still being stored is answered for."""
_LOOK_AGAIN_S = 0.5


class Uploads:
    """`owner` is whose upload it is: nobody goes on with another one's."""

    def __init__(self, blobs: KeptBlobs) -> None:
        self._blobs = blobs
        self._storing: dict[Path, asyncio.Task[None]] = {}

    async def find(self, digest: str, owner: str, run: str) -> FoundBlob:
        if await self._blobs.stays(digest, run):
            return FoundBlob(await self._blobs.stored.size(digest))
        return FoundBlob(None, await in_thread(self._blobs.stored.upload(digest, owner).size))

    async def append(
        self, digest: str, owner: str, run: str, offset: int, length: int, body: AsyncIterator[bytes]
    ) -> FoundBlob:
        """What there is after `body`, which begins at byte `offset` of `length`. It is stored once it is whole.

        What arrived before a connection broke stays, but nothing of a body that is not the one of its Content-Digest.

        Raises:
            ConflictError: `wrong_offset`: another byte is the next one.
        """
        upload = self._blobs.stored.upload(digest, owner)
        if await self._blobs.stays(digest, run):
            await self._blobs.drop(body)
            return FoundBlob(length)
        if upload.size() != offset:
            raise upload.wrong_offset(offset)
        if offset == 0:
            await self._blobs.require_room(length)
        end = await self._append(upload, offset, length, body)
        if end < length:
            return FoundBlob(None, end)
        done = await self._store_in_background(upload, length, run)
        return FoundBlob(length) if done else FoundBlob(None, length)

    async def _append(self, upload: Upload, offset: int, length: int, body: AsyncIterator[bytes]) -> int:
        end = offset
        try:
            async for block in blocks(body):
                if end + len(block) > length:
                    raise InvalidError("upload_too_long", f"more bytes were sent than Upload-Length says: {length}")
                await in_thread(upload.append, end, block)
                end += len(block)
        except InvalidError as error:
            if error.code == DIGEST_MISMATCH:
                await in_thread(upload.cut, offset, end)
            raise
        return end

    async def _store_in_background(self, upload: Upload, length: int, run: str) -> bool:
        """Whoever asks may go away meanwhile, and ask again. False: it takes longer than an answer may."""
        task = self._storing.get(upload.path)
        if task is None:
            task = self._storing[upload.path] = asyncio.create_task(self._store(upload, length, run))
            task.add_done_callback(lambda _: self._storing.pop(upload.path, None))
        await asyncio.wait([task], timeout=_ANSWER_S)
        if task.done():
            task.result()
        return task.done()

    async def _store(self, upload: Upload, length: int, run: str) -> None:
        while (draft := await in_thread(upload.draft)) is None:  # another process is storing it
            if await self._blobs.stored.has(upload.digest):
                return
            if upload.size() < length:
                raise upload.wrong_offset(length)
            await asyncio.sleep(_LOOK_AGAIN_S)
        try:
            if draft.digest != upload.digest:
                draft.discard()
                raise InvalidError(
                    DIGEST_MISMATCH,
                    f"the {length} bytes received for blob {upload.digest} have the digest {draft.digest}: they were "
                    "damaged on the way, or have changed where they come from; send them again",
                    context={"digest": upload.digest, "received": draft.digest, "size": length},
                )
            await self._blobs.keep(draft, run)
        except ProblemError:
            draft.close()  # it stays for another try, unless it was discarded
            raise
        draft.discard()
