"""CoordinatorService: what the API asks for, in terms of the engine, the store and the blobs."""

import asyncio
import hashlib
import math
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import suppress

import structlog
from redis.exceptions import RedisError

from algorithms.layout import ParameterLayout
from algorithms.traffic import contribution_bytes, parameters_bytes
from api import schemas
from api.app import CONTRIBUTION_LIMIT
from api.errors import ConflictError, GoneError, InvalidError, NotFoundError, ProblemError
from api.payload import digest_json, encode_message
from api.schemas import RunStatus
from api.service import Answer, Principal
from coordinator.blobs import BlobDirectory
from coordinator.engine import Engine
from coordinator.events import (
    Abstained,
    Announced,
    CaughtUp,
    Contributed,
    FinalReported,
    LayoutPresented,
    PauseRequested,
    Refused,
    ResumeRequested,
    SeatTaken,
    SiteAdded,
    SiteRemoved,
    StartRequested,
    StartUploaded,
    StopRequested,
    Ticked,
)
from coordinator.events import (
    Answer as SiteAnswer,
)
from coordinator.layouts import Layouts
from coordinator.quorum import remaining
from coordinator.records import RunState, Sent, Start
from coordinator.rounds import read_header, read_update
from coordinator.settings import Settings
from coordinator.sites import Sites
from coordinator.state import due_at, transition
from coordinator.store import Store, hashed
from coordinator.waiting import reason_of, waiting_for

__all__ = ["CoordinatorService"]

_PAGE = 500
"""Entries in one page of the log."""
_MESSAGES_KEPT = 16
_REASON = 500
"""Characters of the reason for which a contribution was refused."""
_HEADER_ROOM = 1 << 18
"""For the header of a contribution, which names absent tensors."""

log = structlog.get_logger()


