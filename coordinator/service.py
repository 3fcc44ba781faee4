"""CoordinatorService: what the API asks for, in terms of the engine, the store and the blobs."""

import asyncio
import math
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import structlog
from redis.exceptions import RedisError

from algorithms.traffic import parameters_bytes
from api import schemas, specs
from api.errors import ConflictError, GoneError, InvalidError, NotFoundError, ProblemError
from api.payload import digest_json
from api.schemas import RunStatus
from api.service import Answer, FoundBlob, Place, Principal
from coordinator.access import Access
from coordinator.blobs import Blobs
from coordinator.buffers import require_buffers, require_small_buffers
from coordinator.contributions import Contributions
from coordinator.engine import Engine
from coordinator.events import (
    AnsweredLate,
    CaughtUp,
    ChangeRequested,
    FinalReported,
    LayoutPresented,
    PauseRequested,
    ResumeRequested,
    SeatTaken,
    SiteAdded,
    SiteRemoved,
    StartRequested,
    StartUploaded,
    StopRequested,
    Ticked,
)
from coordinator.exchanges import Exchanges
from coordinator.guards import Guards
from coordinator.kept_blobs import KeptBlobs
from coordinator.layouts import Layouts, checked_layout, require_few_parts, require_same_layout
from coordinator.logs import Logs
from coordinator.packing import Packer
from coordinator.pressure import Pressure
from coordinator.recent import Recent
from coordinator.records import RunState, Start
from coordinator.settings import Settings
from coordinator.sites import Sites
from coordinator.snapshot_service import Snapshots
from coordinator.state import due_at, transition
from coordinator.store import Store, unavailable
from coordinator.tokens import hashed
from coordinator.transitions import still_possible
from coordinator.uploads import Uploads
from coordinator.views import run_view

__all__ = ["CoordinatorService"]

log = structlog.get_logger()


