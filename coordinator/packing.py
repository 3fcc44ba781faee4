"""Packs the older entries of logs into segments, drops what need not be kept, removes blobs that nothing refers to.

Any number of processes may do it at once: the first to register a segment wins, and everything can be done again.
"""

import asyncio
import hashlib
import secrets
from collections.abc import Mapping
from contextlib import suppress

import structlog

from api.errors import NotFoundError, ProblemError, StorageFullError
from coordinator.kept_blobs import KeptBlobs
from coordinator.log_store import Segment
from coordinator.records import Region, RunState
from coordinator.references import blobs_of_entry
from coordinator.segments import pack_segment
from coordinator.settings import Settings
from coordinator.store import Store

__all__ = ["Packer"]

SEGMENT_BYTES = 32 << 20
"""Of messages in one segment, about: it is put together in memory."""
SEGMENT_ENTRIES = 1000
_STALE_UPLOADS_S = 60.0
"""How often they are looked for."""

log = structlog.get_logger()


class Packer:
    def __init__(self, store: Store, blobs: KeptBlobs, settings: Settings) -> None:
        self._store = store
        self._blobs = blobs
        self._settings = settings
        self._sizes: dict[tuple[str, str], dict[int, int]] = {}
        self._task: asyncio.Task[None] | None = None
        self._uploads_looked_at = 0.0

    def start(self, states: list[RunState]) -> None:
        """Looks after these runs and those that have ended, in the background, unless it still does."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._look_after(states))
            self._task.add_done_callback(_log_failure)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _look_after(self, states: list[RunState]) -> None:
        active = {state.id for state in states}
        self._sizes = {key: sizes for key, sizes in self._sizes.items() if key[0] in active}
        for state in states:
            await self._tidy_or_log(state)
        for run in await self._store.log.ended():
            await self._pack_ended(run)
        await self._blobs.remove_unreferred()
        if (now := asyncio.get_running_loop().time()) > self._uploads_looked_at + _STALE_UPLOADS_S:
            self._uploads_looked_at = now
            await self._blobs.remove_stale_uploads()

    async def _pack_ended(self, run: str) -> None:
        with suppress(NotFoundError):  # deleted meanwhile
            if not await self._tidy_or_log((await self._store.load(run)).state):
                return
        await self._store.log.all_packed(run)

    async def _unfinished(self, state: RunState) -> bool:
        """Another process, which did not know that the run has ended, may have won with fewer entries."""
        heads = {name: region.head.seq for name, region in state.regions.items() if region.head is not None}
        return any([await self._store.log.packed(state.id, name) <= seq for name, seq in heads.items()])

    async def _tidy_or_log(self, state: RunState) -> bool:
        """What is wrong with one run is no reason to leave the others alone. False: it is worth another try."""
        try:
            await self.tidy(state)
        except (ProblemError, OSError) as error:
            log.error("log cannot be packed", run=state.id, error=str(error))
            return not isinstance(error, StorageFullError | OSError)
        return not state.status.terminal or not await self._unfinished(state)

    async def tidy(self, state: RunState) -> None:
        """Packs what is to be packed of a run's logs, all of one that has ended, and trims them."""
        for region in state.regions.values():
            while await self._pack(state, region):
                pass
            await self._trim(state, region)

    # --- packing ------------------------------------------------------------------------------------------------------

    async def _pack(self, state: RunState, region: Region) -> bool:
        """One segment, if it is time for one: from twice as many entries as Redis keeps on, or too many megabytes."""
        if region.head is None:
            return False
        first = await self._store.log.packed(state.id, region.name)
        sizes = await self._unpacked(state.id, region.name, range(first, region.head.seq + 1))
        recent, most = self._settings.log_recent, self._settings.log_recent_mb * 1e6
        if not sizes or not (state.status.terminal or len(sizes) > 2 * recent or sum(sizes.values()) > most):
            return False
        keep, keep_bytes = (0, -1.0) if state.status.terminal else (recent, most / 2)
        count = _count(list(sizes.values()), keep, keep_bytes)
        return await self._pack_entries(state.id, region.name, range(first, first + count))

    async def _unpacked(self, run: str, region: str, seqs: range) -> Mapping[int, int]:
        """Bytes in Redis of the entries that are in no segment."""
        known = self._sizes.get((run, region), {})
        fresh = await self._store.log.sizes(run, region, [seq for seq in seqs if seq not in known])
        sizes = known | fresh
        self._sizes[run, region] = {seq: sizes[seq] for seq in seqs}
        return self._sizes[run, region]

    async def _pack_entries(self, run: str, region: str, seqs: range) -> bool:
        headers = await self._store.log.headers(run, region, seqs)
        messages = await self._store.log.messages(run, region, seqs)
        bodies = await self._store.log.payloads(run, messages)
        if await self._store.log.packed(run, region) != seqs.start:  # by another process, meanwhile
            return False
        lost = [str(seq) for seq in seqs if seq not in headers]
        lost += [digest for digest, body in bodies.items() if body is None and not await self._blobs.stored.has(digest)]
        if lost:
            raise ProblemError("log_damaged", f"region {region} has lost {', '.join(lost)}; did Redis lose data?")
        packed = {seq: [bodies[digest] or digest for digest in parts] for seq, parts in messages.items()}
        place = {"run": run, "region": region, "attempt": secrets.token_hex(8)}
        data = await asyncio.to_thread(pack_segment, place, [headers[seq] for seq in seqs], packed)
        steps = [header["step"] for header in headers.values() if header["kind"] == "step"]
        segment = Segment(
            blob=hashlib.sha256(data).hexdigest(),
            first=seqs.start,
            last=seqs.stop - 1,
            steps=(min(steps), max(steps)) if steps else None,
            large=tuple(digest for digest, body in bodies.items() if body is None),
            anchors=tuple(sorted({blob for header in headers.values() for blob in blobs_of_entry(header)})),
        )
        await self._blobs.store(data, run)
        done = await self._store.log.register(run, region, segment, steps, bodies)
        if done:
            log.info("segment", run=run, region=region, first=segment.first, last=segment.last, bytes=len(data))
        return done

    # --- trimming -----------------------------------------------------------------------------------------------------

    async def _trim(self, state: RunState, region: Region) -> None:
        """Drops segments of which no entry is to be kept: not by the setting, not for whoever enters the log."""
        keep, resume, head = self._settings.log_keep, state.entrance(region.name), region.head
        if keep is None or resume is None or head is None:
            return
        kept = min(head.seq + 1 - keep, resume.position.seq + 1)
        while (oldest := await self._store.log.oldest_segment(state.id, region.name)) and oldest.last < kept:
            await self._store.log.drop(state.id, region.name, oldest, await self._store.now())
            log.info("trimmed", run=state.id, region=region.name, first=oldest.first, last=oldest.last)


def _count(sizes: list[int], keep: int, keep_bytes: float) -> int:
    """How many of the oldest entries go into the next segment, so that at most `keep` entries and `keep_bytes` stay."""
    count, taken, left = 0, 0, sum(sizes)
    while count < min(len(sizes), SEGMENT_ENTRIES) and taken < SEGMENT_BYTES:
        if len(sizes) - count <= keep and left <= keep_bytes:
            break
        taken, left, count = taken + sizes[count], left - sizes[count], count + 1
    return count


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("packing a log failed, to be tried again", exc_info=error)