class CoordinatorService:
    """Implements `api.service.Service`."""

    def __init__(self, store: Store, blobs: BlobDirectory, settings: Settings) -> None:
        self._store = store
        self._blobs = blobs
        self._settings = settings
        self._layouts = Layouts(blobs)
        self._engine = Engine(store, blobs, self._layouts)
        self._sites = Sites(store, self._engine, settings)
        self._messages: OrderedDict[tuple[str, str, int], bytes] = OrderedDict()
        self._ticked = 0.0

    # --- life ---------------------------------------------------------------------------------------------------------

    async def keep_ticking(self) -> None:
        """Looks at leases, deadlines and unfinished work until closed; tries again while Redis is unreachable."""
        while not self._engine.closing:
            try:
                await self._tick()
                self._ticked = asyncio.get_running_loop().time()
            except (RedisError, ProblemError) as error:
                log.warning("tick failed, to be tried again", error=str(error))
            await asyncio.sleep(self._settings.tick_s)

    async def _tick(self) -> None:
        now, outage_s = await self._store.tick(self._settings.tick_s, self._settings.lease_s)
        if outage_s:
            log.warning("nobody was there for sites, deadlines shift", outage_s=outage_s)
        for state in await self._store.active():
            due = due_at(state)
            if outage_s or (due is not None and due <= now):
                await self._engine.apply(state.id, Ticked(outage_s))
            self._engine.work(state)
        await self._sites.expire(now)

    async def close(self) -> None:
        await self._engine.close()

    async def health(self) -> schemas.Health:
        age = asyncio.get_running_loop().time() - self._ticked
        stale = age > max(10.0, 10 * self._settings.tick_s)
        return schemas.Health(status="unavailable" if stale else "ok", detail={"tick_age_s": f"{age:.1f}"})

    async def ready(self) -> schemas.Health:
        try:
            await self._store.ping()
        except RedisError as error:
            return schemas.Health(status="unavailable", detail={"redis": str(error) or type(error).__name__})
        return schemas.Health(status="ok", detail=dict.fromkeys(await self._store.warnings(), "warning"))

    async def authenticate(self, token: str) -> Principal | None:
        found = await self._store.principal(hashed(token))
        return None if found is None else Principal(**found)

    # --- sites --------------------------------------------------------------------------------------------------------

    async def register_site(self, name: str, registration: schemas.SiteRegistration) -> schemas.Registered:
        return await self._sites.register(name, registration)

    async def list_sites(self) -> list[schemas.Site]:
        return await self._sites.all()

    async def site(self, name: str) -> schemas.Site:
        return await self._sites.get(name)

    async def remove_site(self, name: str) -> None:
        await self._sites.remove(name)

    async def heartbeat(self, name: str, heartbeat: schemas.Heartbeat, wait: float) -> schemas.HeartbeatReply:
        return await self._sites.heartbeat(name, heartbeat, wait)

    async def leave(self, name: str) -> None:
        await self._sites.leave(name)

    # --- runs ---------------------------------------------------------------------------------------------------------

    async def create_run(self, spec: schemas.RunSpec, idempotency_key: str | None) -> schemas.Run:
        run = f"{spec.name}-{secrets.token_hex(4)}"
        if idempotency_key is not None:
            body = digest_json(spec.model_dump(mode="json"))
            run, known = (await self._store.remember(idempotency_key, f"{run} {body}")).split()
            if known != body:
                raise InvalidError(
                    "idempotency_key", "this Idempotency-Key came with another body before: use a new one"
                )
            with suppress(NotFoundError):
                return await self.run(run)
        now = await self._store.now()
        state = RunState(id=run, spec=spec, created_at=now, since=now)
        await self._store.create_run(state)
        return await self.run(run)

    async def list_runs(self) -> list[schemas.Run]:
        return [await self.run(run) for run in await self._store.runs()]

    async def run(self, run: str) -> schemas.Run:
        return _view((await self._store.load(run)).state)

    async def delete_run(self, run: str) -> None:
        while True:
            found = await self._store.load(run)
            status = found.state.status
            if not status.terminal and status is not RunStatus.PENDING:
                raise ConflictError("wrong_status", f"run {run} is {status}: stop it before you delete it")
            if await self._store.delete_run(found):
                return

    async def start_run(self, run: str) -> schemas.Run:
        state = (await self._store.load(run)).state
        if state.status in (RunStatus.STARTING, RunStatus.RUNNING):  # the answer to an earlier request was lost
            return _view(state)
        return _view(await self._engine.apply(run, StartRequested(await self._sites.choose(state.spec))))

    async def stop_run(self, run: str) -> schemas.Run:
        return _view(await self._engine.apply(run, StopRequested()))

    async def pause_run(self, run: str) -> schemas.Run:
        return _view(await self._engine.apply(run, PauseRequested()))

    async def resume_run(self, run: str) -> schemas.Run:
        return _view(await self._engine.apply(run, ResumeRequested()))

    async def add_site(self, run: str, site: str) -> schemas.Run:
        spec = (await self._store.load(run)).state.spec
        return _view(await self._engine.apply(run, SiteAdded(site, await self._sites.region_of(site, spec))))

    async def exclude_site(self, run: str, site: str) -> schemas.Run:
        return _view(await self._engine.apply(run, SiteRemoved(site, "removed by an administrator")))

    async def take_seat(self, run: str, site: str, seat: schemas.Seat) -> None:
        secret_hash = hashed(seat.secret)
        event = SeatTaken(site, seat.attempt, secret_hash)
        transition((await self._store.load(run)).state, event, await self._store.now())
        principal = {"scope": "ranks", "run": run, "site": site, "attempt": seat.attempt}
        await self._store.claim(secret_hash, principal, for_good=False)
        await self._engine.apply(run, event)

    async def join(self, run: str, site: str, request: schemas.JoinRequest) -> schemas.JoinReply:
        state = (await self._store.load(run)).state
        layout = await asyncio.to_thread(_checked_layout, request.layout, state.spec)
        if state.layout is not None:
            _same_layout(layout, await self._layouts.of(state), site)
        event = LayoutPresented(site, request.attempt, await self._layouts.save(layout))
        state = await self._engine.apply(run, event)
        first = min(state.first_site or site, site)
        return schemas.JoinReply(
            layout=layout.digest,
            upload_start=site == state.first_site and state.start is None,
            evaluate=site == first,
            resume=state.regions[state.members[site].region].resume,
        )

    async def caught_up(self, run: str, site: str, report: schemas.CaughtUp) -> schemas.CaughtUpReply:
        state = await self._engine.apply(run, CaughtUp(site, report.attempt, report.position))
        member = state.members[site]
        head, outer = state.regions[member.region].head, state.outer
        assert head is not None
        active = member.caught_up and report.position == head and (outer is None or site in outer.participants)
        return schemas.CaughtUpReply(active=active, head=head)

    async def upload_start(self, run: str, site: str, attempt: int, start: schemas.StartUpload) -> None:
        state = (await self._store.load(run)).state
        layout = await self._layouts.of(state)
        size = self._blobs.size(start.parameters)
        if size != parameters_bytes(layout):
            raise InvalidError(
                "wrong_size",
                f"the parameters have {size} bytes; the layout's {layout.parameter_count} float32 elements take "
                f"{parameters_bytes(layout)}",
            )
        if start.buffers is not None:
            self._blobs.size(start.buffers)
        entry = Start(parameters=start.parameters, buffers=start.buffers)
        await self._engine.apply(run, StartUploaded(site, attempt, entry))

    async def report_final(self, run: str, site: str, attempt: int, report: schemas.FinalReport) -> schemas.FinalReply:
        event = FinalReported(site, attempt, report.seq, report.digest, stored=self._blobs.has(report.digest))
        state = await self._engine.apply(run, event)
        wanted = state.spec.outer is None and not state.final_stored and site == state.model_site
        return schemas.FinalReply(upload=wanted and not state.status.terminal)

    async def model(self, run: str) -> schemas.Model:
        state = (await self._store.load(run)).state
        if state.status is not RunStatus.SUCCEEDED:
            raise ConflictError(
                "no_model", f"run {run} is {state.status}: the trained model is there once it succeeded"
            )
        digest = next(member.final for member in state.members.values() if member.final is not None)
        blobs = [anchor for anchor in state.anchors if anchor is not None] if state.spec.outer else [digest]
        layout = await self._layouts.of(state)
        return schemas.Model(run=run, step=state.step, digest=digest, layout=layout.to_json(), blobs=blobs)

    async def outer_rounds(self, run: str) -> list[schemas.OuterRound]:
        await self._store.load(run)
        return await self._store.outer_rounds(run)

    # --- rounds -------------------------------------------------------------------------------------------------------

    async def contribute(
        self, run: str, region: str, step: int, site: str, attempt: int, part: int, body: bytes, wait: float
    ) -> Answer:
        state = (await self._store.load(run)).state
        digest = hashlib.sha256(body).hexdigest()
        await self._sites.heard(site)
        if _closed(state, region, step):
            return await self._answer_closed(run, region, step, site, digest)
        layout, optimizer = await self._layouts.of(state), state.spec.optimizer
        header, arrays = await asyncio.to_thread(read_header, body, layout, optimizer)
        _same_place(header, run=run, region=region, step=step, site=site, part=part)
        try:
            await asyncio.to_thread(read_update, header, arrays, layout, optimizer)
        except InvalidError as error:
            reason = error.detail.encode(errors="replace").decode()[:_REASON]
            with suppress(ConflictError):
                await self._engine.apply(run, Refused(site, attempt, region, step, header.position, reason))
            raise
        await self._store.put_payload(run, digest, body)
        sent = Sent(digest=digest, tokens=header.tokens)
        return await self._take_in(run, Contributed(site, attempt, region, step, header.position, sent), digest, wait)

    async def abstain(
        self, run: str, region: str, step: int, site: str, attempt: int, abstention: schemas.Abstention, wait: float
    ) -> Answer:
        state = (await self._store.load(run)).state
        await self._sites.heard(site)
        if _closed(state, region, step):
            return await self._answer_closed(run, region, step, site, None)
        event = Abstained(site, attempt, region, step, abstention.position, abstention.reason)
        return await self._take_in(run, event, None, wait)

    async def _take_in(self, run: str, event: SiteAnswer, digest: str | None, wait: float) -> Answer:
        """The update, once the round is closed. A round that is next and not open yet is waited for, too (A16)."""

        def not_yet(state: RunState) -> bool:
            region = state.regions[event.region]
            return state.going_on and region.round is None and event.step == region.step + 1

        deadline = asyncio.get_running_loop().time() + wait
        while True:
            left = max(deadline - asyncio.get_running_loop().time(), 0.0)
            state = await self._engine.wait(run, lambda state: not not_yet(state), left)
            try:
                await self._engine.apply(run, event)
            except ConflictError as error:
                if error.code != "round_not_open" or not not_yet(state):
                    raise
                if left > 0 and not self._engine.closing:
                    continue
                return Answer(None, waiting_for(state), accepted=False)
            except GoneError as error:
                if error.code != "closed_without_you":
                    raise
                state = (await self._store.load(run)).state
                if not _closed(state, event.region, event.step):  # the round is frozen
                    raise
                return await self._answer_closed(run, event.region, event.step, event.site, digest)
            left = max(deadline - asyncio.get_running_loop().time(), 0.0)
            return await self._await_update(run, event.region, event.step, left)

    async def _await_update(self, run: str, region: str, step: int, wait: float) -> Answer:
        def over(state: RunState) -> bool:
            return _closed(state, region, step) or not state.going_on

        state = await self._engine.wait(run, over, wait)
        if not _closed(state, region, step):
            if state.status.terminal or state.status is RunStatus.STOPPING:
                raise GoneError("run_ended", f"run {run} is {state.status}: {state.ended_because}")
            return Answer(None, waiting_for(state))
        seq = await self._store.seq_of_step(run, region, step)
        if seq is None:
            raise _skipped(region, step)
        return Answer(await self._message(run, region, seq))

    async def _answer_closed(self, run: str, region: str, step: int, site: str, digest: str | None) -> Answer:
        """The update, if the entry lists what the site sent (A1); `digest` None: if it abstained."""
        seq = await self._store.seq_of_step(run, region, step)
        if seq is None:
            raise _skipped(region, step)
        (header,) = await self._store.entries(run, region, seq, seq + 1)
        if digest is None:
            listed = any(abstention["site"] == site for abstention in header["abstentions"])
        else:
            listed = any((sent["site"], sent["digest"]) == (site, digest) for sent in header["contributors"])
        if not listed:
            raise GoneError(
                "closed_without_you",
                f"the round of step {step} is closed and does not list what {site} sent: take its entry {seq} instead",
                context={"seq": seq},
            )
        return Answer(await self._message(run, region, seq))

    async def update(self, run: str, region: str, step: int, part: int, wait: float) -> Answer:
        _only_part(part)
        state = (await self._store.load(run)).state
        _known_region(state, region)
        if step > state.spec.steps:
            raise NotFoundError("step_not_found", f"run {run} has {state.spec.steps} steps: there is no step {step}")
        return await self._await_update(run, region, step, wait)

    # --- the log ------------------------------------------------------------------------------------------------------

    async def log(self, run: str, region: str, start: int, stop: int | None, wait: float) -> schemas.LogPage:
        def over(state: RunState) -> bool:
            head = state.regions[region].head
            return state.status.terminal or (head is not None and head.seq >= start)

        _known_region((await self._store.load(run)).state, region)
        state = await self._engine.wait(run, over, wait)
        end = start + _PAGE if stop is None else min(stop, start + _PAGE)
        headers = await self._store.entries(run, region, start, end)
        return schemas.LogPage(items=headers, head=state.regions[region].head, ended=state.status.terminal)

    async def entry(self, run: str, region: str, seq: int, part: int) -> bytes:
        _only_part(part)
        _known_region((await self._store.load(run)).state, region)
        return await self._message(run, region, seq)

    async def _message(self, run: str, region: str, seq: int) -> bytes:
        key = (run, region, seq)
        if key not in self._messages:
            headers = await self._store.entries(run, region, seq, seq + 1)
            if not headers:
                raise NotFoundError(
                    "entry_not_found", f"the log of region {region} in run {run} has no entry {seq} yet"
                )
            blob = await self._store.message_blob(run, region, seq)
            if blob is None:
                self._messages[key] = encode_message("entry", headers[0], {})
            else:
                self._messages[key] = await asyncio.to_thread(self._blobs.path(blob).read_bytes)
            while len(self._messages) > _MESSAGES_KEPT:
                self._messages.popitem(last=False)
        return self._messages[key]

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

        await self._engine.wait(run, open_or_over, wait)
        digest = announcement.digest
        event = Announced(site, attempt, number, fragment, digest, stored=self._blobs.has(digest))
        state = await self._engine.apply(run, event)
        outer = state.outer
        if outer is None or outer.number != number or digest in outer.fragments[fragment].stored:
            return schemas.AnnouncementReply(upload=False)
        there = remaining(state)
        copies = outer.fragments[fragment].copies.items()
        first = next((holder for holder, copy in copies if copy == digest and holder in there), None)
        return schemas.AnnouncementReply(upload=first == site)

    # --- blobs --------------------------------------------------------------------------------------------------------

    async def put_blob(self, digest: str, body: AsyncIterator[bytes]) -> bool:
        return await self._blobs.put(digest, body)

    async def blob_size(self, digest: str) -> int:
        return self._blobs.size(digest)

    async def blob(self, digest: str) -> AsyncIterator[bytes]:
        return await self._blobs.open(digest)

    # --- metrics ------------------------------------------------------------------------------------------------------

    async def add_metrics(self, run: str, report: schemas.MetricReport) -> None:
        now = await self._store.now()
        await self._store.load(run)
        points = [
            schemas.StoredPoint(site=report.site, step=point.step, at=now, values=_finite(point.values))
            for point in report.points
        ]
        await self._store.add_metrics(run, points)

    async def metrics(self, run: str, max_points: int) -> list[schemas.StoredPoint]:
        await self._store.load(run)
        return await self._store.metrics(run, max_points)


