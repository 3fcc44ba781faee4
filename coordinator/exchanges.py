"""What passes between sites and the coordinator in a run: contributions and updates, entries, announcements."""

import asyncio
import hashlib
import time
from collections.abc import Mapping

from api import schemas
from api.errors import ConflictError, GoneError, InvalidError, NotFoundError
from api.payload import contribution_digest
from api.schemas import RunStatus
from api.service import Answer, Place
from coordinator.blobs import in_thread
from coordinator.contributions import Complete, Contributions
from coordinator.encodings import check_encoding
from coordinator.engine import Engine
from coordinator.events import Abstained, Announced, Arrived, Contributed
from coordinator.kept_blobs import KeptBlobs
from coordinator.layouts import Layouts
from coordinator.logs import Logs
from coordinator.quorum import all_announced, region_copies, remaining
from coordinator.recent import Recent
from coordinator.records import RunState
from coordinator.store import Store
from coordinator.waiting import waiting_for

__all__ = ["Exchanges"]

_PAGE = 500
"""Entries in one page of the log."""


class Exchanges:
    def __init__(
        self,
        store: Store,
        blobs: KeptBlobs,
        contributions: Contributions,
        layouts: Layouts,
        logs: Logs,
        engine: Engine,
        recent: Recent,
    ) -> None:
        self._store = store
        self._blobs = blobs
        self._contributions = contributions
        self._layouts = layouts
        self._logs = logs
        self._engine = engine
        self._recent = recent

    # --- answers of sites ---------------------------------------------------------------------------------------------

    async def contribute(self, place: Place, part: int, body: bytes, wait: float) -> Answer:
        run, region, step = place.run, place.region, place.step
        state = (self._store.seen(run) or await self._store.load(run)).state
        if not _open(state, region, step):
            state = (await self._store.load(run)).state
        _known_region(state, region)
        last = part == (count := len(await self._contributions.parts(state, region, step))) - 1
        if _closed(state, region, step):
            whole = contribution_digest([hashlib.sha256(body).hexdigest()]) if count == 1 else None
            return await self._answer_closed(run, region, step, place.site, "contributors", whole)
        taken = await self._contributions.take(state, place, part, body)
        if isinstance(taken, Complete):
            answer = await self._take_in(run, taken.event, wait if last else 0.0, taken.payloads)
            return answer.timed(validate=taken.validate)
        if last:
            return Answer(None, f"parts {taken} of {count} are missing: send all of them again", accepted=False)
        return Answer(None, waiting_for(state))

    async def abstain(self, place: Place, abstention: schemas.Abstention, wait: float) -> Answer:
        run, region, step = place.run, place.region, place.step
        state = (await self._store.load(run)).state
        if _closed(state, region, step):
            return await self._answer_closed(run, region, step, place.site, "abstentions")
        event = Abstained(place.site, place.attempt, region, step, abstention.position, abstention.reason)
        return await self._take_in(run, event, wait, {})

    async def _take_in(
        self, run: str, event: Contributed | Abstained, wait: float, payloads: Mapping[str, bytes]
    ) -> Answer:
        """The update, once the round is closed. A round that is next and not open yet is waited for, too (A16)."""

        def not_yet(state: RunState) -> bool:
            region = state.regions[event.region]
            return state.going_on and region.round is None and event.step == region.step + 1

        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait
        state = (self._store.seen(run) or await self._store.load(run)).state
        if not_yet(state):
            state = await self._engine.wait(run, lambda state: not not_yet(state), wait)
        await self._engine.gather(state, event, deadline - loop.time())
        try:
            started = time.perf_counter()
            await self._engine.apply(run, event, payloads=payloads)
            commit = (time.perf_counter() - started) * 1e3
        except ConflictError as error:
            state = (await self._store.load(run)).state
            if error.code == "round_not_open" and not_yet(state):
                return Answer(None, waiting_for(state), accepted=False)
            raise
        except GoneError as error:
            state = (await self._store.load(run)).state
            if error.code == "closed_without_you" and _closed(state, event.region, event.step):
                place = (run, event.region, event.step, event.site)
                if isinstance(event, Contributed):
                    return await self._answer_closed(*place, "contributors", event.sent.digest)
                return await self._answer_closed(*place, "abstentions")
            raise
        answer = await self._await_update(run, event.region, event.step, max(deadline - loop.time(), 0.0))
        return answer.timed(commit=commit)

    async def _await_update(self, run: str, region: str, step: int, wait: float, part: int = 0) -> Answer:
        """For callers that have just seen the run's state."""

        def over(state: RunState) -> bool:
            return _closed(state, region, step) or not state.going_on

        state = await self._engine.wait(run, over, wait, just_seen=True)
        if not _closed(state, region, step):
            if state.status.terminal or state.status is RunStatus.STOPPING:
                raise GoneError("run_ended", f"run {run} is {state.status}: {state.ended_because}")
            return Answer(None, waiting_for(state))
        update = self._recent.updates.get((run, region, step, part))
        if update is not None and step == state.regions[region].step:  # an older one may be trimmed meanwhile
            answer = Answer(update.message, sha256=update.sha256, timing=update.timing)
            return answer.timed(answer=(time.perf_counter() - update.ready) * 1e3)
        seq = await self._logs.seq_of_step(run, region, step)
        if seq is None:
            raise _skipped(region, step)
        return Answer(await self._logs.message(run, region, seq, part))

    async def _answer_closed(
        self, run: str, region: str, step: int, site: str, among: str, digest: str | None = None
    ) -> Answer:
        """The update, if the entry lists the site, with what it has sent (A1).

        One part of several does not say what that is; whoever gets the update still compares digests.
        """
        seq = await self._logs.seq_of_step(run, region, step)
        if seq is None:
            raise _skipped(region, step)
        header = await self._logs.header(run, region, seq)
        if not any(line["site"] == site and digest in (None, line.get("digest")) for line in header[among]):
            raise GoneError(
                "closed_without_you",
                f"the round of step {step} is closed and does not list what {site} sent: take its entry {seq} instead",
                context={"seq": seq},
            )
        return Answer(await self._logs.message(run, region, seq, 0))

    async def update(self, run: str, region: str, step: int, part: int, wait: float) -> Answer:
        state = (await self._store.load(run)).state
        _known_region(state, region)
        if step > state.spec.steps:
            raise NotFoundError("step_not_found", f"run {run} has {state.spec.steps} steps: there is no step {step}")
        return await self._await_update(run, region, step, wait, part)

    # --- the log ------------------------------------------------------------------------------------------------------

    async def log(self, run: str, region: str, start: int, stop: int | None, wait: float) -> schemas.LogPage:
        def over(state: RunState) -> bool:
            head = state.regions[region].head
            return state.status.terminal or (head is not None and head.seq >= start)

        _known_region((await self._store.load(run)).state, region)
        state = await self._engine.wait(run, over, wait)
        end = start + _PAGE if stop is None else min(stop, start + _PAGE)
        headers = await self._logs.headers(run, region, start, end)
        return schemas.LogPage(items=headers, head=state.regions[region].head, ended=state.status.terminal)

    async def entry(self, run: str, region: str, seq: int, part: int) -> bytes:
        _known_region((await self._store.load(run)).state, region)
        return await self._logs.message(run, region, seq, part)

    async def announce(
        self,
        run: str,
        number: int,
        fragment: int,
        site: str,
        attempt: int,
        announcement: schemas.Announcement,
        wait: float,
    ) -> schemas.AnnouncementReply:
        def open_or_over(state: RunState) -> bool:
            opened = state.outer_rounds + (state.outer is not None)
            return opened >= number or not state.going_on

        if not (await self._store.load(run)).state.has_rounds:
            await self._engine.apply(run, Arrived(site, attempt, number, announcement.tokens))
        await self._engine.wait(run, open_or_over, wait)
        digest = announcement.digest
        stored = await self._is_stored(run, fragment, announcement)
        event = Announced(site, attempt, number, fragment, digest, stored, announcement.upload)
        state = await self._engine.apply(run, event)
        return schemas.AnnouncementReply(
            upload=_is_asked(state, number, fragment, site, digest), evaluate=state.first_site == site
        )

    async def _is_stored(self, run: str, fragment: int, announcement: schemas.Announcement) -> bool:
        """Whether the copy itself is a blob. What it was encoded as must be one, and good.

        Raises:
            InvalidError: the run's copies are not encoded, or not as this blob.
            NotFoundError: the blob is not there.
        """
        state = (await self._store.load(run)).state
        outer, upload = state.spec.outer, announcement.upload
        if outer is None or outer.codec == "fp32" or fragment == outer.fragments:
            if upload is not None:
                raise InvalidError("bad_upload", f"copies of fragment {fragment} of run {run} are uploaded as they are")
            return await self._blobs.stays(announcement.digest, run)
        if upload is not None and fragment < outer.fragments:
            size = await self._blobs.require(upload, run)
            layout = await self._layouts.of(state)
            await in_thread(check_encoding, upload, size, fragment, layout, outer, self._blobs.stored)
        return False


