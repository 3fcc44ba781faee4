"""Where a run's log lies, on a real Redis server and in a real directory: what is read does not depend on it."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from api.errors import GoneError, NotFoundError, ProblemError
from api.payload import digest_json, encode_message
from api.schemas import Position, Resume, RunStatus
from api.specs import InForce, OptimizerSpec, RunSpec
from coordinator import logs as module
from coordinator.blob_directory import BlobDirectory
from coordinator.kept_blobs import KeptBlobs
from coordinator.logs import Logs
from coordinator.packing import Packer
from coordinator.records import Region, RunState
from coordinator.redis_server import EmbeddedRedis
from coordinator.settings import Settings
from coordinator.store import Store
from coordinator.transitions import Transition, with_, with_region
from tests.blob_stores import make_due

NOW = datetime(2026, 1, 1, tzinfo=UTC)
EMPTY = RunState(
    id="run",
    spec=RunSpec(name="run", task="task", steps=5),
    created_at=NOW,
    since=NOW,
    status=RunStatus.RUNNING,
    regions={"west": Region(name="west")},
)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with EmbeddedRedis(Path(tmp_path_factory.mktemp("logs"))) as server:
        yield server.url


class Scene:
    """A run with a log, on an empty server and in an empty directory."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.store = Store(url)
        self.blobs = BlobDirectory(folder)
        self.kept = KeptBlobs(self.blobs, self.store)
        self.logs = Logs(self.store, self.kept)
        self.length = self.step = 0

    def packer(self, **settings: Any) -> Packer:
        return Packer(self.store, self.kept, Settings(**settings))

    async def tidy(self, **settings: Any) -> None:
        await self.packer(**settings).tidy(await self.state())

    async def state(self) -> RunState:
        return (await self.store.load("run")).state

    def redis(self) -> redis.Redis:
        return redis.Redis.from_url(self.url)

    def keys(self, pattern: str) -> set[str]:
        with self.redis() as client:
            return {key.decode() for key in client.keys(pattern)}

    def files(self) -> list[Path]:
        return [path for path in self.blobs.root.rglob("*") if path.is_file()]

    async def commit(self, change: Callable[[RunState], Transition], messages: Any = None) -> None:
        before = await self.store.load("run")
        assert await self.store.commit(before, change(before.state), messages)

    async def append(self, kind: str, *sizes: int) -> list[bytes]:
        """Appends an entry with a message of each size in bytes of arrays; returns the messages."""
        self.step += kind == "step"
        header = {"kind": kind, "seq": self.length, "step": self.step, "parts": [str(size) for size in sizes]}
        self.length += 1
        messages = [
            encode_message("entry", header, {"x": np.full(size, part, np.uint8)}) for part, size in enumerate(sizes)
        ]
        digests = [await self.logs.keep("run", message) for message in messages]
        head = Position(seq=header["seq"], hash=digest_json(header))
        await self.commit(
            lambda state: Transition(with_region(state, "west", head=head), (("west", header),)),
            {("west", header["seq"]): digests} if digests else None,
        )
        return messages

    async def append_all(self) -> None:
        """Entry 0, and nine steps, one of them empty, with an outer step of two fragments after every third."""
        await self.append("start")
        for number in range(1, 10):
            await self.append("step", *([] if number == 5 else [100 * number, 0]))
            if number % 3 == 0:
                await self.append("anchor")
                await self.append("anchor")

    async def resume_at(self, seq: int) -> Resume:
        position, in_force = Position(seq=seq, hash="a" * 64), InForce(lr=1, k=32, every=3)
        resume = Resume(position=position, step=6, outer_round=2, in_force=in_force, anchors=["b" * 64])
        await self.commit(lambda state: Transition(with_region(state, "west", resume=resume)))
        return resume

    async def answers(self) -> list[Any]:
        """Everything that can be read, by a process that remembers nothing."""
        logs, length = Logs(self.store, self.kept), self.length
        pages = [
            await logs.headers("run", "west", start, stop)
            for start in range(length + 2)
            for stop in range(start + 1, length + 3)
        ]
        messages = [
            await attempt(logs.message("run", "west", seq, part)) for seq in range(length + 1) for part in range(3)
        ]
        steps = [await attempt(logs.seq_of_step("run", "west", step)) for step in range(1, self.step + 2)]
        return [pages, messages, steps]


async def attempt(reading: Awaitable[Any]) -> Any:
    try:
        return await reading
    except ProblemError as error:
        return error.code, error.detail


