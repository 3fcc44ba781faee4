"""The logs of runs, wherever their entries lie: the newest in Redis, older ones in segments, large messages in blobs.

What is answered does not depend on where it was.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from api.errors import GoneError, NotFoundError, ProblemError
from api.payload import encode_message
from api.schemas import Resume
from coordinator.entries import Header
from coordinator.kept_blobs import KeptBlobs
from coordinator.log_store import Segment
from coordinator.recent import Bounded
from coordinator.segments import SegmentIndex, read_index, read_span
from coordinator.store import Store

__all__ = ["Logs"]

IN_REDIS = 8 << 20
"""Bytes of the largest message that goes into a Redis value."""
IN_COMMIT = 1 << 20
"""Bytes of the largest message that goes to Redis together with the commit that refers to it."""
_KEPT_BYTES = 64 << 20
"""Of messages in memory: whoever exchanges asks for the same one."""
_INDEXES_KEPT = 8
"""In memory: whoever replays reads one segment after the other."""

_Place = tuple[str, str, int, int]
"""Run, region, seq and part."""

T = TypeVar("T")
ReadBlob = Callable[[int, int | None], bytes]


class Logs:
    def __init__(self, store: Store, blobs: KeptBlobs) -> None:
        self._store = store
        self._blobs = blobs
        self._messages: Bounded[_Place, bytes] = Bounded(_KEPT_BYTES)
        self._reading: dict[_Place, asyncio.Task[bytes]] = {}
        self._indexes: OrderedDict[str, SegmentIndex] = OrderedDict()

    async def keep(self, run: str, message: bytes) -> str:
        """Stores the message of an entry, so that a commit can refer to it by the digest that this returns (A5)."""
        if len(message) > IN_REDIS:
            return await self._blobs.store(message, run)
        digest = hashlib.sha256(message).hexdigest()
        await self._store.put_payload(run, digest, message)
        return digest

    async def kept_or_carried(self, run: str, message: bytes) -> tuple[str, dict[str, bytes]]:
        """As `keep`; but a small message is for the commit itself to store, by its digest."""
        if len(message) > IN_COMMIT:
            return await self.keep(run, message), {}
        digest = hashlib.sha256(message).hexdigest()
        return digest, {digest: message}

    # --- headers ------------------------------------------------------------------------------------------------------

    async def headers(self, run: str, region: str, start: int, stop: int) -> list[Header]:
        """Of entries start..stop-1, as far as there are.

        Raises:
            GoneError: entry `start` was there, and has been trimmed.
        """
        headers = await self._there(run, region, start, stop)
        if headers:
            return headers
        state = (await self._store.load(run)).state
        head = state.regions[region].head
        if head is None or head.seq < start:
            return []
        headers = await self._there(run, region, start, stop)  # once more, since it may have been appended just now
        if not headers:
            resume = state.entrance(region)
            if resume is None or resume.position.seq < start:
                raise _damaged(run, region, start, start, "neither Redis nor a segment has it; did Redis lose data?")
            raise _trimmed(run, region, f"entry {start}", resume)
        return headers

    async def _there(self, run: str, region: str, start: int, stop: int) -> list[Header]:
        found = await self._store.log.headers(run, region, range(start, stop))
        headers: list[Header] = []
        while (seq := start + len(headers)) < stop:
            if seq in found:
                headers.append(found[seq])
                continue
            segment = await self._store.log.segment_at(run, region, seq)
            if segment is None:
                break
            index = await self._index(run, region, segment)
            headers += index.headers[seq - index.first : stop - index.first]
        return headers

    async def header(self, run: str, region: str, seq: int) -> Header:
        headers = await self.headers(run, region, seq, seq + 1)
        if not headers:
            raise NotFoundError("entry_not_found", f"the log of region {region} in run {run} has no entry {seq} yet")
        return headers[0]

    async def seq_of_step(self, run: str, region: str, step: int) -> int | None:
        """None if the step has no entry: its region was taken along by an outer step.

        Raises:
            GoneError: the entry was there, and has been trimmed.
        """
        seq = await self._store.log.seq_of_step(run, region, step)
        if seq is not None:
            return seq
        segment = await self._store.log.segment_of_step(run, region, step)
        if segment is not None:
            index = await self._index(run, region, segment)
            seqs = [header["seq"] for header in index.headers if (header["kind"], header["step"]) == ("step", step)]
            return seqs[0] if seqs else None
        if step <= await self._store.log.dropped(run, region):
            resume = (await self._store.load(run)).state.entrance(region)
            assert resume is not None
            raise _trimmed(run, region, f"the entry of step {step}", resume)
        return None

    # --- messages -----------------------------------------------------------------------------------------------------

    async def message(self, run: str, region: str, seq: int, part: int) -> bytes:
        """One part of an entry; part 0 of an entry without arrays is its header alone."""
        place = (run, region, seq, part)
        known = self._messages.get(place)
        if known is not None:
            return known
        begun = self._reading.get(place)
        if begun is not None:  # all sites of a region ask for every part
            with suppress(ProblemError):  # what it has not found may have come since
                return await asyncio.shield(begun)
        reading = self._reading[place] = asyncio.create_task(self._message(*place))
        reading.add_done_callback(partial(self._was_read, place))
        return await asyncio.shield(reading)

    def _was_read(self, place: _Place, reading: asyncio.Task[bytes]) -> None:
        if self._reading.get(place) is reading:
            del self._reading[place]
        if not reading.cancelled() and reading.exception() is None:
            self._messages.put(place, reading.result(), len(reading.result()))

    async def _message(self, run: str, region: str, seq: int, part: int) -> bytes:
        header = await self.header(run, region, seq)
        parts = len(header.get("parts", ()))
        if part >= max(parts, 1):
            raise NotFoundError("part_not_found", f"part {part}: entry {seq} has {max(parts, 1)}, numbered from 0")
        if not parts:
            return encode_message("entry", header, {})
        body = await self._from_redis(run, region, seq, part)
        if body is None:
            body = await self._from_segment(run, region, seq, part)
        if body is None:
            raise _damaged(run, region, seq, seq, f"its part {part} is nowhere; did Redis lose data?")
        return body

    async def _from_redis(self, run: str, region: str, seq: int, part: int) -> bytes | None:
        digests = (await self._store.log.messages(run, region, [seq]))[seq]
        if part >= len(digests):
            return None
        body = await self._store.payload(run, digests[part])
        if body is None and await self._blobs.stored.has(digests[part]):
            return await asyncio.to_thread(self._blobs.stored.read, digests[part])
        return body

    async def _from_segment(self, run: str, region: str, seq: int, part: int) -> bytes | None:
        segment = await self._store.log.segment_at(run, region, seq)
        if segment is None:
            return None
        index, key = await self._index(run, region, segment), (seq, part)
        if key in index.spans:
            span = index.spans[key]
            return await self._read(run, region, segment, segment.blob, lambda read: read_span(read, span))
        if key in index.blobs:
            return await self._read(run, region, segment, index.blobs[key], lambda read: read(0, None))
        return None

    # --- segments -----------------------------------------------------------------------------------------------------

    async def _index(self, run: str, region: str, segment: Segment) -> SegmentIndex:
        if segment.blob not in self._indexes:
            self._indexes[segment.blob] = await self._read(run, region, segment, segment.blob, read_index)
            while len(self._indexes) > _INDEXES_KEPT:
                self._indexes.popitem(last=False)
        return self._indexes[segment.blob]

    async def _read(self, run: str, region: str, segment: Segment, blob: str, read: Callable[[ReadBlob], T]) -> T:
        try:
            return await asyncio.to_thread(read, partial(self._blobs.stored.read, blob))
        except (NotFoundError, OSError, ValueError) as error:
            if await self._store.log.segment_at(run, region, segment.first) is None:  # trimmed meanwhile
                resume = (await self._store.load(run)).state.entrance(region)
                assert resume is not None
                raise _trimmed(run, region, f"entry {segment.first}", resume) from None
            because = f"blob {blob} in the coordinator's store: {error}; restore it from a backup"
            raise _damaged(run, region, segment.first, segment.last, because) from error


def _trimmed(run: str, region: str, what: str, resume: Resume) -> GoneError:
    return GoneError(
        "log_trimmed",
        f"{what} of region {region} in run {run} was trimmed, as the coordinator's setting log_keep has it; the log "
        f"can be entered behind step {resume.step}, at entry {resume.position.seq}, with the anchors in the context",
        context={"resume": resume.model_dump(mode="json")},
    )


def _damaged(run: str, region: str, first: int, last: int, because: str) -> ProblemError:
    which = f"entry {first}" if first == last else f"entries {first} to {last}"
    return ProblemError("log_damaged", f"{which} of region {region} in run {run} cannot be read: {because}")
