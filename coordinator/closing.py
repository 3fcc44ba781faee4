"""Closes rounds: begins the arithmetic with the last contribution, and makes the change to be committed of it."""

import time
from collections.abc import Sequence
from contextlib import closing

from coordinator.aggregation import Inputs, Spool, aggregate_round, close_round, inputs_of, is_small
from coordinator.ahead import Ahead
from coordinator.commits import Change
from coordinator.layouts import Layouts
from coordinator.logs import Logs
from coordinator.recent import Recent, Update
from coordinator.records import RunState
from coordinator.state import AggregateRound, pending
from coordinator.store import Store

__all__ = ["Closer"]


class Closer:
    def __init__(self, store: Store, layouts: Layouts, logs: Logs, recent: Recent) -> None:
        self._store = store
        self._layouts = layouts
        self._logs = logs
        self._recent = recent
        self.ahead = Ahead(self._spool)

    async def change(self, state: RunState, job: AggregateRound) -> Change:
        """What closes a frozen round.

        Raises:
            LostContributionError: a contribution is not in the store.
        """
        started, inputs = time.perf_counter(), _inputs(state, job)
        spool = await self.ahead.take(job.region, inputs) or await self._spool(state, inputs)
        return await self._change(state, job, spool, started)

    async def at_once(self, before: RunState, after: RunState, taken: Sequence[Change]) -> list[Change]:
        """What closes rounds that are small and about to be frozen by the changes that are taken: one commit does both,
        and contributions that come with it need not be stored.
        """
        changes = []
        for job in pending(after):
            if not isinstance(job, AggregateRound) or not _is_carried(job, before, after, taken):
                continue
            started, inputs = time.perf_counter(), _inputs(after, job)
            if self.ahead.has(job.region, inputs) and is_small(inputs, await self._layouts.of(after)):
                spool = await self.ahead.take(job.region, inputs)
                if spool is not None:
                    changes.append(await self._change(after, job, spool, started))
        return changes

    async def _spool(self, state: RunState, inputs: Inputs) -> Spool:
        return await aggregate_round(inputs, await self._layouts.of(state), self._store, self._recent)

    async def _change(self, state: RunState, job: AggregateRound, spool: Spool, started: float) -> Change:
        """`started`: when the arithmetic began to be waited for, by `time.perf_counter`."""
        with closing(spool):
            made = await close_round(state, job.region, spool, self._logs)
        aggregated = time.perf_counter()

        def keep(after: RunState) -> None:
            if made.first and after.regions[job.region].head == made.position:
                ready = time.perf_counter()
                timing = {"aggregate": (aggregated - started) * 1e3, "close": (ready - aggregated) * 1e3}
                update = Update(made.first, made.digests[0], timing, ready)
                self._recent.updates.put((state.id, job.region, job.step, 0), update, len(made.first))

        return Change(made.event, {(job.region, made.position.seq): made.digests}, made.payloads, keep)


def _inputs(state: RunState, job: AggregateRound) -> Inputs:
    round_ = state.regions[job.region].round
    assert round_ is not None
    return inputs_of(state, job.region, job.step, round_.contributions)


def _is_carried(job: AggregateRound, before: RunState, after: RunState, taken: Sequence[Change]) -> bool:
    """Whether the round's contributions are nowhere but in these changes, unless the state before refers to them."""
    sent, known = [_parts_sent(state, job.region) for state in (after, before)]
    return sent <= known.union(*(change.payloads for change in taken))


def _parts_sent(state: RunState, region: str) -> set[str]:
    round_ = state.regions[region].round
    return set() if round_ is None else {part for sent in round_.contributions.values() for part in sent.parts}
