"""All ranks read the same of a blob that rank 0 has fetched to a file, of which nothing is left."""

import hashlib
from pathlib import Path
from queue import Queue

import pytest

from api.client import CoordinatorClient
from api.errors import IsthmusError, NotFoundError
from site_agent.fetched import fetched

DATA = bytes(range(256)) * 9
DIGEST = hashlib.sha256(DATA).hexdigest()
RANGES = [(0, 7), (2000, 2304), (7, 7), (3, 2001)]


class Ranks:
    """Two in one thread: rank 0 is ahead."""

    def __init__(self) -> None:
        self.sent: Queue[bytes] = Queue()

    def first(self, data: bytes | None) -> bytes:
        assert data is not None
        self.sent.put(data)
        return data

    def second(self, data: bytes | None) -> bytes:
        assert data is None
        return self.sent.get_nowait()


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> CoordinatorClient:
    client = CoordinatorClient("http://127.0.0.1:9")
    monkeypatch.setattr(client, "read_blob", lambda _: iter((DATA[:1000], DATA[1000:])))
    return client


def test_ranges_at_every_rank(client: CoordinatorClient, tmp_path: Path):
    ranks = Ranks()
    with fetched(client, ranks.first, tmp_path, DIGEST) as blob:
        assert [blob.read(*place) for place in RANGES] == [DATA[start:stop] for start, stop in RANGES]
        assert blob.whole() == DATA
    with fetched(None, ranks.second, tmp_path, DIGEST) as blob:
        assert [blob.read(*place) for place in RANGES] == [DATA[start:stop] for start, stop in RANGES]
        assert blob.whole() == DATA
    assert ranks.sent.empty()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(client: CoordinatorClient):
    folder = Path("/dev/null")
    with pytest.raises(IsthmusError, match=f"cannot write blob {DIGEST} to /dev/null: .*make room"):
        fetched(client, Ranks().first, folder, DIGEST).__enter__()


def test_what_the_coordinator_says_goes_on(client: CoordinatorClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(_: str) -> None:
        raise NotFoundError("blob_not_found", "no such blob")

    monkeypatch.setattr(client, "read_blob", refuse)
    with pytest.raises(NotFoundError), fetched(client, Ranks().first, tmp_path, DIGEST):
        pass
