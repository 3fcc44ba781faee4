"""A site that has missed 1, 10 or 10,000 entries reads them over real HTTP, while the coordinator packs the log."""

import asyncio

import pytest
import redis

from api.payload import decode_message, digest_json, encode_message
from api.schemas import Position
from coordinator.log_store import appended
from coordinator.redis_server import EmbeddedRedis
from coordinator.store import Store
from coordinator.transitions import Transition, with_region
from tests.conftest import start_coordinator, wait_until
from tests.contract.by_hand import RunByHand

ENTRIES = 10_001


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """A run of two sites, the first entries by real rounds, the others written into Redis as a commit would have."""
    folder = tmp_path_factory.mktemp("long")
    with EmbeddedRedis(folder / "redis") as server:
        live = start_coordinator(folder / "coordinator", "--lease-s", "36000", "--redis-url", server.url)
        run = RunByHand(live, steps=20_000)
        header, arrays = run.round(1, "west")
        asyncio.run(write(server.url, run.id, header, arrays))
        with redis.Redis.from_url(server.url) as client:
            yield run, header["seq"] + ENTRIES - 1, client
        live.service.interrupt()
        live.service.join()


async def write(url, run, header, arrays):
    store = Store(url)
    before = await store.load(run)
    with redis.Redis.from_url(url) as client:
        pipe = client.pipeline(transaction=False)
        for _ in range(ENTRIES - 1):
            following = {"seq": header["seq"] + 1, "step": header["step"] + 1, "previous": digest_json(header)}
            header = header | following
            digest = digest_json(header)  # any name will do
            pipe.set(f"payload:{run}:{digest}", encode_message("entry", header, arrays))
            for operation in appended(run, "west", header, [digest]):
                pipe.execute_command(*operation)
        pipe.execute()
    changes = {"head": Position(seq=header["seq"], hash=digest_json(header)), "step": header["step"]}
    round_ = before.state.regions["west"].round.model_copy(update={"step": header["step"] + 1})
    assert await store.commit(before, Transition(with_region(before.state, "west", round=round_, **changes)))
    await store.close()


def read_from(site, run, position, messages):
    """Every entry after a position, each following the one before; their messages, too, if asked for."""
    client = site.ranks
    while items := client.log(run.id, "west", position.seq + 1).items:
        for header in items:
            assert (header["seq"], header["previous"]) == (position.seq + 1, position.hash)
            if messages:
                assert decode_message("entry", client.entry(run.id, "west", header["seq"]))[0] == header
            position = Position(seq=header["seq"], hash=digest_json(header))
    return position


@pytest.mark.slow
@pytest.mark.parametrize("missed", [1, 10, 10_000])
def test_catching_up(long, missed):
    run, last, _ = long
    site = run.sites[1]
    head = site.position()
    assert head.seq == last
    site.beat(site.failed())
    site.start_again()
    assert run.member(site).condition != "active"
    (header,) = site.ranks.log(run.id, "west", last - missed, last - missed + 1).items
    behind = Position(seq=header["seq"], hash=digest_json(header))
    if missed > 4:
        assert not site.caught_up(behind).active
    assert read_from(site, run, behind, messages=True) == head
    assert site.caught_up(head).active
    site.contribute(header["step"] + missed + 1)


@pytest.mark.slow
def test_what_redis_keeps_of_a_long_log(long):
    run, last, client = long
    wait_until(lambda: client.hlen(f"headers:{run.id}:west") <= 1 + 2 * 200, "the log in segments")
    assert len(list(client.scan_iter(f"payload:{run.id}:*", count=1000))) <= 2 * 200 + 2
    start = Position(seq=0, hash=digest_json(run.admin.log(run.id, "west", 0, 1).items[0]))
    assert read_from(run.sites[0], run, start, messages=False).seq == last
    step = run.admin.log(run.id, "west", 5000, 5001).items[0]["step"]
    assert run.admin.update(run.id, "west", step, 0, 0.0) == run.admin.entry(run.id, "west", 5000)
