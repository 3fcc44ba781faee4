"""Moves runs: applies events by compare-and-set, does pending work, wakes who waits. No leader: any number of these.

Whoever waits is woken by commits of this process and, over Redis, of others. It looks at Redis again every second, too,
so that a wake-up that is lost costs a second and nothing more.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import structlog
from redis.exceptions import RedisError

from algorithms.layout import ParameterLayout
from api.errors import ProblemError, StorageFullError
from coordinator.aggregation import LostContributionError
from coordinator.beginnings import start_drafts
from coordinator.blobs import in_thread
from coordinator.buffers import mean_buffers
from coordinator.closing import Closer
from coordinator.commits import Change, Commits, Payloads
from coordinator.events import Answer, Averaged, Event, SnapshotRegistered, StartMade, StorageFull, WorkFailed
from coordinator.kept_blobs import KeptBlobs
from coordinator.layouts import Layouts
from coordinator.logs import Logs
from coordinator.news import News, concern_agents
from coordinator.outer_events import buffer_copies
from coordinator.outer_rounds import Copies, outer_step
from coordinator.quorum import region_copies
from coordinator.recent import Recent
from coordinator.records import RunState, Start
from coordinator.snapshots import manifest
from coordinator.state import AggregateRound, AverageFragment, Job, MakeStart, WriteManifest, pending
from coordinator.store import Store, unavailable
from coordinator.waiting import reason_of

__all__ = ["Engine"]

RECHECK_S = 1.0
_TOGETHER_S = 0.05
_ALONE_AFTER_S = 60.0
"""Without news of another process there is taken to be none."""

log = structlog.get_logger()


class Engine:
    """The shell around `coordinator.state`."""

    def __init__(self, store: Store, blobs: KeptBlobs, layouts: Layouts, logs: Logs, recent: Recent) -> None:
        self._store = store
        self._blobs = blobs
        self._layouts = layouts
        self._closer = Closer(store, layouts, logs, recent)
        self._commits = Commits(store, self._committed, self._closer.at_once)
        self._waiting: dict[str, set[_Waiter]] = {}
        self._heard: float | None = None
        """When another process was last heard to commit."""
        self._assignments_changed = asyncio.Event()
        self._jobs: dict[tuple[str, Job], asyncio.Task[None]] = {}
        self._closing = False

    async def apply(self, run: str, event: Event, payloads: Payloads | None = None) -> RunState:
        """The run's state after `event`, committed with what else `Change` says; a lost race is run again."""
        return await self._commits.apply(run, Change(event, payloads=payloads or {}))

    async def gather(self, state: RunState, event: Answer, seconds: float) -> None:
        """Before the answer of a site is applied: waits a little for those of the others, to be committed with them.

        It delays no round: that waits for the last one. Where several processes serve runs, none knows which is that.
        """
        complete = self._closer.ahead.arrived(state, event)
        alone = self._heard is None or asyncio.get_running_loop().time() - self._heard > _ALONE_AFTER_S
        if complete is not None and alone:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(seconds, _TOGETHER_S)):
                    await complete.wait()

    def _committed(self, before: RunState, after: RunState) -> None:
        if after != before:
            self._wake(after, agents=concern_agents(before, after))
        if after.status is not before.status:
            reason = after.ended_because or after.paused_because
            because = {"because": reason} if reason else {}
            log.info("run", run=after.id, status=str(after.status), **because)
        for change in after.changes if after.changes != before.changes else ():
            if change not in before.changes:
                log.info("change", run=after.id, **change.model_dump(exclude_none=True))
        _log_members(before, after)
        if after.status.terminal:
            for region in after.regions:
                self._closer.ahead.drop(after.id, region)
        self.work(after)

    # --- waiting ------------------------------------------------------------------------------------------------------

    async def wait(
        self, run: str, done: Callable[[RunState], bool], seconds: float, *, just_seen: bool = False
    ) -> RunState:
        """The run's state once `done` holds, or after `seconds`.

        `just_seen`: the caller has read or written it, so that there is no need to look at Redis at first.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while True:
            waiter = _Waiter(done, loop.create_future())
            waiters = self._waiting.setdefault(run, set())
            waiters.add(waiter)
            try:
                seen, just_seen = self._store.seen(run) if just_seen else None, False
                state = (seen or await self._store.load(run)).state
                remaining = deadline - loop.time()
                if done(state) or remaining <= 0 or self._closing:
                    return state
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(remaining, RECHECK_S)):
                        if (found := await waiter.woken) is not None:
                            return found
            finally:
                waiters.discard(waiter)
                if not waiters:
                    self._waiting.pop(run, None)

    async def wait_for_assignments(self, seconds: float) -> None:
        """Until there is news for agents in some run, at most a second."""
        if not self._closing:
            await _wait_for(self._assignments_changed, min(seconds, RECHECK_S))

    async def listen(self) -> None:
        """Wakes for commits of other processes, for ever."""
        await self._store.listen(self._hear)

    def _hear(self, news: News) -> None:
        self._store.forget(news.run)
        self._heard = asyncio.get_running_loop().time()
        for waiter in self._waiting.get(news.run, ()):
            waiter.wake(None)
        if news.agents:
            self._wake_agents()

    def _wake(self, state: RunState, *, agents: bool) -> None:
        for waiter in self._waiting.get(state.id, ()):
            if waiter.done(state):
                waiter.wake(state)
        if agents:
            self._wake_agents()

    def _wake_agents(self) -> None:
        self._assignments_changed.set()
        self._assignments_changed = asyncio.Event()

    async def close(self) -> None:
        """Answers every open poll and drops unfinished work: whoever ticks next finds it again."""
        self._closing = True
        self._closer.ahead.close()
        self._assignments_changed.set()
        for waiter in (waiter for waiters in self._waiting.values() for waiter in waiters):
            waiter.wake(None)
        for task in self._jobs.values():
            task.cancel()
        await asyncio.gather(*self._jobs.values(), return_exceptions=True)

    @property
    def closing(self) -> bool:
        return self._closing

    # --- work ---------------------------------------------------------------------------------------------------------

    def work(self, state: RunState) -> None:
        """Starts what is pending and not yet being done here."""
        for job in pending(state):
            key = (state.id, job)
            if key not in self._jobs and not self._closing:
                task = asyncio.create_task(self._do(state.id, job))
                self._jobs[key] = task
                task.add_done_callback(partial(self._done, key))

    def _done(self, key: tuple[str, Job], task: asyncio.Task[None]) -> None:
        del self._jobs[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("job failed, to be tried again", run=key[0], job=str(key[1]), exc_info=error)

    async def _do(self, run: str, job: Job) -> None:
        state = (self._store.seen(run) or await self._store.load(run)).state
        if job not in pending(state):
            return
        try:
            await self._worked(state, job, await self._layouts.of(state))
        except ProblemError as error:
            if error.code in ("run_ended", "run_not_found"):  # meanwhile
                return
            if isinstance(error, StorageFullError):
                await self.apply(run, StorageFull(f"{_described(job)} failed: {error}"))
                return
            log.error("job failed", run=run, job=str(job), error=str(error))
            again = f"step {state.steps_done}: {_described(job)} failed, to be tried again: {error}"
            final = error.code == "bad_file"
            await self.apply(run, WorkFailed(str(error) if final else again, final))

    async def _worked(self, state: RunState, job: Job, layout: ParameterLayout) -> None:
        try:
            if isinstance(job, AggregateRound):
                await self._close_round(state, job)
            elif isinstance(job, MakeStart):
                await self.apply(state.id, StartMade(await self._start(state, layout)))
            elif isinstance(job, WriteManifest):
                digest = await self._blobs.store(manifest(state), state.id)
                await self.apply(state.id, SnapshotRegistered(job.number, digest))
            else:
                await self._average(state, job, layout)
        except RedisError as error:
            raise unavailable(error) from error

    async def _start(self, state: RunState, layout: ParameterLayout) -> Start:
        origin, begin = state.origin, state.spec.begin
        assert origin is not None
        assert begin is not None
        size = 0 if origin.file is None else await self._blobs.stored.size(origin.file)
        drafts = await in_thread(start_drafts, origin, layout, self._blobs.stored, size, begin.described)
        try:
            parameters, *buffers = [await self._blobs.keep(draft, state.id) for draft in drafts]
        finally:
            for draft in drafts:
                draft.discard()
        return Start(parameters=parameters, buffers=buffers[0] if buffers else origin.buffers)

    async def _close_round(self, state: RunState, job: AggregateRound) -> None:
        try:
            change = await self._closer.change(state, job)
        except LostContributionError as error:
            await self._missing(state.id, job, error.site)
            return
        await self._commits.apply(state.id, change)

    async def _missing(self, run: str, job: AggregateRound, site: str) -> None:
        """Another process has closed the round meanwhile; or else Redis has lost what it had accepted."""
        if job in pending((await self._store.load(run)).state):
            because = f"step {job.step}: the contribution of site {site} is lost; did Redis lose data?"
            await self.apply(run, WorkFailed(because, final=True))

    async def _average(self, state: RunState, job: AverageFragment, layout: ParameterLayout) -> None:
        assert state.outer is not None
        assert state.start is not None
        assert state.spec.outer is not None
        fragment = state.outer.fragments[job.fragment]
        digests = region_copies(state, fragment)
        if fragment.buffers:
            anchor = await self._mean_of_buffers(state, buffer_copies(state, fragment))
            await self.apply(state.id, Averaged(job.number, job.fragment, digests, anchor, None))
            return
        copies = Copies(
            fragment=job.fragment,
            start=state.start.parameters,
            anchor=state.anchors[job.fragment],
            momentum=state.momenta[job.fragment],
            regions=tuple(
                (tuple(fragment.upload(name, copy) or copy for copy in there), state.outer.weights[name])
                for name, there in sorted(digests.items())
            ),
        )
        made = await in_thread(outer_step, copies, layout, state.spec.outer, self._blobs.stored)
        with made.parameters, made.momentum:
            anchor, momentum = [await self._blobs.keep(draft, state.id) for draft in (made.parameters, made.momentum)]
        await self.apply(
            state.id, Averaged(job.number, job.fragment, digests, anchor, momentum, rejected=made.rejected)
        )

    async def _mean_of_buffers(self, state: RunState, copies: Sequence[tuple[str, int]]) -> str:
        """If no copy can be read, the buffers stay what they are."""
        blobs = self._blobs.stored
        if len({digest for digest, _ in copies}) == 1:
            return copies[0][0]
        sizes = {digest: await blobs.size(digest) for digest, _ in copies}
        draft = await in_thread(mean_buffers, blobs, copies, sizes)
        if draft is None:
            assert state.start is not None
            assert state.start.buffers is not None
            return state.buffers or state.start.buffers
        with draft:
            return await self._blobs.keep(draft, state.id)


@dataclass(frozen=True, eq=False)
class _Waiter:
    done: Callable[[RunState], bool]
    woken: "asyncio.Future[RunState | None]"
    """The state for which `done` holds; None: look yourself."""

    def wake(self, state: RunState | None) -> None:
        if not self.woken.done():
            self.woken.set_result(state)


def _log_members(before: RunState, after: RunState) -> None:
    for site, member in after.members.items():
        known = before.members.get(site)
        if known is not None and known.condition is not member.condition:
            reason = reason_of(member, after).partition("\n")[0]
            log.info("member", run=after.id, site=site, condition=str(member.condition), reason=reason)


def _described(job: Job) -> str:
    if isinstance(job, AggregateRound):
        return f"aggregating step {job.step} of region {job.region}"
    if isinstance(job, MakeStart):
        return "making the initial parameters"
    if isinstance(job, WriteManifest):
        return f"writing the manifest of snapshot {job.number}"
    return f"averaging fragment {job.fragment} of outer round {job.number}"


async def _wait_for(event: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
