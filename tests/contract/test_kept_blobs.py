"""Which blobs stay and which go, on a real Redis server and in a real directory, with two coordinators at once."""

import asyncio
import hashlib
from datetime import UTC, datetime

import pytest
import redis

from api.errors import NotFoundError, StorageFullError
from api.schemas import RunStatus
from api.specs import RunSpec
from coordinator.blob_directory import BlobDirectory
from coordinator.entries import anchor_header, start_header
from coordinator.kept_blobs import KeptBlobs
from coordinator.packing import Packer
from coordinator.records import FragmentRound, Layout, OuterRound, Region, RunState, Share, Start
from coordinator.redis_server import EmbeddedRedis
from coordinator.settings import Settings
from coordinator.store import Store
from coordinator.transitions import Transition, append, with_
from tests.blob_stores import make_due, store_bytes, stored

DATA = b"the bytes of a blob"
DIGEST = hashlib.sha256(DATA).hexdigest()
NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with EmbeddedRedis(tmp_path_factory.mktemp("kept")) as server:
        yield server.url


class Scene:
    """Two coordinators with one Redis and one directory, both empty."""

    def __init__(self, url, folder, blobs=BlobDirectory, **options):
        self.client = redis.Redis.from_url(url)
        self.client.flushall()
        self.stores = [Store(url), Store(url)]
        self.here, self.there = (KeptBlobs(blobs(folder), store, **options) for store in self.stores)

    async def run(self, name, **state):
        spec = RunSpec(name="run", task="task", steps=5)
        await self.stores[0].create_run(RunState(id=name, spec=spec, created_at=NOW, since=NOW, **state))

    async def change(self, name, **changes):
        before = await self.stores[0].load(name)
        assert await self.stores[0].commit(before, Transition(with_(before.state, **changes)))

    async def delete(self, name):
        assert await self.stores[0].delete_run(await self.stores[0].load(name))

    async def when_due(self):
        """What is left once the time of everything has come."""
        make_due(self.client)
        await asyncio.gather(self.here.remove_unreferred(), self.there.remove_unreferred())
        assert self.client.zrange("removing", 0, -1) == []
        there = stored(self.here.stored)
        sizes = {digest: await self.here.stored.size(digest) for digest in there}
        assert {key.decode(): int(size) for key, size in self.client.hgetall("blobs").items()} == (
            sizes | {"total": sum(sizes.values())} if sizes else {}
        )
        return there


@pytest.fixture
def use(url, tmp_path):
    """Runs a test's coroutine with a scene."""

    def run(body, **options):
        async def with_scene():
            scene = Scene(url, tmp_path / "blobs", **options)
            try:
                await body(scene)
            finally:
                for store in scene.stores:
                    await store.close()
                scene.client.close()

        asyncio.run(with_scene())

    return run


async def body_of(data):
    yield data


def test_an_upload_that_nothing_came_to_refer_to_goes(use):
    async def body(scene):
        assert await scene.here.put(DIGEST, body_of(DATA), "one")
        await scene.here.remove_unreferred()
        assert stored(scene.here.stored) == {DIGEST}  # its time has not come
        assert not await scene.there.put(DIGEST, body_of(DATA), "one")
        assert await scene.when_due() == set()
        assert scene.client.keys("*") == []

    use(body)


def test_whoever_was_told_that_it_is_there_can_rely_on_it(use):
    async def body(scene):
        await scene.here.store(DATA, "one")
        await scene.run("one", momenta=(DIGEST,))
        assert await scene.there.stays(DIGEST, "two")
        await scene.change("one", momenta=())
        scene.client.zadd("garbage", {DIGEST: 1})
        await scene.here.remove_unreferred()
        assert stored(scene.here.stored) == {DIGEST}
        assert scene.client.zrange(f"told:{DIGEST}", 0, -1) == [b"two"]
        assert scene.client.zscore("garbage", DIGEST) > 1e9
        assert await scene.when_due() == set()

    use(body)


class Slow(BlobDirectory):
    removing, go_on = asyncio.Event, asyncio.Event

    async def remove(self, digest):
        Slow.removing.set()
        await Slow.go_on.wait()
        await super().remove(digest)


def test_nobody_is_told_of_a_blob_while_it_is_being_removed(use):
    async def body(scene):
        Slow.removing, Slow.go_on = asyncio.Event(), asyncio.Event()
        await scene.here.store(DATA, "one")
        make_due(scene.client)
        removal = asyncio.create_task(scene.here.remove_unreferred())
        await Slow.removing.wait()
        told = asyncio.create_task(scene.there.stays(DIGEST, "two"))
        written = asyncio.create_task(scene.there.store(DATA, "two"))
        for _ in range(20):
            await scene.stores[1].ping()
        assert not told.done()
        assert not written.done()
        Slow.go_on.set()
        await removal
        assert await written == DIGEST
        assert await scene.there.stored.has(DIGEST)
        await told

    use(body, blobs=Slow)