def _finite(values: dict[str, float | None]) -> dict[str, float | None]:
    return {name: value if value is not None and math.isfinite(value) else None for name, value in values.items()}


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


def _only_part(part: int) -> None:
    if part != 0:
        raise NotFoundError("part_not_found", f"part {part}: entries have one part, number 0")


def _same_place(header: schemas.ContributionHeader, **place: str | int) -> None:
    named = {name: getattr(header, name) for name in place}
    if named != place:
        raise InvalidError("other_place", f"the contribution's header says {named}, its URL {place}")


def _checked_layout(value: dict[str, object], spec: schemas.RunSpec) -> ParameterLayout:
    try:
        layout = ParameterLayout.from_json(value)
        "".join([*layout.groups, *layout.index]).encode()  # half of a surrogate pair is a ValueError
        if layout.chunk != spec.optimizer.chunk:
            raise ValueError(f"the layout has chunk {layout.chunk}, the run's spec {spec.optimizer.chunk}")
        size = contribution_bytes(layout, spec.optimizer.k, spec.optimizer.codec)
        if size > CONTRIBUTION_LIMIT - _HEADER_ROOM:
            raise ValueError(
                f"a contribution to this model would take {size} bytes, more than the limit of {CONTRIBUTION_LIMIT}: "
                f"lower optimizer.k (now {spec.optimizer.k}) or use codec sign"
            )
        if spec.outer is not None:
            layout.fragments(spec.outer.fragments)
    except ValueError as error:
        raise InvalidError("bad_layout", f"layout: {error}") from None
    return layout


