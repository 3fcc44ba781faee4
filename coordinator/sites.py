"""Sites: registration, leases and heartbeats. What a site should run follows from the runs, at every heartbeat anew."""

import asyncio
import hmac
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timedelta

from api import message, schemas, specs
from api.errors import ConflictError, NotFoundError, UpgradeRequiredError
from api.schemas import ProcessState, RunStatus, SiteStatus
from coordinator.engine import Engine
from coordinator.events import ProcessesGone, SiteBack, SiteLost
from coordinator.records import RunState
from coordinator.settings import Settings
from coordinator.site_records import SiteRecord
from coordinator.store import Store
from coordinator.tokens import hashed
from coordinator.versions import differing, other_version

__all__ = ["Sites"]


class Sites:
    def __init__(self, store: Store, engine: Engine, settings: Settings) -> None:
        self._store = store
        self._engine = engine
        self._settings = settings
        self._heard: dict[str, datetime] = {}
        """When the lease of a site was last renewed because of its ranks."""

    # --- registration -------------------------------------------------------------------------------------------------

    async def register(self, name: str, registration: schemas.SiteRegistration) -> schemas.Registered:
        """Takes a site in; again with the same secret, it only updates what the site says of itself (C9).

        An agent registers when it starts: it has no ranks then, whatever it had before.
        """
        if registration.protocol_version not in message.SUPPORTED_PROTOCOLS:
            raise UpgradeRequiredError(
                "protocol_version",
                f"site {name} speaks protocol {registration.protocol_version}, this coordinator "
                f"{list(message.SUPPORTED_PROTOCOLS)}: install the same isthmus release at both",
            )
        known = await self._store.sites.find(name)
        secret_hash = hashed(registration.secret)
        if known is not None and not hmac.compare_digest(known.secret_hash, secret_hash):
            raise ConflictError(
                "name_taken",
                f"another agent has registered as {name!r}: choose another name, keep that agent's data directory, or "
                f"remove the site first (`isthmus site remove {name}`)",
            )
        now = await self._store.now()
        record = SiteRecord(
            name=name,
            region=registration.region,
            tasks=registration.tasks,
            ranks=registration.ranks,
            secret_hash=secret_hash,
            registered_at=known.registered_at if known else now,
            versions=registration.versions,
        )
        await self._store.tokens.claim(secret_hash, {"scope": "site", "site": name})
        await self._store.sites.save(record)
        until = await self._renew(name, now)
        for state in await self._active(name):
            await self._engine.apply(state.id, SiteBack(name, ranks=False))
        return schemas.Registered(
            site=_view(record, until, now), lease_s=self._settings.lease_s, heartbeat_s=self._settings.heartbeat_s
        )

    async def _renew(self, name: str, now: datetime) -> datetime:
        until = now + timedelta(seconds=self._settings.lease_s)
        await self._store.sites.renew_lease(name, until)
        return until

    async def all(self) -> list[schemas.Site]:
        now, leases = await self._store.now(), await self._store.sites.leases()
        return [_view(record, leases.get(record.name), now) for record in await self._store.sites.all()]

    async def get(self, name: str) -> schemas.Site:
        record = await self._record(name)
        return _view(record, (await self._store.sites.leases()).get(name), await self._store.now())

    async def _record(self, name: str) -> SiteRecord:
        record = await self._store.sites.find(name)
        if record is None:
            raise NotFoundError("site_not_found", f"there is no site {name!r}; `isthmus site list` shows the sites")
        return record

    async def remove(self, name: str) -> None:
        record = await self._record(name)
        runs = [state.id for state in await self._active(name) if not state.members[name].excluded]
        if runs:
            raise ConflictError("site_in_use", f"site {name} is a member of {', '.join(runs)}; stop that first")
        await self._store.sites.remove(record, await self._seats(name))
        self._store.tokens.forget()

    async def _seats(self, name: str) -> list[str]:
        """Hashes of the tokens of the site's ranks in all runs: those of runs that have ended are good for a while."""
        seats = []
        for run in await self._store.runs():
            with suppress(NotFoundError):  # deleted meanwhile
                member = (await self._store.load(run)).state.members.get(name)
                if member is not None and member.seat is not None:
                    seats.append(member.seat)
        return seats

    async def leave(self, name: str) -> None:
        """The agent is going: its runs go on without it."""
        record = await self._record(name)
        await self._store.sites.save(record.model_copy(update={"left": True}))
        await self._store.sites.end_lease(name)
        for state in await self._active(name):
            await self._engine.apply(state.id, SiteLost(name, "its agent was stopped"))

    # --- heartbeats ---------------------------------------------------------------------------------------------------

    async def heartbeat(self, name: str, heartbeat: schemas.Heartbeat, wait: float) -> schemas.HeartbeatReply:
        """Renews the lease, takes in what became of the processes, and answers what should run.

        Waits while that is what runs already.
        """
        record = await self._record(name)
        versions = record.versions if heartbeat.versions is None else heartbeat.versions
        if record.left or versions != record.versions:
            await self._store.sites.save(record.model_copy(update={"left": False, "versions": versions}))
        await self._renew(name, await self._store.now())
        await self._take_in(name, heartbeat)
        wanted = (process for process in heartbeat.processes if process.state is not ProcessState.STOPPING)
        known = {(process.run, process.attempt) for process in wanted}
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait
        while True:
            assignments = [_assignment(state, name) for state in await self._active(name) if name in state.assigned]
            remaining = deadline - loop.time()
            differs = {(assignment.run, assignment.attempt) for assignment in assignments} != known
            if differs or remaining <= 0 or self._engine.closing:
                return schemas.HeartbeatReply(assignments=assignments, lease_s=self._settings.lease_s)
            await self._engine.wait_for_assignments(remaining)

    async def _take_in(self, name: str, heartbeat: schemas.Heartbeat) -> None:
        for state in await self._active(name):
            member = state.members[name]
            own = [process for process in heartbeat.processes if process.run == state.id]
            if member.away:
                there = any(process.attempt == member.attempt for process in own)
                await self._engine.apply(state.id, SiteBack(name, there))
            ended = [process for process in own if process.state is ProcessState.EXITED]
            if state.status is RunStatus.STOPPING and len(ended) == len(own):
                await self._engine.apply(state.id, ProcessesGone(name, member.attempt))
                continue
            for process in ended:
                gone = ProcessesGone(name, process.attempt, process.exit_code, process.rank, process.detail)
                await self._engine.apply(state.id, gone)

    async def heard(self, name: str) -> None:
        """The site's ranks have sent something: it is there, whatever its agent does.

        A lease of which hardly anything is gone is left alone.
        """
        now = await self._store.now()
        last = self._heard.get(name)
        if last is not None and now - last < timedelta(seconds=self._settings.lease_s / 20):
            return
        await self._store.sites.renew_lease(name, now + timedelta(seconds=self._settings.lease_s), if_there=True)
        self._heard[name] = now

    async def _active(self, name: str) -> list[RunState]:
        return [state for state in await self._store.active() if name in state.members]

    async def expire(self, now: datetime) -> None:
        """Takes note of every site whose lease is over."""
        leases = await self._store.sites.leases()
        for state in await self._store.active():
            for site, member in state.members.items():
                if member.away:
                    continue
                until = leases.get(site)
                if until is None:
                    await self._engine.apply(state.id, SiteLost(site, "its agent was stopped"))
                elif until < now:
                    because = f"no heartbeat for more than {self._settings.lease_s:g} s"
                    await self._engine.apply(state.id, SiteLost(site, because))

    # --- choosing sites for a run -------------------------------------------------------------------------------------

    async def choose(self, spec: specs.RunSpec) -> dict[str, str]:
        """Region by site for a run that is about to start.

        Raises:
            ConflictError: a named site is unknown, away or unwilling; or there are too few.
        """
        there = {site.name: site for site in await self.all()}
        online = [site for site in there.values() if site.status is SiteStatus.ONLINE]
        names = spec.named_sites or [site.name for site in online if spec.task in site.tasks]
        faults = [fault for name in names if (fault := _fault(name, there.get(name), spec))]
        if not names:
            others = f"; online are {', '.join(site.name for site in online)}" if online else ""
            faults.append(f"no site that allows task {spec.task!r} is online{others}: start one with `isthmus agent`")
        places = {name: _region(name, there[name].region, spec) for name in names if name in there}
        faults += specs.faults_of_regions(_by_region(places), spec)
        if spec.same_version and not faults:
            versions = {name: there[name].versions.get(spec.task, "") for name in names}
            faults += [because] if (because := differing(versions, spec.task)) else []
        if faults:
            raise ConflictError("sites_not_ready", "the run cannot start: " + "; ".join(faults), errors=faults)
        return places

    async def region_of(self, name: str, state: RunState) -> str:
        """The region of a site that is to be added to a run.

        Raises:
            ConflictError: it is unknown, away or unwilling, or has another version of the task where one is asked for.
        """
        spec = state.spec
        site = next((site for site in await self.all() if site.name == name), None)
        fault = _fault(name, site, spec)
        if site is not None and spec.same_version:
            fault = fault or other_version(state, name, site.versions.get(spec.task, ""))
        if site is None or fault:
            raise ConflictError("sites_not_ready", f"site {name} cannot be added: {fault}")
        return _region(name, site.region, spec)


