"""Uploads and downloads of blobs against a real coordinator, over connections that break after so many bytes."""

import hashlib
import io
import secrets
import subprocess
import sys
from functools import partial

import httpx
import pytest

from api import transfers
from api.client import CoordinatorClient, UnreachableError
from api.content_digest import FIELD, content_digest
from api.errors import InvalidError, IsthmusError, NotFoundError
from api.transfers import OtherBytesError, Source
from tests.contract.by_hand import RunByHand, problem

SIZE = 1_000_003


@pytest.fixture(scope="module")
def run(patient):
    return RunByHand(patient)


@pytest.fixture
def data():
    return secrets.token_bytes(SIZE)


def name_of(data):
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def ask(run, data):
    """One request about a blob, as the ranks of the first site unless told otherwise."""

    def ask(method, *, site=0, digest=None, **options):
        headers = {"Authorization": f"Bearer {run.sites[site].seat}", **options.pop("headers", {})}
        return httpx.request(method, f"{run.url}/v1/blobs/{digest or name_of(data)}", headers=headers, **options)

    return ask


@pytest.fixture
def append(ask, data):
    def append(offset, content, *, length=SIZE, headers=None, **options):
        place = {"Upload-Offset": str(offset), "Upload-Length": str(length), **(headers or {})}
        return ask("PATCH", content=content, headers=place, **options)

    return append


# --- ranges -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "start", "stop"),
    [("0-0", 0, 1), ("5-104", 5, 105), ("999990-", 999_990, SIZE), ("-3", SIZE - 3, SIZE), ("7-9999999", 7, SIZE)],
)
def test_a_range(run, ask, data, field, start, stop):
    run.sites[0].ranks.put_blob(data)
    answer = ask("GET", headers={"Range": f"bytes={field}"})
    assert (answer.status_code, answer.content) == (206, data[start:stop])
    assert answer.headers["content-range"] == f"bytes {start}-{stop - 1}/{SIZE}"
    assert answer.headers["content-length"] == str(stop - start)
    etag = answer.headers["etag"]
    assert ask("GET", headers={"Range": f"bytes={field}", "If-Range": etag}).status_code == 206
    assert ask("GET", headers={"Range": f"bytes={field}", "If-Range": '"other"'}).content == data


def test_what_is_no_range_is_everything(run, ask, data):
    run.sites[0].ranks.put_blob(data)
    for field in ("bytes=-", "bytes=0-1,5-6", "lines=0-1", "bytes=9-3", "nonsense"):
        answer = ask("GET", headers={"Range": field})
        assert (answer.status_code, answer.content) == (200, data), field
    head = ask("HEAD")
    assert (head.headers["accept-ranges"], head.headers["content-length"]) == ("bytes", str(SIZE))


@pytest.mark.parametrize("field", [f"{SIZE}-", f"{SIZE}-{SIZE + 5}", "-0"])
def test_a_range_of_which_nothing_is_there(run, ask, data, field):
    run.sites[0].ranks.put_blob(data)
    answer = ask("GET", headers={"Range": f"bytes={field}"})
    problem(answer, 416, "range_not_satisfiable")
    assert answer.headers["content-range"] == f"bytes */{SIZE}"


# --- uploads ----------------------------------------------------------------------------------------------------------


def test_an_upload_in_pieces(ask, append, data):
    assert "upload-offset" not in ask("HEAD").headers
    first = append(0, data[:400_000])
    assert (first.status_code, first.headers["upload-offset"]) == (202, "400000")
    head = ask("HEAD")
    assert (head.status_code, head.headers["upload-offset"]) == (404, "400000")
    assert "upload-offset" not in ask("HEAD", site=1).headers  # another one's
    for offset in (0, 400_001):
        assert problem(append(offset, data[400_000:]), 409, "wrong_offset")["context"] == {"offset": 400_000}
    last = append(400_000, data[400_000:])
    assert (last.status_code, last.headers["upload-offset"]) == (201, str(SIZE))
    assert ask("GET").content == data
    assert append(0, data[:10]).status_code == 201


def test_a_piece_that_was_changed_on_its_way_leaves_nothing(ask, append, data):
    append(0, data[:400_000])
    wrong = {FIELD: content_digest(data[400_000:])}
    problem(append(400_000, data[400_001:] + b"x", headers=wrong), 422, "digest_mismatch")
    assert ask("HEAD").headers["upload-offset"] == "400000"
    assert append(400_000, data[400_000:]).status_code == 201


def test_an_upload_of_another_blob_begins_again(ask, append, data):
    append(0, data[:400_000])
    wrong = problem(append(400_000, bytes(SIZE - 400_000)), 422, "digest_mismatch")
    assert wrong["context"]["digest"] == name_of(data)
    assert ask("HEAD").headers.get("upload-offset") is None
    problem(append(0, data, length=SIZE - 1), 422, "upload_too_long")


def test_a_place_that_makes_no_sense(append):
    for offset, length in ((-1, SIZE), (0, 0), ("x", SIZE)):
        problem(append(offset, b"x", length=length), 422, "invalid_request")