class CoordinatorService:
    """Implements `api.service.Service`."""

    def __init__(self, store: Store, blobs: Blobs, settings: Settings) -> None:
        self.access = Access(store)
        self._store = store
        self._blobs = kept = KeptBlobs(blobs, store, settings.blob_quota_gb)
        self._settings = settings
        self._layouts = Layouts(kept)
        self._logs = Logs(store, kept)
        recent = Recent()
        self._engine = Engine(store, kept, self._layouts, self._logs, recent)
        self._sites = Sites(store, self._engine, settings)
        pressure = Pressure(store, settings.redis_budget_mb)
        contributions = Contributions(store, self._layouts, self._engine, pressure, recent)
        self._exchanges = Exchanges(store, kept, contributions, self._layouts, self._logs, self._engine, recent)
        self._guards = Guards(store, self._engine)
        self.snapshots = Snapshots(store, kept, self._layouts, self._logs, self._engine)
        self._packer = Packer(store, kept, settings)
        self._uploads = Uploads(kept)
        self._ticked = self._outage_s = 0.0

    # --- life ---------------------------------------------------------------------------------------------------------

    async def keep_ticking(self) -> None:
        """Looks at leases, deadlines and unfinished work until closed; tries again while Redis is unreachable."""
        while not self._engine.closing:
            try:
                await self.tick()
                self._ticked = asyncio.get_running_loop().time()
            except (RedisError, ProblemError) as error:
                log.warning("tick failed, to be tried again", error=str(error))
            await asyncio.sleep(self._settings.tick_s)

    async def keep_listening(self) -> None:
        """Wakes who waits here for what another process has done."""
        await self._engine.listen()

    async def tick(self) -> None:
        """What time has made due. To be done once before any request is answered: an outage is noticed here (A6)."""
        now, outage_s = await self._store.tick(self._settings.tick_s, self._settings.lease_s)
        self._outage_s += outage_s
        active = await self._store.active()
        for state in active:
            due = due_at(state)
            if self._outage_s or (due is not None and due <= now):
                await self._engine.apply(state.id, Ticked(self._outage_s))
            self._engine.work(state)
        self._outage_s = 0.0
        await self._sites.expire(now)
        self._packer.start(active)

    async def close(self) -> None:
        await self._packer.close()
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
        try:
            await self._blobs.stored.check()
        except ProblemError as error:
            return schemas.Health(status="unavailable", detail={"blobs": str(error)})
        return schemas.Health(status="ok", detail=dict.fromkeys(await self._store.warnings(), "warning"))

    async def authenticate(self, token: str) -> Principal | None:
        try:
            found = await self._store.tokens.principal(hashed(token))
        except RedisError as error:
            raise unavailable(error) from None
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

    async def create_run(self, spec: specs.RunSpec, idempotency_key: str | None) -> schemas.Run:
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
        now, origin = await self._store.now(), await self.snapshots.origin(spec.begin, run)
        state = RunState(id=run, spec=spec, created_at=now, since=now, origin=origin)
        if not await self._store.create_run(state, idempotency_key):
            raise GoneError("run_deleted", f"this Idempotency-Key made run {run}, which was deleted: use a new one")
        return await self.run(run)

    async def list_runs(self) -> list[schemas.Run]:
        return [await self.run(run) for run in await self._store.runs()]

    async def run(self, run: str) -> schemas.Run:
        return await self._view((await self._store.load(run)).state)

    async def _view(self, state: RunState) -> schemas.Run:
        return run_view(state, await self._store.now())

    async def delete_run(self, run: str) -> None:
        while True:
            found = await self._store.load(run)
            status = found.state.status
            if not status.terminal and status is not RunStatus.PENDING:
                remedy = "wait for its end" if status is RunStatus.STOPPING else "stop it"
                raise ConflictError("wrong_status", f"run {run} is {status}: {remedy} before you delete it")
            if await self._store.delete_run(found):
                return

    async def start_run(self, run: str) -> schemas.Run:
        state = (await self._store.load(run)).state
        if state.status in (RunStatus.STARTING, RunStatus.RUNNING):  # the answer to an earlier request was lost
            return await self._view(state)
        return await self._view(await self._engine.apply(run, StartRequested(await self._sites.choose(state.spec))))

    async def stop_run(self, run: str) -> schemas.Run:
        return await self._view(await self._engine.apply(run, StopRequested()))

    async def pause_run(self, run: str) -> schemas.Run:
        return await self._view(await self._engine.apply(run, PauseRequested()))

    async def resume_run(self, run: str) -> schemas.Run:
        return await self._view(await self._engine.apply(run, ResumeRequested()))

    async def change_run(self, run: str, change: specs.Change) -> schemas.Run:
        state = (await self._store.load(run)).state
        if change.k is not None and state.layout is not None:
            optimizer = state.spec.optimizer.model_copy(update={"k": change.k})
            try:
                require_few_parts(await self._layouts.of(state), optimizer, state.spec.part_bytes)
            except ValueError as error:
                raise InvalidError("bad_change", str(error)) from None
        return await self._view(await self._engine.apply(run, ChangeRequested(change)))

    async def add_site(self, run: str, site: str) -> schemas.Run:
        state = (await self._store.load(run)).state
        return await self._view(
            await self._engine.apply(run, SiteAdded(site, await self._sites.region_of(site, state)))
        )

    async def exclude_site(self, run: str, site: str) -> schemas.Run:
        return await self._view(await self._engine.apply(run, SiteRemoved(site, "removed by an administrator")))

    async def take_seat(self, run: str, site: str, seat: schemas.Seat) -> None:
        secret_hash = hashed(seat.secret)
        event = SeatTaken(site, seat.attempt, secret_hash, seat.version)
        transition((await self._store.load(run)).state, event, await self._store.now())
        principal = {"scope": "ranks", "run": run, "site": site, "attempt": seat.attempt}
        await self._store.tokens.claim(secret_hash, principal, for_good=False)
        await self._engine.apply(run, event)

    async def join(self, run: str, site: str, request: schemas.JoinRequest) -> schemas.JoinReply:
        state = (await self._store.load(run)).state
        require_small_buffers(request.buffer_bytes, f"the model at site {site}")
        layout = await asyncio.to_thread(checked_layout, request.layout, state.spec)
        if state.layout is not None:
            require_same_layout(layout, await self._layouts.of(state), site)
        if state.origin is not None:
            await self.snapshots.require_same_model(layout, state)
        event = LayoutPresented(site, request.attempt, await self._layouts.save(layout, run))
        state = await self._engine.apply(run, event)
        first = min(state.first_site or site, site)
        return schemas.JoinReply(
            layout=layout.digest,
            upload_start=site == state.first_site and state.start is None and state.origin is None,
            evaluate=site == first,
            listed=state.members[site].listed,
            resume=state.entrance(state.members[site].region),
        )

    async def caught_up(self, run: str, site: str, report: schemas.CaughtUp) -> schemas.CaughtUpReply:
        state = await self._engine.apply(run, CaughtUp(site, report.attempt, report.position))
        member = state.members[site]
        head, outer = state.regions[member.region].head, state.outer
        assert head is not None
        active = member.caught_up and (
            state.open_to(member.region) or (outer is not None and site in outer.participants)
        )
        return schemas.CaughtUpReply(active=active, head=head)

    async def upload_start(self, run: str, site: str, attempt: int, start: schemas.StartUpload) -> None:
        state = (await self._store.load(run)).state
        layout = await self._layouts.of(state)
        size = await self._blobs.require(start.parameters, run)
        if size != parameters_bytes(layout):
            raise InvalidError(
                "wrong_size",
                f"the parameters have {size} bytes; the layout's {layout.parameter_count} float32 elements take "
                f"{parameters_bytes(layout)}",
            )
        await require_buffers(self._blobs, start.buffers, run, site)
        entry = Start(parameters=start.parameters, buffers=start.buffers)
        await self._engine.apply(run, StartUploaded(site, attempt, entry))

    async def report_final(self, run: str, site: str, attempt: int, report: schemas.FinalReport) -> schemas.FinalReply:
        stored = await self._blobs.stays(report.digest, run)
        await require_buffers(self._blobs, report.buffers, run, site)
        event = FinalReported(site, attempt, report.seq, report.digest, stored, report.buffers)
        state = await self._engine.apply(run, event)
        wanted = state.spec.outer is None and not state.final_stored and site == state.model_site
        return schemas.FinalReply(upload=wanted and not state.status.terminal)

    async def layout(self, run: str) -> schemas.RunLayout:
        layout = await self._layouts.of((await self._store.load(run)).state)
        return schemas.RunLayout(digest=layout.digest, layout=layout.to_json())

    async def model(self, run: str) -> schemas.Model:
        state = (await self._store.load(run)).state
        if state.status is not RunStatus.SUCCEEDED:
            remedy = f"; {still_possible(state)}" if state.status.terminal else ""
            because = f"run {run} is {state.status}: the trained model is there once it succeeded{remedy}"
            raise ConflictError("no_model", because)
        digest = next(member.final for member in state.members.values() if member.final is not None)
        blobs = [anchor for anchor in state.anchors if anchor is not None] if state.spec.outer else [digest]
        layout = await self._layouts.of(state)
        return schemas.Model(
            run=run, step=state.step, digest=digest, layout=layout.to_json(), blobs=blobs, buffers=state.buffers
        )

    async def outer_rounds(self, run: str) -> list[schemas.OuterRound]:
        await self._store.load(run)
        return await self._store.outer_rounds(run)

    # --- rounds and the log -------------------------------------------------------------------------------------------

    async def contribute(self, place: Place, part: int, body: bytes, wait: float) -> Answer:
        async with self._late_ones_noted(place), self._guards.storage(place.run):
            await self._sites.heard(place.site)
            answer = await self._exchanges.contribute(place, part, body, wait)
        return await self._with_wishes(answer, place.run, place.step, place.site)

    async def abstain(self, place: Place, abstention: schemas.Abstention, wait: float) -> Answer:
        await self._sites.heard(place.site)
        async with self._late_ones_noted(place):
            answer = await self._exchanges.abstain(place, abstention, wait)
        return await self._with_wishes(answer, place.run, place.step, place.site)

    @asynccontextmanager
    async def _late_ones_noted(self, place: Place) -> AsyncIterator[None]:
        try:
            yield
        except GoneError as error:
            if error.code == "closed_without_you":
                with suppress(ProblemError):
                    await self._engine.apply(place.run, AnsweredLate(place.site, place.attempt, place.step))
            raise

    async def update(self, run: str, region: str, step: int, part: int, wait: float, site: str | None = None) -> Answer:
        answer = await self._exchanges.update(run, region, step, part, wait)
        return answer if site is None else await self._with_wishes(answer, run, step, site)

    async def _with_wishes(self, answer: Answer, run: str, step: int, site: str) -> Answer:
        """Sites learn with every answer which of them evaluates: the lowest-named live one (C10); and with that to
        their contribution, which of them is asked for a snapshot.
        """
        state = (self._store.seen(run) or await self._store.load(run)).state
        number = None if answer.message is None else await self.snapshots.ask(state, step, site)
        return replace(answer, evaluate=state.first_site == site, snapshot=number)

    async def log(self, run: str, region: str, start: int, stop: int | None, wait: float) -> schemas.LogPage:
        return await self._exchanges.log(run, region, start, stop, wait)

    async def entry(self, run: str, region: str, seq: int, part: int) -> bytes:
        return await self._exchanges.entry(run, region, seq, part)

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
        return await self._exchanges.announce(run, number, fragment, site, attempt, announcement, wait)

    # --- blobs --------------------------------------------------------------------------------------------------------

    async def put_blob(self, digest: str, body: AsyncIterator[bytes], principal: Principal) -> bool:
        async with self._guards.storage(principal.run):
            return await self._blobs.put(digest, body, principal.run or "")

    async def append_blob(
        self, digest: str, offset: int, length: int, body: AsyncIterator[bytes], principal: Principal
    ) -> FoundBlob:
        async with self._guards.storage(principal.run):
            return await self._uploads.append(digest, _owner(principal), principal.run or "", offset, length, body)

    async def find_blob(self, digest: str, principal: Principal) -> FoundBlob:
        return await self._uploads.find(digest, _owner(principal), principal.run or "")

    async def blob_size(self, digest: str) -> int:
        return await self._blobs.stored.size(digest)

    async def blob(self, digest: str, start: int, stop: int) -> AsyncIterator[bytes]:
        return await self._blobs.stored.open(digest, start, stop)

    # --- metrics ------------------------------------------------------------------------------------------------------

    async def add_metrics(self, run: str, report: schemas.MetricReport) -> None:
        now = await self._store.now()
        await self._guards.look_at(run, report)
        points = [
            schemas.StoredPoint(
                site=report.site, session=report.session, step=point.step, at=now, values=_finite(point.values)
            )
            for point in report.points
        ]
        await self._store.series.add(run, points)

    async def metrics(self, run: str, max_points: int) -> list[schemas.StoredPoint]:
        await self._store.load(run)
        return await self._store.series.all(run, max_points)


def _owner(principal: Principal) -> str:
    """Of an upload: a token, by what it stands for."""
    return f"{principal.scope} {principal.token} {principal.run} {principal.site} {principal.attempt}"


def _finite(values: dict[str, float | None]) -> dict[str, float | None]:
    return {name: value if value is not None and math.isfinite(value) else None for name, value in values.items()}
