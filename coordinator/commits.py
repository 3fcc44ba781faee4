"""Applies events to runs by compare-and-set. No leader: any number of processes may do so.

An event is applied to the newest state that this process has seen. If that is not the newest of all, the commit fails,
or what was refused is looked at again. Answers of sites that arrive while a commit is under way go into the next one
together: a round of many sites takes few commits, and none of them loses a race to another one of this process.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

import structlog

from api.errors import ProblemError
from coordinator.events import Answer, Event
from coordinator.records import RunState
from coordinator.state import transition
from coordinator.store import Store, Versioned
from coordinator.transitions import Transition

__all__ = ["Change", "Commits", "Messages", "Payloads"]

log = structlog.get_logger()

Messages = Mapping[tuple[str, int], Sequence[str]]
Payloads = Mapping[str, bytes]


@dataclass(frozen=True)
class Change:
    """An event, and what is to be committed with it.

    Attributes:
        messages: digests of the messages of an entry that the event appends, by its region and seq.
        payloads: by digest, what is to be stored because the new state refers to it, if it does.
        committed: told the new state, before whoever waits for it.
    """

    event: Event
    messages: Messages = field(default_factory=dict)
    payloads: Payloads = field(default_factory=dict)
    committed: Callable[[RunState], None] | None = None


@dataclass(frozen=True, eq=False)
class _Asked:
    change: Change
    answer: "asyncio.Future[RunState]"


class Commits:
    """Args:
    committed: is told the states before and after, once whoever has asked has been answered.
    following: of a state before and the one after some changes, further ones that are to be committed with them.
    """

    def __init__(
        self,
        store: Store,
        committed: Callable[[RunState, RunState], None],
        following: Callable[[RunState, RunState, Sequence[Change]], Awaitable[Sequence[Change]]],
    ) -> None:
        self._store = store
        self._committed = committed
        self._following = following
        self._asked: dict[str, deque[_Asked]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def apply(self, run: str, change: Change) -> RunState:
        """The state after the event, committed.

        Raises:
            ProblemError: the event is refused.
        """
        asked = _Asked(change, asyncio.get_running_loop().create_future())
        self._asked.setdefault(run, deque()).append(asked)
        if run not in self._tasks:  # a task of its own, which lives on if whoever asks is cancelled
            self._tasks[run] = asyncio.create_task(self._work(run))
        return await asked.answer

    async def _work(self, run: str) -> None:
        queue = self._asked[run]
        try:
            while queue:
                together = _together(queue)
                try:
                    await self._commit(run, together)
                except Exception as error:
                    if all(asked.answer.done() for asked in together):
                        log.error("what follows from a commit failed, to be tried again", run=run, exc_info=error)
                    for asked in together:
                        _refuse(asked, error)
        finally:
            del self._tasks[run], self._asked[run]

    async def _commit(self, run: str, together: list[_Asked]) -> None:
        before, newest = self._store.seen(run), False
        while True:
            if before is None:
                before, newest = await self._store.load(run), True
            now = await self._store.now()
            done, refusals = _applied(before.state, together, now)
            taken = [asked.change for asked in together if asked not in refusals]
            for change in await self._following(before.state, done.state, taken):
                done = done.then(transition(done.state, change.event, now))
                taken.append(change)
            changed = done.state != before.state
            if await self._stored(before, done, taken) if changed else newest:
                break
            before = None
        for change in taken:
            if change.committed is not None:
                change.committed(done.state)
        for asked in together:
            if asked in refusals:
                _refuse(asked, refusals[asked])
            elif not asked.answer.done():
                asked.answer.set_result(done.state)
        self._committed(before.state, done.state)

    async def _stored(self, before: Versioned, done: Transition, taken: list[Change]) -> bool:
        messages, payloads = dict[tuple[str, int], Sequence[str]](), dict[str, bytes]()
        for change in taken:
            messages.update(change.messages)
            payloads.update(change.payloads)
        return await self._store.commit(before, done, messages, payloads)


def _together(queue: deque[_Asked]) -> list[_Asked]:
    """The next change; if it is the answer of a site, with the answers that follow it."""
    together = [queue.popleft()]
    while queue and isinstance(together[-1].change.event, Answer) and isinstance(queue[0].change.event, Answer):
        together.append(queue.popleft())
    return together


def _applied(state: RunState, together: list[_Asked], now: datetime) -> tuple[Transition, dict[_Asked, ProblemError]]:
    """What all of them together change, and those that are refused."""
    done, refusals = Transition(state), dict[_Asked, ProblemError]()
    for asked in together:
        try:
            done = done.then(transition(done.state, asked.change.event, now))
        except ProblemError as error:
            refusals[asked] = error
    return done, refusals


def _refuse(asked: _Asked, error: Exception) -> None:
    if not asked.answer.done():
        asked.answer.set_exception(error)