@pytest.fixture
def use(url: str, tmp_path: Path) -> Callable[[Callable[[Scene], Awaitable[Any]]], Any]:
    """Runs a coroutine with a run that has no entries yet."""
    with redis.Redis.from_url(url) as client:
        client.flushall()

    async def run(body: Callable[[Scene], Awaitable[Any]]) -> Any:
        scene = Scene(url, tmp_path)
        await scene.store.create_run(EMPTY)
        try:
            return await body(scene)
        finally:
            await scene.store.close()

    return lambda body: asyncio.run(run(body))


# --- messages ---------------------------------------------------------------------------------------------------------


def test_small_messages_are_in_redis_and_large_ones_in_the_directory(use, monkeypatch):
    monkeypatch.setattr(module, "IN_REDIS", 1000)

    async def body(scene: Scene) -> None:
        messages = await scene.append("step", 10, 2000)
        assert len(scene.keys("payload:run:*")) == 1
        (file,) = scene.files()
        assert file.read_bytes() == messages[1]
        other = Logs(scene.store, scene.kept)  # remembers nothing
        assert [await other.message("run", "west", 0, part) for part in (0, 1)] == messages
        with pytest.raises(NotFoundError, match="part 2: entry 0 has 2, numbered from 0"):
            await other.message("run", "west", 0, 2)
        with pytest.raises(NotFoundError, match="no entry 1 yet"):
            await other.message("run", "west", 1, 0)
        file.unlink()
        with pytest.raises(ProblemError, match="entry 0 of region west in run run cannot be read: its part 1"):
            await Logs(scene.store, scene.kept).message("run", "west", 0, 1)

    use(body)


def test_a_message_is_read_once_for_all_who_ask_for_it_at_once(use, monkeypatch):
    async def body(scene: Scene) -> None:
        (message,) = await scene.append("step", 1000)
        monkeypatch.setattr(module, "_KEPT_BYTES", len(message) - 1)
        logs, before = Logs(scene.store, scene.kept), reads(scene)
        asked = [asyncio.create_task(logs.message("run", "west", 0, 0)) for _ in range(16)]
        await asyncio.sleep(0)
        asked.pop(0).cancel()  # who asked first has gone away
        answers = await asyncio.gather(*asked)
        assert answers == [message] * 15
        assert all(answer is answers[0] for answer in answers)
        assert reads(scene) == before + 1
        await logs.message("run", "west", 0, 0)  # too large to be kept
        assert reads(scene) == before + 2
        monkeypatch.undo()
        logs = Logs(scene.store, scene.kept)
        assert await logs.message("run", "west", 0, 0) is await logs.message("run", "west", 0, 0)
        assert reads(scene) == before + 3

    def reads(scene: Scene) -> int:
        with scene.redis() as client:
            return client.info("commandstats").get("cmdstat_get", {"calls": 0})["calls"]

    use(body)


def test_what_one_has_not_found_another_looks_for_again(use, monkeypatch):
    async def body(scene: Scene) -> None:
        logs, looked = scene.logs, list[str]()
        header = logs.header

        async def appended_meanwhile(*place: Any) -> Any:
            """The first one looks too early."""
            looked.append("")
            if len(looked) == 1:
                found = await attempt(header(*place))
                await scene.append("step", 10)
                raise NotFoundError(*found)
            return await header(*place)

        monkeypatch.setattr(logs, "header", appended_meanwhile)
        early, late = await asyncio.gather(*(attempt(logs.message("run", "west", 0, 0)) for _ in range(2)))
        assert early[0] == "entry_not_found"
        assert isinstance(late, bytes)
        assert len(looked) == 2

    use(body)


def test_an_entry_without_arrays_is_its_header(use):
    async def body(scene: Scene) -> None:
        await scene.append("step")
        header = {"kind": "step", "seq": 0, "step": 1, "parts": []}
        assert await scene.logs.message("run", "west", 0, 0) == encode_message("entry", header, {})
        with pytest.raises(NotFoundError, match="part 1: entry 0 has 1"):
            await scene.logs.message("run", "west", 0, 1)

    use(body)


def test_a_message_expires_until_a_commit_refers_to_it(use):
    async def body(scene: Scene) -> None:
        await scene.logs.keep("run", b"of a lost race")
        (orphan,) = scene.keys("payload:run:*")
        await scene.append("step", 10)
        (kept,) = scene.keys("payload:run:*") - {orphan}
        with scene.redis() as client:
            assert client.ttl(orphan) > 0
            assert client.ttl(kept) == -1

    use(body)


# --- segments ---------------------------------------------------------------------------------------------------------


