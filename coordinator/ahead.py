"""What this process knows of rounds before it is committed: who has answered, and what the update will be.

Nothing relies on it: it saves time, and commits.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from coordinator.aggregation import Inputs, LostContributionError, Spool, inputs_of
from coordinator.events import Answer, Contributed
from coordinator.records import RunState, Sent

__all__ = ["Ahead"]

_KEPT = 32
"""Rounds; what another process has closed is not told here, and gives way."""


@dataclass
class _Round:
    step: int
    answered: set[str] = field(default_factory=set)
    complete: asyncio.Event = field(default_factory=asyncio.Event)
    sent: dict[str, Sent] = field(default_factory=dict)
    inputs: Inputs | None = None
    task: "asyncio.Task[Spool] | None" = None


class Ahead:
    """Knows of the newest round of each region the answers that this process has validated."""

    def __init__(self, aggregate: Callable[[RunState, Inputs], Awaitable[Spool]]) -> None:
        self._aggregate = aggregate
        self._rounds: dict[tuple[str, str], _Round] = {}

    def arrived(self, state: RunState, event: Answer) -> asyncio.Event | None:
        """An answer that is valid. With the last contribution that is waited for the arithmetic begins.

        What this returns is set once every live site has answered; None: the round is not the newest.
        """
        key = (state.id, event.region)
        known = self._rounds.get(key)
        if known is None or known.step < event.step:
            self.drop(*key)
            known = self._rounds[key] = _Round(event.step)
            if len(self._rounds) > _KEPT:
                self.drop(*next(iter(self._rounds)))
        if known.step > event.step:
            return None
        live, round_ = set(state.live(event.region)), state.regions[event.region].round
        before = round_ if round_ is not None and round_.step == event.step else None
        known.answered.add(event.site)
        if known.answered.union(before.answered if before else ()) >= live:
            known.complete.set()
        if isinstance(event, Contributed) and known.task is None:
            known.sent |= (before.contributions if before else {}) | {event.site: event.sent}
            if known.sent.keys() == live:
                known.inputs = inputs_of(state, event.region, event.step, known.sent)
                known.task = asyncio.create_task(self._made(state, known.inputs))
        return known.complete

    def has(self, region: str, inputs: Inputs) -> bool:
        """Whether the arithmetic of exactly these was begun, and nobody has taken it."""
        known = self._rounds.get((inputs.run, region))
        return known is not None and known.inputs == inputs

    async def take(self, region: str, inputs: Inputs) -> Spool | None:
        """What was made of exactly these; nothing if that was not begun, or could not be made."""
        if not self.has(region, inputs):
            return None
        task = self._rounds.pop((inputs.run, region)).task
        assert task is not None
        try:
            return await task
        except LostContributionError:  # perhaps only because it was not committed yet
            return None

    def drop(self, run: str, region: str) -> None:
        """What is known of the round is of no use any more."""
        known = self._rounds.pop((run, region), None)
        if known is None:
            return
        known.complete.set()
        if known.task is not None:
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