def test_what_a_killed_process_was_removing_another_one_removes(use):
    async def body(scene):
        await scene.here.store(DATA, "one")
        make_due(scene.client)
        assert await scene.stores[0].garbage.claim() == [DIGEST]
        assert await scene.stores[1].garbage.claim() == []
        scene.client.zadd("removing", {DIGEST: 1})
        assert await scene.when_due() == set()

    use(body)


def test_equal_blobs_of_two_runs_go_with_the_second(use):
    async def body(scene):
        for name in ("one", "two"):
            await scene.here.store(DATA, name)
            await scene.run(name, start=Start(parameters=DIGEST))
        assert await scene.when_due() == {DIGEST}
        assert scene.client.zcard("garbage") == 0
        await scene.delete("one")
        assert await scene.when_due() == {DIGEST}
        await scene.delete("two")
        assert await scene.when_due() == set()

    use(body)


def test_what_a_state_does_not_refer_to_any_more_goes(use):
    async def body(scene):
        first, second = [await scene.here.store(name, "one") for name in (b"first", b"second")]
        await scene.run("one", status=RunStatus.RUNNING, momenta=(first, DIGEST), anchors=(DIGEST,))
        await scene.here.store(DATA, "one")
        await scene.change("one", momenta=(second, None))
        assert await scene.when_due() == {second, DIGEST}
        await scene.delete("one")
        assert await scene.when_due() == set()

    use(body)


def test_an_anchor_and_its_uploads_stay_for_as_long_as_their_entry(use):
    async def body(scene):
        names = (b"start", b"anchor", b"upload", b"layout")
        start, anchor, upload, layout = [await scene.here.store(name, "one") for name in names]
        places = Layout(digest="0" * 64, blob=layout, groups=("decay",))
        await scene.run("one", regions={"west": Region(name="west")}, layout=places, start=Start(parameters=start))
        before = await scene.stores[0].load("one")
        after = append(before.state, before.state.regions["west"], start_header(before.state, Region(name="west")))
        region = after.state.regions["west"]
        share = Share(region="west", copies=("7" * 64,), uploads=(upload,), weight=1)
        fragments = {0: FragmentRound(anchor=anchor, shares=(share,))}
        outer = {"number": 1, "step": 1, "ends": 1, "every": 1, "weights": {}, "participants": frozenset()}
        entry = anchor_header(region, OuterRound(**outer, fragments=fragments), 0)
        assert await scene.stores[0].commit(before, after.then(append(after.state, region, entry)))
        assert await scene.when_due() == {start, anchor, upload, layout}
        await scene.change("one", status=RunStatus.SUCCEEDED)
        packer = Packer(scene.stores[0], scene.here, Settings())
        await packer.tidy((await scene.stores[0].load("one")).state)
        assert scene.client.hkeys("headers:one:west") == [b"0"]
        assert await scene.there.stays(anchor, "two")  # so that it is looked at once more
        there = await scene.when_due()
        assert {start, anchor, upload, layout} < there
        assert len(there) == 5
        await scene.delete("one")
        assert await scene.when_due() == set()

    use(body)


def test_a_state_of_another_release_keeps_what_it_names(use):
    async def body(scene):
        await scene.here.store(DATA, "one")
        await scene.run("one")
        scene.client.hset("run:one", "state", f'{{"unheard of": ["{DIGEST}"]}}')
        assert await scene.when_due() == {DIGEST}

    use(body)


def test_the_quota(use):
    async def body(scene):
        size = len(DATA)
        await scene.here.store(DATA, "one")
        await scene.there.store(DATA, "two")  # counts once
        await scene.there.store(b"x" * size, "one")
        with pytest.raises(StorageFullError, match="blob_quota_gb") as caught:
            await scene.here.store(b"y", "one")
        assert (caught.value.code, caught.value.context["total"]) == ("blob_quota", 2 * size + 1)
        await scene.here.require_room(0)
        with pytest.raises(StorageFullError):
            await scene.here.require_room(1)
        assert await scene.when_due() == set()
        await scene.here.store(b"y" * 2 * size, "one")

    use(body, quota_gb=2 * len(DATA) / 1e9)


def test_what_is_to_be_referred_to_has_to_be_there(use):
    async def body(scene):
        with pytest.raises(NotFoundError, match=DIGEST):
            await scene.here.require(DIGEST, "one")
        store_bytes(scene.here.stored, DATA)
        assert await scene.here.require(DIGEST, "one") == len(DATA)

    use(body)