# --- links that break -------------------------------------------------------------------------------------------------


class Breaking(httpx.BaseTransport):
    """A real connection that breaks after so many bytes of body, up and down."""

    def __init__(self, most):
        self.most = most
        self.real = httpx.HTTPTransport()
        self.requests = []

    def handle_request(self, request):
        self.requests.append(request.method)
        request.stream = Cut(request.stream, self.most, httpx.WriteError)
        answer = self.real.handle_request(request)
        answer.stream = Cut(answer.stream, self.most, httpx.ReadError)
        return answer


class Cut(httpx.SyncByteStream):
    def __init__(self, stream, most, error):
        self.stream, self.most, self.error = stream, most, error

    def __iter__(self):
        left = self.most
        for block in self.stream:
            yield block[:left]
            left -= len(block)
            if left < 0:
                raise self.error("the link broke")

    def close(self):
        self.stream.close()


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(transfers, "BLOCK", 10_000)
    monkeypatch.setattr(transfers, "WHOLE", 50_000)
    monkeypatch.setattr(transfers, "CHUNK", 300_000)


@pytest.fixture
def over(run):
    def over(transport, patience=20.0):
        return CoordinatorClient(run.url, run.sites[0].seat, transport=transport, patience=patience)

    return over


def test_a_link_that_breaks_again_and_again(over, small, data, tmp_path):
    link = Breaking(120_000)
    path = tmp_path / "up"
    path.write_bytes(data)
    with over(link) as client:
        assert client.put_blob(path) == name_of(data)
        assert 9 <= link.requests.count("PATCH") < 20
        assert client.get_blob(name_of(data)) == data
        with (tmp_path / "down").open("wb") as file:
            client.copy_blob(name_of(data), file)
        assert link.requests.count("GET") == 2 * 9
    assert (tmp_path / "down").read_bytes() == data


def test_another_process_goes_on_with_an_upload(append, over, small, data):
    append(0, data[:900_000])
    link = Breaking(SIZE)
    with over(link) as client:
        begun = []
        client.put_blob(Source(SIZE, lambda start: begun.append(start) or iter([data[start:]])))
    assert begun == [0, 900_000]
    assert link.requests == ["HEAD", "PATCH"]


def test_a_source_that_changes_meanwhile(over, small, data):
    reads = iter([data] + [bytes(SIZE)] * 100)
    with over(None, patience=0.1) as client, pytest.raises(InvalidError, match="have changed where they come from"):
        client.put_blob(Source(SIZE, lambda start: iter([next(reads)[start:]])))


def test_a_source_that_ends_too_early(over, small, data):
    with over(None) as client, pytest.raises(IsthmusError, match="could be read"):
        client.put_blob(Source(SIZE + 1, lambda start: iter([data[start:]])))


def test_a_coordinator_that_is_gone(run, data, tmp_path):
    with CoordinatorClient("http://127.0.0.1:9", "token", patience=0.1) as client:
        for use in (partial(client.put_blob, data), partial(client.get_blob, name_of(data))):
            with pytest.raises(UnreachableError):
                use()


def test_a_blob_that_is_gone(over):
    with over(None) as client, pytest.raises(NotFoundError, match=r"not stored at the coordinator any more.*backup"):
        client.get_blob("1" * 64)


class Flipping(Breaking):
    """Changes a byte of the first so many answers with a body."""

    def __init__(self, times):
        super().__init__(10 * SIZE)
        self.times = times

    def handle_request(self, request):
        answer = super().handle_request(request)
        if request.method == "GET" and self.times:
            self.times -= 1
            body = bytearray(answer.read())
            body[7] ^= 1
            answer = httpx.Response(answer.status_code, headers=answer.headers, content=bytes(body))
        return answer


def test_bytes_that_are_changed_on_their_way_are_asked_for_again(over, data):
    with over(Flipping(2)) as client:
        client.put_blob(data)
        assert client.get_blob(name_of(data)) == data
    with (
        over(Flipping(100)) as client,
        pytest.raises(OtherBytesError, match=r"is damaged at the coordinator: 4 times.*backup"),
    ):
        client.copy_blob(name_of(data), io.BytesIO())


MEMORY = """
import resource, sys
from pathlib import Path
from api.client import CoordinatorClient

url, token, folder = sys.argv[1:]
client = CoordinatorClient(url, token)

def peak(mebibytes, name="blob"):
    up = Path(folder) / name
    with up.open("wb") as file:
        for number in range(mebibytes):
            file.write(folder.encode() + bytes([number]) * (1 << 20))
    with (Path(folder) / "down").open("wb") as down:
        client.copy_blob(client.put_blob(up), down)
    assert up.stat().st_size == (Path(folder) / "down").stat().st_size
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

first = peak(1)
print(peak(64) - first)
"""


def test_memory_does_not_grow_with_the_blob(run, tmp_path):
    arguments = [sys.executable, "-c", MEMORY, run.url, run.sites[0].seat, str(tmp_path)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert float(done.stdout) < 48
