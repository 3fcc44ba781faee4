"""Commits on a real Redis: answers that come together, processes that race, and a Redis that has lost something."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import redis

from api.errors import ConflictError
from coordinator.commits import Change, Commits
from coordinator.events import Aggregated, Contributed, Norm, PauseRequested
from coordinator.records import RunState, Sent
from coordinator.redis_server import EmbeddedRedis
from coordinator.store import Store
from tests.unit.coordinator.runs import Driver, digest_of

SITES = ["a", "b", "c", "d"]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with EmbeddedRedis(Path(tmp_path_factory.mktemp("commits"))) as server:
        yield server.url


@pytest.fixture
def state() -> RunState:
    driver = Driver(dict.fromkeys(SITES, "west"))
    driver.begin()
    return driver.state


class Process:
    """A store and commits of its own, as each coordinator process has."""

    def __init__(self, url: str) -> None:
        self.store = Store(url)
        self.told: list[RunState] = []
        self.commits = Commits(self.store, lambda _, after: self.told.append(after), self._following)

    async def _following(self, before: RunState, after: RunState, taken: Sequence[Change]) -> Sequence[Change]:
        return ()

    def contribute(self, state: RunState, site: str, body: bytes = b"bytes") -> Any:
        region = state.members[site].region
        head = state.regions[region].head
        assert head is not None
        digest = digest_of(site, body.hex())
        sent = Sent(digest=digest, parts=(digest,), tokens=1, norm=1.0)
        event = Contributed(site, 1, region, 1, head, sent)
        return self.commits.apply(state.id, Change(event, payloads={digest: body}))


def drive(url: str, state: RunState, count: int, body: Any) -> Any:
    """Runs `body` with so many processes on a Redis that holds nothing but the run."""
    with redis.Redis.from_url(url) as client:
        client.flushall()

    async def run() -> Any:
        processes = [Process(url) for _ in range(count)]
        await processes[0].store.create_run(state)
        try:
            return await body(*processes)
        finally:
            for process in processes:
                await process.store.close()

    return asyncio.run(run())


def number(version: str) -> int:
    return int(version.partition("-")[0])


def test_answers_that_come_together_take_few_commits_and_are_all_there(url, state):
    async def body(process: Process) -> None:
        await asyncio.gather(*(process.contribute(state, site) for site in SITES))
        found = await process.store.load(state.id)
        round_ = found.state.regions["west"].round
        assert set(round_.contributions) == set(SITES)
        assert round_.frozen
        assert number(found.version) <= 2
        for sent in round_.contributions.values():
            assert await process.store.payload(state.id, sent.digest) == b"bytes"
        assert process.told[-1] == found.state

    drive(url, state, 1, body)


def test_what_follows_is_committed_with_it_and_what_that_leaves_unneeded_is_not_stored(url, state):
    told: list[RunState] = []

    class Closing(Process):
        async def _following(self, before: RunState, after: RunState, taken: Sequence[Change]) -> Sequence[Change]:
            round_ = after.regions["west"].round
            assert round_ is not None
            assert set(taken[-1].payloads) <= {sent.digest for sent in round_.contributions.values()}
            if not round_.frozen:
                return ()
            norms = dict.fromkeys(SITES, Norm(1.0, 0))
            event = Aggregated("west", 1, (digest_of("part"),), norms)
            return [Change(event, {("west", 1): [digest_of("message")]}, {digest_of("message"): b"entry"}, told.append)]

    async def run() -> None:
        process = Closing(url)
        try:
            with redis.Redis.from_url(url) as client:
                client.flushall()
            await process.store.create_run(state)
            first = await process.contribute(state, "a")
            after = await asyncio.gather(*(process.contribute(state, site) for site in SITES[1:]))
            found = await process.store.load(state.id)
            assert number(found.version) == 2
            assert after == [found.state] * 3
            assert told == [found.state]
            assert (found.state.regions["west"].step, found.state.regions["west"].round.step) == (1, 2)
            headers = await process.store.log.headers(state.id, "west", range(2))
            assert [line["site"] for line in headers[1]["contributors"]] == SITES
            assert await process.store.payload(state.id, digest_of("message")) == b"entry"
            for sent in first.regions["west"].round.contributions.values():
                assert await process.store.payload(state.id, sent.digest) is None
            with redis.Redis.from_url(url) as client:
                assert client.keys("payload:*") == [f"payload:{state.id}:{digest_of('message')}".encode()]
        finally:
            await process.store.close()

    asyncio.run(run())


def test_regions_that_are_closed_by_one_commit_have_each_its_own_entry(url):
    """Of the same number, too."""
    driver = Driver({"a": "west", "b": "east"})
    driver.begin()

    class Closing(Process):
        async def _following(self, before: RunState, after: RunState, taken: Sequence[Change]) -> Sequence[Change]:
            changes = []
            for name, region in after.regions.items():
                assert region.round is not None
                norms = {site: Norm(1.0, 0) for site in region.round.contributions}
                event = Aggregated(name, 1, (digest_of(name),), norms)
                changes.append(Change(event, {(name, 1): [digest_of("message", name)]}))
            return changes

    async def run() -> None:
        process = Closing(url)
        try:
            with redis.Redis.from_url(url) as client:
                client.flushall()
            await process.store.create_run(driver.state)
            await asyncio.gather(*(process.contribute(driver.state, site) for site in ("a", "b")))
            assert number((await process.store.load(driver.state.id)).version) == 1
            for name in ("west", "east"):
                messages = await process.store.log.messages(driver.state.id, name, [1])
                assert messages == {1: [digest_of("message", name)]}
        finally:
            await process.store.close()

    asyncio.run(run())


def test_one_that_is_refused_does_not_touch_the_others(url, state):
    async def body(process: Process) -> None:
        answers = [process.contribute(state, "a"), process.contribute(state, "b"), process.contribute(state, "b", b"x")]
        first, second, third = await asyncio.gather(*answers, return_exceptions=True)
        assert isinstance(third, ConflictError)
        assert third.code == "other_bytes"
        assert (
            {"a", "b"}
            == set(second.regions["west"].round.contributions)
            >= set(first.regions["west"].round.contributions)
        )
        assert await process.store.payload(state.id, digest_of("b", b"x".hex())) is None

    drive(url, state, 1, body)


def test_processes_that_race_lose_nothing(url, state):
    async def body(*processes: Process) -> None:
        asked = [process.contribute(state, site) for process, site in zip(processes, SITES, strict=True)]
        await asyncio.gather(*asked)
        found = (await processes[0].store.load(state.id)).state
        assert set(found.regions["west"].round.contributions) == set(SITES)

    drive(url, state, 4, body)


def test_whoever_asks_and_is_cancelled_does_not_take_others_along(url, state):
    async def body(process: Process) -> None:
        tasks = [asyncio.create_task(process.contribute(state, site)) for site in SITES]
        await asyncio.sleep(0)
        tasks[0].cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(outcomes[0], asyncio.CancelledError)
        assert all(isinstance(outcome, RunState) for outcome in outcomes[1:])

    drive(url, state, 1, body)


def test_an_event_that_the_newest_seen_state_refuses_is_looked_at_again(url, state):
    """This process has seen the run paused; another one has resumed it meanwhile."""

    async def body(process: Process, other: Process) -> None:
        await process.commits.apply(state.id, Change(PauseRequested()))
        with redis.Redis.from_url(url) as client:
            client.hset(f"run:{state.id}", mapping={"version": "7-other", "state": state.model_dump_json()})
        after = await process.commits.apply(state.id, Change(PauseRequested()))
        assert after.status == "paused"
        found = await other.store.load(state.id)
        assert (number(found.version), found.state.status) == (8, "paused")

    drive(url, state, 2, body)


def test_a_state_that_redis_has_lost_is_not_taken_for_the_one_that_came_after(url, state):
    """Redis loses the last commit, and another process commits something else under the same number."""

    async def body(process: Process, other: Process) -> None:
        key = f"run:{state.id}"
        with redis.Redis.from_url(url) as client:
            before = client.hgetall(key)
            await process.contribute(state, "a")
            client.hset(key, mapping=before)
        await other.contribute(state, "b")
        after = await process.contribute(state, "c")
        assert set(after.regions["west"].round.contributions) == {"b", "c"}

    drive(url, state, 2, body)