def test_packing_changes_no_answer(use, monkeypatch):
    monkeypatch.setattr(module, "IN_REDIS", 600)

    async def body(scene: Scene) -> None:
        await scene.append_all()
        before = await scene.answers()
        await scene.tidy(log_recent=7)
        with scene.redis() as client:
            assert sorted(map(int, client.hkeys("headers:run:west"))) == [0, *range(9, 16)]
            assert sorted(map(int, client.hkeys("steps:run:west"))) == [7, 8, 9]
            listed = [json.loads(line) for line in client.hvals("messages:run:west")]
            assert len(listed) == 3
            assert scene.keys("payload:run:*") < {f"payload:run:{digest}" for parts in listed for digest in parts}
        assert await scene.answers() == before
        await scene.tidy(log_recent=2)
        await scene.tidy(log_recent=2)
        assert await scene.answers() == before
        for seq in range(9):
            assert (await scene.store.log.segment_at("run", "west", seq) is None) == (seq == 0)

    use(body)


def test_so_much_stays_in_redis(use):
    async def body(scene: Scene) -> None:
        packer = scene.packer(log_recent=4)
        left = []
        await scene.append("start")
        for _ in range(20):
            await scene.append("step", 5)
            await packer.tidy(await scene.state())
            with scene.redis() as client:
                left.append(client.hlen("headers:run:west") - 1)
        assert left[:9] == [1, 2, 3, 4, 5, 6, 7, 8, 4]
        assert min(left[8:]) == 4
        assert max(left) == 8

    use(body)


def test_megabytes_go_before_entries(use):
    async def body(scene: Scene) -> None:
        await scene.append("start")
        sizes = [len((await scene.append("step", 1000))[0]) for _ in range(10)]
        await scene.tidy(log_recent=100, log_recent_mb=sum(sizes) / 1e6)
        assert await scene.store.log.packed("run", "west") == 1
        await scene.append("step", 1)
        await scene.tidy(log_recent=100, log_recent_mb=sum(sizes) / 1e6)
        assert await scene.store.log.packed("run", "west") == 7

    use(body)


def test_of_two_that_pack_at_once_one_wins(use, url):
    async def body(scene: Scene) -> None:
        await scene.append_all()
        before = await scene.answers()
        other = Scene(url, scene.blobs.root)
        state = await scene.state()
        await asyncio.gather(*(one.packer(log_recent=3).tidy(state) for one in (scene, other, scene, other)))
        assert await scene.answers() == before
        with scene.redis() as client:
            segments = client.zcard("segments:run:west")
            assert segments == 1
            lost = client.zrange("garbage", 0, -1)
            assert len(scene.files()) == segments + len(lost)
            await scene.kept.remove_unreferred()
            assert len(scene.files()) == segments + len(lost)  # not yet: it might still be registered
            make_due(client)
        await scene.kept.remove_unreferred()
        assert len(scene.files()) == segments
        assert scene.keys("garbage") == set()
        assert await scene.answers() == before
        await other.store.close()

    use(body)


def test_of_a_run_that_has_ended_everything_is_packed(use):
    async def body(scene: Scene) -> None:
        await scene.append_all()
        before = await scene.answers()
        await scene.commit(lambda state: Transition(with_(state, status=RunStatus.STOPPED)))
        packer = scene.packer()
        packer.start([])
        await packer._task
        assert await scene.answers() == before
        assert scene.keys("payload:*") == scene.keys("ended") == set()
        with scene.redis() as client:
            assert client.hkeys("headers:run:west") == [b"0"]

    use(body)


def test_an_ended_run_is_packed_whole_even_if_another_process_packs_a_part_of_it_first(use, monkeypatch):
    async def body(scene: Scene) -> None:
        await scene.append_all()
        before, going_on = await scene.answers(), await scene.state()
        await scene.commit(lambda state: Transition(with_(state, status=RunStatus.STOPPED)))
        packer, register = scene.packer(), scene.store.log.register

        async def overtaken(*segment: Any) -> bool:
            monkeypatch.setattr(scene.store.log, "register", register)
            await scene.packer(log_recent=3).tidy(going_on)
            return await register(*segment)

        monkeypatch.setattr(scene.store.log, "register", overtaken)
        for _ in range(2):
            packer.start([])
            await packer._task
        assert scene.keys("ended") == set()
        with scene.redis() as client:
            assert client.hkeys("headers:run:west") == [b"0"]
        assert await scene.answers() == before

    use(body)


def test_a_damaged_segment_is_named(use):
    async def body(scene: Scene) -> None:
        await scene.append_all()
        await scene.tidy(log_recent=3)
        (file,) = scene.files()
        file.write_bytes(file.read_bytes()[:100])
        with pytest.raises(ProblemError, match=rf"entries 1 to 12 of region west .*{file.name}") as caught:
            await Logs(scene.store, scene.kept).message("run", "west", 2, 0)
        assert (caught.value.code, caught.value.status) == ("log_damaged", 500)

    use(body)


