"""Contributions and updates in parts, over real HTTP to two coordinator processes that share a real Redis."""

import asyncio
import contextlib
import hashlib
import threading
import tracemalloc
from datetime import UTC, datetime

import httpx
import numpy as np
import pytest
import redis

from algorithms.aggregate import aggregate, norm
from algorithms.codec import pack_contribution, unpack_update
from algorithms.layout import ParameterLayout, TensorSpec
from algorithms.parts import cut, join_parts
from algorithms.updates import restrict
from api.message import PROTOCOL_VERSION
from api.payload import decode_message, encode_message
from api.schemas import Abstention, ContributionHeader, Position
from api.specs import OptimizerSpec, RunSpec
from coordinator import aggregation
from coordinator.aggregation import LostContributionError, aggregate_round, close_round, inputs_of
from coordinator.blob_directory import BlobDirectory
from coordinator.kept_blobs import KeptBlobs
from coordinator.logs import Logs
from coordinator.recent import Recent
from coordinator.records import Layout, Region, Round, RunState, Sent
from coordinator.redis_server import EmbeddedRedis
from coordinator.store import Store
from tests.conftest import start_coordinator
from tests.contract.by_hand import OPTIMIZER, WAIT_S, RunByHand, coefficients, problem
from tests.unit.algorithms.test_against_reference import assert_same, changed
from tests.unit.algorithms.test_traffic import spread

LARGE = ParameterLayout([TensorSpec("bias", (90,), 1), TensorSpec("w", (320, 240), 0), TensorSpec("x", (40, 3), 0)], 32)
LIMIT = 1024
RANGES = cut(LARGE, OPTIMIZER.k, OPTIMIZER.codec, OPTIMIZER.indices, LIMIT)
COUNT = len(RANGES)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with EmbeddedRedis(tmp_path_factory.mktemp("redis-of-parts")) as server:
        yield server


@pytest.fixture(scope="module")
def two(server, tmp_path_factory):
    """Two coordinators on one Redis and one directory."""
    options = ("--lease-s", "36000", "--redis-url", server.url)
    directory = tmp_path_factory.mktemp("two")
    live = [start_coordinator(directory, *options) for _ in range(2)]
    yield live
    for one in live:
        one.service.interrupt()
    for one in live:
        one.service.join()


@pytest.fixture
def run(two):
    """Of two sites; the model has many parts."""
    run = RunByHand(two[0], part_bytes=LIMIT, begin=False)
    for site in run.sites:
        site.join(LARGE)
    run.sites[0].upload_start(np.ones(LARGE.parameter_count, "<f4").tobytes())
    return run


def whole(site, step=1, seed=0, scale=0.5):
    return coefficients([seed, step, *site.name.encode()], scale, LARGE)


def bodies_of(site, step=1, seed=0, scale=0.5, **changes):
    """The parts of a contribution."""
    position = site.position()
    bodies = []
    for part, chunks in enumerate(RANGES):
        arrays = pack_contribution(restrict(whole(site, step, seed, scale), chunks), LARGE, "sign")
        header = {"layout": LARGE.digest, "part": part, "parts": COUNT} | changes
        bodies.append(site.message(step, header, arrays=arrays, position=position))
    return bodies


def send_all(site, bodies, step=1, wait=0.0):
    """The answer to the last part."""
    for part, body in enumerate(bodies[:-1]):
        answer = site.send(step, body, part=part, wait=25.0)
        assert (answer.status_code, answer.headers["isthmus-accepted"]) == (202, "true")
    return site.send(step, bodies[-1], part=len(bodies) - 1, wait=wait)


def digest_of(bodies):
    digests = ",".join(hashlib.sha256(body).hexdigest() for body in bodies)
    return hashlib.sha256(digests.encode()).hexdigest()


def keys(server, run, *kinds):
    with redis.Redis.from_url(server.url) as client:
        return [key.decode() for kind in kinds for key in client.keys(f"{kind}:{run.id}:*")]


def test_there_are_many_parts():
    assert COUNT > 5


