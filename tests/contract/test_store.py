"""The store on a real Redis server."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import redis

from api.schemas import StoredPoint
from api.specs import RunSpec
from coordinator.records import Member, RunState
from coordinator.redis_server import EmbeddedRedis
from coordinator.store import Store
from coordinator.tokens import token_key
from coordinator.transitions import Transition

NOW = datetime(2026, 1, 1, tzinfo=UTC)
STATE = RunState(id="run", spec=RunSpec(name="run", task="task", steps=5), created_at=NOW, since=NOW)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with EmbeddedRedis(Path(tmp_path_factory.mktemp("store"))) as server:
        yield server.url


@pytest.fixture
def use(url: str) -> Callable[[Callable[[Store], Awaitable[Any]]], Any]:
    """Runs a coroutine with a store on an empty server."""
    with redis.Redis.from_url(url) as client:
        client.flushall()

    async def run(body: Callable[[Store], Awaitable[Any]]) -> Any:
        store = Store(url)
        try:
            return await body(store)
        finally:
            await store.close()

    return lambda body: asyncio.run(run(body))


def test_a_lost_race_changes_nothing(use):
    async def body(store: Store) -> None:
        await store.create_run(STATE)
        before = await store.load("run")
        header = {"kind": "step", "seq": 0, "step": 1}
        assert await store.commit(before, Transition(STATE, (("west", header),)))
        assert not await store.commit(before, Transition(STATE, (("west", header),)))
        assert await store.log.headers("run", "west", range(10)) == {0: header}
        assert (await store.load("run")).version.startswith("1-")

    use(body)


def test_what_was_read_before_a_commit_is_not_seen_after_it(use, url, monkeypatch):
    """The answer may come later than that to the commit."""

    async def body(store: Store) -> None:
        await store.create_run(STATE)
        before = await store.load("run")
        other = Store(url)
        assert await other.commit(await other.load("run"), Transition(STATE))
        await other.close()
        answer = store._redis.hmget

        async def late(*fields: str) -> Any:
            found = await answer(*fields)
            monkeypatch.undo()
            assert await store.commit(await store.load("run"), Transition(STATE))
            return found

        monkeypatch.setattr(store._redis, "hmget", late)
        assert before.version.startswith("0")
        assert (await store.load("run")).version.startswith("1-")
        seen = store.seen("run")
        assert seen is not None
        assert seen.version.startswith("2-")

    use(body)


def test_a_payload_that_nothing_refers_to_expires_and_sending_it_again_begins_anew(use, url):
    async def body(store: Store) -> None:
        await store.put_payload("run", "digest", b"bytes")
        with redis.Redis.from_url(url) as client:
            (key,) = client.keys("payload:*")
            assert 0 < client.ttl(key) <= 3600
            client.expire(key, 5)
            await store.put_payload("run", "digest", b"bytes")
            assert client.ttl(key) > 5
            client.persist(key)
            await store.put_payload("run", "digest", b"bytes")
            assert client.ttl(key) == -1
        assert await store.payload("run", "digest") == b"bytes"

    use(body)


def test_a_long_series_is_thinned_and_a_short_one_kept(use):
    async def body(store: Store) -> list[StoredPoint]:
        for step in range(500):
            values = {"loss": float(step)} | ({"heldout_loss": 0.5} if step == 123 else {})
            await store.series.add("run", [StoredPoint(site="a", step=step, at=NOW, values=values)])
        return await store.series.all("run", 20)

    points = use(body)
    losses = [point.values["loss"] for point in points if "loss" in point.values]
    assert 10 <= len(losses) <= 20
    assert (losses[0], losses[-1]) == (0.0, 499.0)
    assert losses == sorted(losses)
    assert [point.step for point in points if "heldout_loss" in point.values] == [123]


def test_the_end_of_every_session_is_kept(use, monkeypatch):
    monkeypatch.setattr("coordinator.series.SERIES_POINTS", 40)

    async def body(store: Store) -> list[list[StoredPoint]]:
        for number in range(200):
            point = StoredPoint(
                site="a", session=f"{number // 67:x}", step=number % 67, at=NOW, values={"bytes_up": 1.0 * number}
            )
            await store.series.add("run", [point])
        return [await store.series.all("run", most) for most in (1000, 10, 2)]

    for points, most in zip(use(body), (40, 10, 2), strict=True):
        assert len(points) <= most
        ends = {point.session: max(one.step for one in points if one.session == point.session) for point in points}
        assert ends == ({"0": 66, "1": 66, "2": 65} if most > 2 else {"0": 0, "2": 65})


@pytest.mark.parametrize("steps", [range(500), [0] * 500, [0, 9] * 250], ids=["on", "still", "to and fro"])
def test_a_series_that_would_grow_for_ever_covers_the_whole_run(use, url, monkeypatch, steps):
    monkeypatch.setattr("coordinator.series.SERIES_POINTS", 40)

    async def body(store: Store) -> None:
        lengths = []
        for number, step in enumerate(steps):
            await store.series.add("run", [StoredPoint(site="a", step=step, at=NOW, values={"loss": float(number)})])
            with redis.Redis.from_url(url) as client:
                lengths.append(client.llen("metric:run:a:loss"))
                first, *_, last = map(json.loads, client.lrange("metric:run:a:loss", 0, -1)) if number else [0, 0]
            if number:
                assert (first[2], last[2]) == (0.0, float(number))
        assert max(lengths) == 40
        assert all(length == number + 1 for number, length in enumerate(lengths[:40]))
        points = await store.series.all("run", 1000)
        if steps == range(500):
            gaps = [later.step - earlier.step for earlier, later in pairwise(points)]
            assert max(gaps) == 32
            assert len(gaps) >= 500 // 32

    use(body)


@pytest.mark.parametrize(("interval_s", "gap_s", "outage"), [(0.05, 0.7, False), (0.05, 1.2, True), (1.0, 1.2, False)])
def test_a_gap_is_an_outage_if_it_is_long_beside_the_interval_and_in_itself(use, url, interval_s, gap_s, outage):
    """A busy machine that ticks every 0.05 s would otherwise shift deadlines for ever."""

    async def body(store: Store) -> float:
        await store.tick(interval_s, 15.0)
        with redis.Redis.from_url(url) as client:
            client.decrby("tick", int(gap_s * 1000))
        return (await store.tick(interval_s, 15.0))[1]

    assert (use(body) > 0) is outage


def test_leases_outlive_an_outage_of_the_coordinator(use, url):
    async def body(store: Store) -> timedelta:
        now, _ = await store.tick(1.0, 15.0)
        await store.sites.renew_lease("a", now + timedelta(seconds=2))
        with redis.Redis.from_url(url) as client:
            client.decrby("tick", 60_000)  # as if nobody had ticked for a minute
        later, outage_s = await store.tick(1.0, 15.0)
        assert 59 < outage_s < 70
        return (await store.sites.leases())["a"] - later

    assert timedelta(seconds=2) < use(body) <= timedelta(seconds=15)


# --- tokens -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scope", "again"), [("ranks", True), ("site", False)])
def test_tokens_of_ranks_are_believed_for_a_moment_and_no_others(use, url, scope, again):
    principal = {"scope": scope, "site": "paris"}

    async def body(store: Store) -> None:
        await store.tokens.claim("hash", principal)
        assert await store.tokens.principal("hash") == principal
        with redis.Redis.from_url(url) as client:
            client.delete(token_key("hash"))
        assert await store.tokens.principal("hash") == (principal if again else None)
        store.forget("run")  # as for a commit of another process
        assert await store.tokens.principal("hash") is None

    use(body)


def test_tokens_of_ranks_are_looked_up_again(use, url, monkeypatch):
    monkeypatch.setattr("coordinator.tokens._BELIEVED_S", 0.0)

    async def body(store: Store) -> None:
        await store.tokens.claim("hash", {"scope": "ranks"})
        assert await store.tokens.principal("hash") is not None
        with redis.Redis.from_url(url) as client:
            client.delete(token_key("hash"))
        assert await store.tokens.principal("hash") is None

    use(body)


def test_a_commit_that_takes_a_token_away_is_known_at_once(use):
    """As of a seat that is taken again: the ranks before are refused from then on."""

    async def body(store: Store) -> None:
        member = Member(site="paris", region="west", since=NOW, seat="hash")
        before = STATE.model_copy(update={"members": {"paris": member}})
        await store.tokens.claim("hash", {"scope": "ranks"})
        await store.create_run(before)
        found = await store.load(STATE.id)
        assert await store.tokens.principal("hash") is not None
        members = {"paris": member.model_copy(update={"seat": None})}
        assert await store.commit(found, Transition(before.model_copy(update={"members": members})))
        assert await store.tokens.principal("hash") is None

    use(body)