# --- trimming ---------------------------------------------------------------------------------------------------------


async def packed_in_fours(scene: Scene) -> None:
    await scene.append("start")
    packer = scene.packer(log_recent=3)
    for number in range(1, 17):
        await scene.append("step" if number % 4 else "anchor", 5)
        await packer.tidy(await scene.state())


def test_a_trimmed_log(use):
    async def body(scene: Scene) -> None:
        await packed_in_fours(scene)
        resume = await scene.resume_at(7)
        await scene.tidy(log_recent=3, log_keep=1)
        oldest = await scene.store.log.oldest_segment("run", "west")
        assert oldest.first == 5
        logs = Logs(scene.store, scene.kept)
        assert [header["seq"] for header in await logs.headers("run", "west", 0, 50)] == [0]
        assert [header["seq"] for header in await logs.headers("run", "west", 5, 50)] == [*range(5, 17)]
        for reading in (
            logs.headers("run", "west", 1, 50),
            logs.message("run", "west", 4, 0),
            logs.seq_of_step("run", "west", 1),
        ):
            with pytest.raises(GoneError, match="behind step 6, at entry 7") as caught:
                await reading
            assert caught.value.code == "log_trimmed"
            assert Resume.model_validate(caught.value.context["resume"]) == resume
        assert await logs.message("run", "west", 5, 0) == encode_message(
            "entry", await logs.header("run", "west", 5), {"x": np.zeros(5, np.uint8)}
        )
        files = len(scene.files())
        with scene.redis() as client:
            assert client.zcard("garbage") == 1
            make_due(client)
        await scene.kept.remove_unreferred()
        assert len(scene.files()) == files - 1

    use(body)


@pytest.mark.parametrize(
    ("keep", "resume", "first"), [(1, 16, 13), (10, 16, 5), (100, 16, 1), (1, 7, 5), (1, None, 1), (None, 16, 1)]
)
def test_what_is_trimmed(use, keep, resume, first):
    """Segments are 1-4, 5-8 and 9-12 here: of those that may go every one goes."""

    async def body(scene: Scene) -> None:
        await packed_in_fours(scene)
        if resume is not None:
            await scene.resume_at(resume)
        await scene.tidy(log_recent=3, log_keep=keep)
        assert [header["seq"] for header in await scene.logs.headers("run", "west", first, 50)] == [*range(first, 17)]
        if first > 1:
            with pytest.raises(GoneError):
                await scene.logs.headers("run", "west", first - 1, 50)

    use(body)


def test_a_log_that_cannot_be_entered_later_is_not_trimmed(use):
    async def body(scene: Scene) -> None:
        spec = EMPTY.spec.model_copy(update={"optimizer": OptimizerSpec(base_update="adam")})
        await scene.commit(lambda state: Transition(with_(state, spec=spec)))
        await packed_in_fours(scene)
        await scene.resume_at(16)
        assert (await scene.state()).entrance("west") is None
        await scene.tidy(log_recent=3, log_keep=1)
        assert len(await scene.logs.headers("run", "west", 1, 50)) == 16

    use(body)


def test_whoever_reads_a_segment_while_it_goes_is_told(use):
    async def body(scene: Scene) -> None:
        await packed_in_fours(scene)
        await scene.resume_at(16)
        segment = await scene.store.log.segment_at("run", "west", 2)
        await scene.logs.message("run", "west", 1, 0)
        await scene.blobs.remove(segment.blob)
        with pytest.raises(ProblemError, match="restore it from a backup"):
            await scene.logs.message("run", "west", 2, 0)
        await scene.store.log.drop("run", "west", segment, NOW)
        with pytest.raises(GoneError, match="was trimmed"):
            await scene.logs._from_segment("run", "west", 2, 0) or await scene.logs.message("run", "west", 2, 0)

    use(body)


def test_a_deleted_run_leaves_nothing(use, monkeypatch):
    monkeypatch.setattr(module, "IN_REDIS", 600)

    async def body(scene: Scene) -> None:
        await scene.append_all()
        await scene.tidy(log_recent=3)
        await scene.append("step", 900, 1)
        await scene.resume_at(2)
        await scene.commit(lambda state: Transition(with_(state, status=RunStatus.STOPPED)))
        assert await scene.store.delete_run(await scene.store.load("run"))
        assert scene.keys("*") == {"blobs", "garbage"}
        await scene.kept.remove_unreferred()
        assert scene.files() == []
        assert scene.keys("*") == set()

    use(body)
