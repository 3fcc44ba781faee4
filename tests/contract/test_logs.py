"""Where a run's log lies, on a real Redis server and in a real directory: what is read does not depend on it."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

from api.errors import NotFoundError
from api.payload import encode_message
from api.schemas import RunSpec
from coordinator import logs as module
from coordinator.blobs import BlobDirectory
from coordinator.logs import Logs
from coordinator.records import Region, RunState
from coordinator.redis_server import EmbeddedRedis
from coordinator.store import Store
from coordinator.transitions import Transition

NOW = datetime(2026, 1, 1, tzinfo=UTC)
STATE = RunState(
    id="run",
    spec=RunSpec(name="run", task="task", steps=5),
    created_at=NOW,
    since=NOW,
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
        self.logs = Logs(self.store, self.blobs)

    def keys(self, pattern: str) -> set[str]:
        with redis.Redis.from_url(self.url) as client:
            return {key.decode() for key in client.keys(pattern)}

    def files(self) -> list[Path]:
        return [path for path in self.blobs.root.rglob("*") if path.is_file()]

    async def append(self, header: dict[str, Any], *sizes: int) -> list[bytes]:
        """Appends an entry with a message of each size in bytes of arrays; returns the messages."""
        messages = [
            encode_message("entry", header, {"x": np.full(size, part, np.uint8)}) for part, size in enumerate(sizes)
        ]
        digests = [await self.logs.keep("run", message) for message in messages]
        before = await self.store.load("run")
        after = Transition(before.state, (("west", header),))
        assert await self.store.commit(before, after, {header["seq"]: digests} if digests else None)
        return messages


@pytest.fixture
def use(url: str, tmp_path: Path) -> Callable[[Callable[[Scene], Awaitable[Any]]], Any]:
    """Runs a coroutine with a run that has no entries yet."""
    with redis.Redis.from_url(url) as client:
        client.flushall()

    async def run(body: Callable[[Scene], Awaitable[Any]]) -> Any:
        scene = Scene(url, tmp_path)
        await scene.store.create_run(STATE)
        try:
            return await body(scene)
        finally:
            await scene.store.close()

    return lambda body: asyncio.run(run(body))


def step(seq: int) -> dict[str, Any]:
    return {"kind": "step", "seq": seq, "step": seq}


def test_small_messages_are_in_redis_and_large_ones_in_the_directory(use, monkeypatch):
    monkeypatch.setattr(module, "IN_REDIS", 1000)

    async def body(scene: Scene) -> None:
        messages = await scene.append(step(0), 10, 2000)
        assert len(scene.keys("payload:run:*")) == 1
        (file,) = scene.files()
        assert file.read_bytes() == messages[1]
        other = Logs(scene.store, scene.blobs)  # remembers nothing
        assert [await other.message("run", "west", 0, part) for part in (0, 1)] == messages
        with pytest.raises(NotFoundError, match="part 2: entry 0 has 2, numbered from 0"):
            await other.message("run", "west", 0, 2)
        with pytest.raises(NotFoundError, match="no entry 1 yet"):
            await other.message("run", "west", 1, 0)
        file.unlink()
        with pytest.raises(NotFoundError, match=file.name):
            await Logs(scene.store, scene.blobs).message("run", "west", 0, 1)

    use(body)


def test_an_entry_without_arrays_is_its_header(use):
    async def body(scene: Scene) -> None:
        await scene.append(step(0))
        assert await scene.logs.message("run", "west", 0, 0) == encode_message("entry", step(0), {})
        with pytest.raises(NotFoundError, match="part 1: entry 0 has 1"):
            await scene.logs.message("run", "west", 0, 1)

    use(body)


def test_a_message_expires_until_a_commit_refers_to_it(use, url):
    async def body(scene: Scene) -> None:
        await scene.logs.keep("run", b"of a lost race")
        (orphan,) = scene.keys("payload:run:*")
        await scene.append(step(0), 10)
        (kept,) = scene.keys("payload:run:*") - {orphan}
        with redis.Redis.from_url(url) as client:
            assert client.ttl(orphan) > 0
            assert client.ttl(kept) == -1

    use(body)


def test_a_deleted_run_leaves_nothing(use):
    async def body(scene: Scene) -> None:
        for seq in range(3):
            await scene.append(step(seq), 10, 20)
        assert await scene.store.delete_run(await scene.store.load("run"))
        assert scene.keys("*") == set()

    use(body)
