"""Rounds that are aggregated while their last contributions are being committed: a cache, and nothing relies on it."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from coordinator.aggregation import Inputs, LostContributionError, Spool, inputs_of
from coordinator.events import Contributed
from coordinator.records import RunState, Sent

__all__ = ["Ahead"]

_KEPT = 32
"""Rounds; what another process has closed is not told here, and gives way."""


@dataclass
class _Round:
    step: int
    sent: dict[str, Sent] = field(default_factory=dict)
    inputs: Inputs | None = None
    task: "asyncio.Task[Spool] | None" = None


class Ahead:
    """Knows of the newest round of each region the contributions that this process has validated."""

    def __init__(self, aggregate: Callable[[RunState, Inputs], Awaitable[Spool]]) -> None:
        self._aggregate = aggregate
        self._rounds: dict[tuple[str, str], _Round] = {}

    def arrived(self, state: RunState, event: Contributed) -> None:
        """A contribution that is valid; with the last one that is waited for the arithmetic begins."""
        key = (state.id, event.region)
        known = self._rounds.get(key)
        if known is None or known.step < event.step:
            self.drop(*key)
            known = self._rounds[key] = _Round(event.step)
            if len(self._rounds) > _KEPT:
                self.drop(*next(iter(self._rounds)))
        if known.step > event.step or known.task is not None:
            return
        known.sent[event.site] = event.sent
        round_ = state.regions[event.region].round
        if round_ is not None and round_.step == event.step:
            known.sent |= round_.contributions
        if known.sent.keys() == set(state.live(event.region)):
            known.inputs = inputs_of(state, event.region, event.step, known.sent)
            known.task = asyncio.create_task(self._made(state, known.inputs))

    async def take(self, region: str, inputs: Inputs) -> Spool | None:
        """What was made of exactly these; nothing if that was not begun, or could not be made."""
        known = self._rounds.get((inputs.run, region))
        if known is None or known.task is None or known.inputs != inputs:
            return None
        del self._rounds[inputs.run, region]
        try:
            return await known.task
        except LostContributionError:  # perhaps only because it was not committed yet
            return None

    def drop(self, run: str, region: str) -> None:
        """What is known of the round is of no use any more."""
        known = self._rounds.pop((run, region), None)
        if known is not None and known.task is not None:
            known.task.cancel()
            known.task.add_done_callback(_discard)

    def close(self) -> None:
        for run, region in list(self._rounds):
            self.drop(run, region)

    async def _made(self, state: RunState, inputs: Inputs) -> Spool:
        return await self._aggregate(state, inputs)


def _discard(task: "asyncio.Task[Spool]") -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().close()