def test_a_round_in_parts(run, server):
    first, second = run.sites
    bodies = [bodies_of(first, scale=4.0), bodies_of(second)]
    answer = send_all(first, bodies[0])
    assert answer.status_code == 202
    assert second.name in answer.text
    assert len(keys(server, run, "arrival")) == 1
    assert len(keys(server, run, "payload")) == COUNT
    update = send_all(second, bodies[1], wait=WAIT_S)
    assert update.status_code == 200
    header, _ = decode_message("entry", update.content)
    assert [(line["site"], line["digest"]) for line in header["contributors"]] == [
        (first.name, digest_of(bodies[0])),
        (second.name, digest_of(bodies[1])),
    ]
    sites = [whole(first, scale=4.0), whole(second)]
    assert [line["norm"] for line in header["contributors"]] == pytest.approx([norm(site) for site in sites], rel=1e-12)
    assert [line["halvings"] for line in header["contributors"]] == [2, 0]
    assert len(header["parts"]) == COUNT
    messages = [second.ranks.update(run.id, "west", 1, part, 0.0) for part in range(COUNT)]
    assert messages[0] == update.content
    assert messages == [run.admin.entry(run.id, "west", 1, part) for part in range(COUNT)]
    read = [decode_message("entry", message) for message in messages]
    assert all(other == header for other, _ in read)
    parts = [unpack_update(arrays, LARGE, chunks) for (_, arrays), chunks in zip(read, RANGES, strict=True)]
    assert_same(join_parts(parts, LARGE, RANGES), aggregate(sites, LARGE, [2, 0]))
    assert keys(server, run, "arrival") == []
    left = {key.rpartition(":")[2] for key in keys(server, run, "payload")}
    assert left == {hashlib.sha256(message).hexdigest() for message in messages}
    beyond = f"{run.url}/v1/runs/{run.id}/regions/west"
    token = {"Authorization": f"Bearer {first.seat}"}
    problem(httpx.get(f"{beyond}/log/1/parts/{COUNT}", headers=token), 404, "part_not_found")
    problem(httpx.get(f"{beyond}/steps/1/update/parts/{COUNT}", headers=token), 404, "part_not_found")
    assert first.send(1, bodies[0][-1], part=COUNT - 1).content == update.content  # its first answer was lost