def _is_asked(state: RunState, number: int, fragment: int, site: str, digest: str) -> bool:
    """Whether this site is to upload its copy: the first that holds it, if it counts, as far as that is known.

    The first in its region, if copies are encoded: what is left of them differs between regions.
    """
    outer, spec, region = state.outer, state.spec.outer, state.members[site].region
    if outer is None or spec is None or outer.number != number:
        return False
    known = outer.fragments[fragment]
    if known.upload(region, digest) is not None:
        return False
    there = remaining(state, region if spec.codec != "fp32" and not known.buffers else None)
    if all_announced(known, state) and not any(digest in copies for copies in region_copies(state, known).values()):
        return False
    return site == next((holder for holder, copy in known.copies.items() if copy == digest and holder in there), None)


def _open(state: RunState, region: str, step: int) -> bool:
    """However old such a state is: with what settings the step is done it knows."""
    round_ = state.regions[region].round if region in state.regions else None
    return round_ is not None and round_.step == step


def _closed(state: RunState, region: str, step: int) -> bool:
    _known_region(state, region)
    return 1 <= step <= state.regions[region].step


def _skipped(region: str, step: int) -> GoneError:
    """The region was away, and was taken along by an outer round."""
    return GoneError(
        "closed_without_you",
        f"the log of region {region} has no entry of step {step}: take the entries that follow yours",
    )


def _known_region(state: RunState, region: str) -> None:
    if region not in state.regions:
        there = ", ".join(state.regions) or "none before it is started"
        raise NotFoundError("region_not_found", f"run {state.id} has no region {region!r}; its regions: {there}")