def _same_layout(theirs: ParameterLayout, ours: ParameterLayout, site: str) -> None:
    """Names the parameters that differ; what `_checked_layout` leaves out, the state machine compares by digest."""
    tensors = [{(t.name, t.shape, layout.groups[t.group]) for t in layout.tensors} for layout in (theirs, ours)]
    differing = sorted({name for name, _, _ in tensors[0] ^ tensors[1]})
    if differing:
        shapes = [{name: list(shape) for name, shape, _ in side} for side in tensors]
        listed = "; ".join(
            f"{name}: {shapes[0].get(name, 'missing')} here, {shapes[1].get(name, 'missing')} in the run"
            for name in differing[:5]
        )
        raise ConflictError(
            "layout_differs",
            f"the model at site {site} has other parameters than the run's, {len(differing)} differ ({listed}): use "
            "the same version of the task's code at all sites",
        )


def _view(state: RunState) -> schemas.Run:
    return schemas.Run(
        id=state.id,
        spec=state.spec,
        status=state.status,
        reason=waiting_for(state),
        since=state.since,
        created_at=state.created_at,
        step=state.step,
        outer_rounds=state.outer_rounds,
        members=[
            schemas.MemberView(
                site=member.site,
                region=member.region,
                attempt=member.attempt,
                ready=member.ready,
                condition=member.condition,
                since=member.since,
                reason=reason_of(member, state),
                digest=member.final,
            )
            for member in state.members.values()
        ],
        regions=[
            schemas.RegionView(name=region.name, step=region.step, head=region.head, tokens=region.tokens)
            for region in state.regions.values()
        ],
        alarms=list(state.alarms),
    )