def _region(name: str, registered: str, spec: specs.RunSpec) -> str:
    """Where the spec puts the site, or else where it has registered itself."""
    return next((region for region, sites in (spec.regions or {}).items() if name in sites), registered)


def _by_region(places: Mapping[str, str]) -> dict[str, list[str]]:
    """`places`: region by site."""
    sites: dict[str, list[str]] = {}
    for name, region in sorted(places.items()):
        sites.setdefault(region, []).append(name)
    return sites


def _fault(name: str, site: schemas.Site | None, spec: specs.RunSpec) -> str:
    """Why the site cannot take part; nothing if it can."""
    if site is None:
        return f"site {name} is not registered: start its agent with `isthmus agent`"
    if site.status is SiteStatus.LEFT:
        return f"site {name} is left: its agent was stopped; start it again"
    if site.status is SiteStatus.LOST:
        silent = f"its agent is silent, its lease ran out at {site.lease_until:%Y-%m-%d %H:%M:%S} UTC"
        return f"site {name} is lost: {silent}; see there whether it runs and reaches this coordinator"
    if spec.task not in site.tasks:
        return f"site {name} does not allow task {spec.task!r}; it allows {', '.join(site.tasks)}"
    return ""


def _assignment(state: RunState, name: str) -> schemas.Assignment:
    region = state.members[name].region
    return schemas.Assignment(run=state.id, attempt=state.assigned[name], region=region, task=state.spec.task)


def _view(record: SiteRecord, until: datetime | None, now: datetime) -> schemas.Site:
    if record.left:
        status = SiteStatus.LEFT
    else:
        status = SiteStatus.ONLINE if until is not None and until >= now else SiteStatus.LOST
    return schemas.Site(
        name=record.name,
        region=record.region,
        tasks=record.tasks,
        ranks=record.ranks,
        versions=record.versions,
        status=status,
        registered_at=record.registered_at,
        lease_until=until or record.registered_at,
    )