def test_parts_come_in_any_order_to_any_process(run, two):
    first, second = run.sites
    bodies = bodies_of(first)
    early = first.send(1, bodies[-1], part=COUNT - 1, wait=25.0)
    assert (early.status_code, early.headers["isthmus-accepted"]) == (202, "false")
    assert early.text == f"parts {list(range(COUNT - 1))} of {COUNT} are missing: send all of them again"
    answers = []

    def send(part):
        site = SiteElsewhere(first, two[part % 2].url)
        answers.append(site.send(bodies[part], part).status_code)

    threads = [threading.Thread(target=send, args=(part,)) for part in range(COUNT - 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers == [202] * (COUNT - 1)
    assert run.view.reason.startswith(f"region west: step 1, waiting for 1 of 2 sites: {second.name}, since ")
    update = send_all(second, bodies_of(second), wait=WAIT_S)
    header, _ = decode_message("entry", update.content)
    assert header["contributors"][0]["digest"] == digest_of(bodies)


class SiteElsewhere:
    """A site that talks to another process."""

    def __init__(self, site, url):
        self.path = lambda part: f"{url}{site.path(1, part)}"
        self.headers = {"Authorization": f"Bearer {site.seat}", "Content-Type": "application/vnd.isthmus+safetensors"}

    def send(self, body, part):
        return httpx.put(self.path(part), content=body, headers=self.headers, timeout=60)


def test_other_bytes_and_other_headers(run):
    first, _ = run.sites
    bodies, others = bodies_of(first), bodies_of(first, seed=1)
    assert first.send(1, bodies[2], part=2).status_code == 202
    assert first.send(1, bodies[2], part=2).status_code == 202
    problem(first.send(1, others[2], part=2), 409, "other_bytes")
    problem(first.send(1, bodies_of(first, tokens=11)[1], part=1), 422, "parts_differ")
    problem(first.send(1, bodies_of(first, absent=["x"])[1], part=1), 422, "parts_differ")
    reason = run.view.reason
    assert f"waiting for 1 of 2 sites: {run.sites[1].name}" in reason  # a refusal is an answer
    assert send_all(first, bodies).status_code == 202
    assert first.send(1, bodies[0], part=0).status_code == 202
    problem(first.send(1, others[0], part=0), 409, "other_bytes")
    abstention = Abstention(position=first.position(), reason="no data")
    path = f"{run.url}/v1/runs/{run.id}/regions/west/steps/1/abstentions/{first.name}"
    token = {"Authorization": f"Bearer {first.seat}"}
    problem(httpx.put(path, json=abstention.model_dump(), headers=token), 409, "other_bytes")


def test_a_part_is_exactly_its_chunks_at_its_place(run):
    site = run.sites[1]
    bodies = bodies_of(site)
    header = {"layout": LARGE.digest, "part": 1, "parts": COUNT}
    missing = pack_contribution(restrict(whole(site), range(RANGES[1].start, RANGES[1].stop - 1)), LARGE, "sign")
    everything = pack_contribution(whole(site), LARGE, "sign")
    for arrays in ({}, missing, everything):
        problem(site.send(1, site.message(1, header, arrays=arrays), part=1), 422, "bad_contribution")
    problem(site.send(1, bodies[1], part=2), 422, "other_place")
    beyond = site.message(1, header | {"part": COUNT, "parts": COUNT + 1}, arrays=missing)
    problem(site.send(1, beyond, part=COUNT), 422, "other_parts")
    problem(site.send(1, site.message(1, header | {"parts": 1, "part": 0}, arrays=everything)), 422, "other_parts")
    problem(site.send(2, bodies_of(site, step=3)[0], part=0), 422, "other_place")
    problem(site.send(3, bodies_of(site, step=3)[0], part=0), 409, "round_not_open")


def test_new_ranks_begin_a_contribution_anew(run):
    """What lost ranks have sent of theirs is no answer, and not in the way."""
    first, second = run.sites
    for part, body in enumerate(bodies_of(first, seed=1)[:-1]):
        assert first.send(1, body, part=part).status_code == 202
    first.beat(first.failed())
    first.start_again(LARGE)
    assert first.caught_up().active
    bodies = bodies_of(first)
    assert send_all(first, bodies).status_code == 202
    update = send_all(second, bodies_of(second), wait=WAIT_S)
    header, _ = decode_message("entry", update.content)
    assert header["contributors"][0]["digest"] == digest_of(bodies)


def test_parts_that_the_store_has_lost_are_asked_for_again(run, server):
    first, second = run.sites
    bodies = bodies_of(first)
    for part in range(COUNT - 1):
        first.send(1, bodies[part], part=part)
    with redis.Redis.from_url(server.url) as client:
        (arrival,) = keys(server, run, "arrival")
        assert 3500 < client.ttl(arrival) <= 3600
        for payload in keys(server, run, "payload"):
            client.expire(payload, 5)
        first.send(1, bodies[0], part=0)  # each part keeps the others alive
        assert all(client.ttl(payload) > 3500 for payload in keys(server, run, "payload"))
        client.delete(arrival, *keys(server, run, "payload"))
    assert first.send(1, bodies[-1], part=COUNT - 1).headers["isthmus-accepted"] == "false"
    assert send_all(first, bodies).status_code == 202
    assert send_all(second, bodies_of(second), wait=WAIT_S).status_code == 200


def test_a_small_round_is_closed_by_the_commit_that_takes_in_its_last_contribution(two, server):
    """That contribution is nowhere in Redis, then; the one before, which waited for it too long, was."""
    run = RunByHand(two[0], steps=2)
    first, second = run.sites
    with redis.Redis.from_url(server.url) as client:

        def commits():
            return int(client.hget(f"run:{run.id}", "version").partition(b"-")[0])

        before = commits()
        first.contribute(1)
        assert commits() == before + 1
        assert len(keys(server, run, "payload")) == 1
        body = second.message(1)
        update = second.send(1, body, wait=WAIT_S)
        assert commits() == before + 2
        digest = hashlib.sha256(update.content).hexdigest()
        assert keys(server, run, "payload") == [f"payload:{run.id}:{digest}"]
    header, _ = decode_message("entry", update.content)
    assert [line["site"] for line in header["contributors"]] == [first.name, second.name]
    again = second.send(1, body)
    assert (again.status_code, again.content) == (200, update.content)


# --- aggregation ------------------------------------------------------------------------------------------------------


def stored_parts(name, site, update, layout, optimizer, ranges):
    """The messages of a contribution to a run that there is not."""
    for part, chunks in enumerate(ranges):
        header = ContributionHeader(
            version=PROTOCOL_VERSION,
            run=name,
            region="west",
            site=site,
            step=1,
            position=Position(seq=0, hash="0" * 64),
            layout=layout.digest,
            codec=optimizer.codec,
            indices=optimizer.indices,
            k=optimizer.k,
            tokens=1,
            part=part,
            parts=len(ranges),
            absent=[],
        )
        arrays = pack_contribution(restrict(update, chunks), layout, optimizer.codec, optimizer.indices)
        yield encode_message("contribution", header.model_dump(mode="json"), arrays)


def test_memory_grows_with_a_part_and_not_with_the_model(server, tmp_path, monkeypatch):
    """Contributions of 3 MB: aggregated as a whole, and in parts of 128 KiB, of which all but one are in a file."""
    monkeypatch.setattr(aggregation, "_IN_MEMORY", 128 << 10)
    layout = ParameterLayout([TensorSpec("w", (1600, 1600), 0)])
    optimizer = OptimizerSpec(k=2048, codec="int8")
    now = datetime(2026, 1, 1, tzinfo=UTC)
    evenly = spread(layout, optimizer.k, optimizer.codec)
    peaks, updates = [], []

    async def aggregated(part_bytes):
        store = Store(server.url)
        logs = Logs(store, KeptBlobs(BlobDirectory(tmp_path), store))
        ranges = cut(layout, optimizer.k, optimizer.codec, optimizer.indices, part_bytes)
        name = f"memory-{part_bytes}"
        sent = {}
        for site, scale in (("a", 1.0), ("b", 2.0)):
            digests = []
            for body in stored_parts(name, site, changed(evenly, scale=scale), layout, optimizer, ranges):
                digests.append(hashlib.sha256(body).hexdigest())
                await store.put_payload(name, digests[-1], body)
            sent[site] = Sent(digest=site, parts=tuple(digests), tokens=1, norm=1.0)
        state = RunState(
            id=name,
            spec=RunSpec(name="memory", task="memory", steps=2, optimizer=optimizer, part_bytes=part_bytes),
            created_at=now,
            since=now,
            regions={"west": Region(name="west", round=Round(step=1, contributions=sent, frozen=True))},
            layout=Layout(digest=layout.digest, blob="", groups=("decay",)),
        )
        inputs = inputs_of(state, "west", 1, sent)
        tracemalloc.start()
        with contextlib.closing(await aggregate_round(inputs, layout, store, Recent())) as spool:
            made = await close_round(state, "west", spool, logs)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(made.event.parts) == len(ranges) == len(made.digests)
        parts = []
        for digest, chunks in zip(made.digests, ranges, strict=True):
            stored = made.payloads.get(digest) or await store.payload(name, digest)
            body = stored or logs._blobs.stored.read(digest)
            header, arrays = decode_message("entry", body)
            assert header["parts"] == list(made.event.parts)
            parts.append(unpack_update(arrays, layout, chunks))
        updates.append(join_parts(parts, layout, ranges))
        with redis.Redis.from_url(server.url) as client:
            client.delete(f"payload:{name}:{sent['b'].parts[-1]}")
        with pytest.raises(LostContributionError, match="b"):
            await aggregate_round(inputs, layout, store, Recent())
        await store.close()

    asyncio.run(aggregated(6 << 20))
    asyncio.run(aggregated(128 << 10))
    assert_same(*updates)
    assert peaks[1] < peaks[0] / 5  # 22 and 4 MB
