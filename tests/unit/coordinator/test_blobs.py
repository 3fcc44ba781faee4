"""Blobs on real files."""

import asyncio
import errno
import hashlib
import os
import subprocess
import sys
import threading

import pytest

from api.errors import InvalidError, NotFoundError, StorageFullError, TooLargeError
from coordinator.blobs import BLOCK, BlobDirectory

DATA = os.urandom(2 * BLOCK + 12345)
DIGEST = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def blobs(tmp_path):
    return BlobDirectory(tmp_path / "blobs")


async def body(data, size=65536):
    for start in range(0, len(data), size):
        yield data[start : start + size]


async def read(blobs, digest):
    return [block async for block in await blobs.open(digest)]


def put(blobs, digest, data):
    return asyncio.run(blobs.put(digest, body(data)))


def files(blobs):
    return sorted(path for path in blobs.root.rglob("*") if path.is_file())


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, len(DATA)])
def test_what_is_put_is_what_is_read(blobs, size):
    data = DATA[:size]
    digest = hashlib.sha256(data).hexdigest()
    assert not blobs.has(digest)
    assert put(blobs, digest, data) is True
    assert blobs.has(digest)
    assert blobs.size(digest) == size
    blocks = asyncio.run(read(blobs, digest))
    assert b"".join(blocks) == data
    assert all(len(block) <= BLOCK for block in blocks)
    assert files(blobs) == [blobs.root / digest[:2] / digest] == [blobs.path(digest)]


def test_put_again_reads_the_body_and_changes_nothing(blobs):
    assert put(blobs, DIGEST, DATA)
    before = blobs.path(DIGEST).stat()
    taken = 0

    async def counted():
        nonlocal taken
        async for piece in body(DATA):
            taken += len(piece)
            yield piece

    assert asyncio.run(blobs.put(DIGEST, counted())) is False
    assert taken == len(DATA)
    assert blobs.path(DIGEST).stat() == before


def test_put_bytes(blobs):
    assert blobs.put_bytes(DATA) == DIGEST
    assert blobs.put_bytes(DATA) == DIGEST
    assert b"".join(asyncio.run(read(blobs, DIGEST))) == DATA
    assert len(files(blobs)) == 1


@pytest.mark.parametrize("data", [DATA + b"x", DATA[:-1], b""])
def test_other_bytes_than_announced_leave_nothing(blobs, data):
    with pytest.raises(InvalidError) as caught:
        put(blobs, DIGEST, data)
    assert caught.value.code == "digest_mismatch"
    assert DIGEST in caught.value.detail
    assert hashlib.sha256(data).hexdigest() in caught.value.detail
    assert not blobs.has(DIGEST)
    assert files(blobs) == []


def test_too_large_leaves_nothing(tmp_path):
    blobs = BlobDirectory(tmp_path, max_bytes=len(DATA) - 1)
    with pytest.raises(TooLargeError):
        put(blobs, DIGEST, DATA)
    with pytest.raises(TooLargeError):
        blobs.put_bytes(DATA)
    assert files(blobs) == []
    assert put(BlobDirectory(tmp_path, max_bytes=len(DATA)), DIGEST, DATA)


def test_an_endless_body_is_cut_at_the_limit(tmp_path):
    blobs = BlobDirectory(tmp_path, max_bytes=2 * BLOCK)
    digest = blobs.put_bytes(b"stored")
    taken = 0

    async def endless():
        nonlocal taken
        while True:
            taken += 65536
            yield bytes(65536)

    for name in (DIGEST, digest):
        taken = 0
        with pytest.raises(TooLargeError):
            asyncio.run(blobs.put(name, endless()))
        assert taken <= 3 * BLOCK


def test_a_client_that_disconnects_leaves_nothing(blobs):
    async def broken():
        yield DATA[: 2 * BLOCK]
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        asyncio.run(blobs.put(DIGEST, broken()))
    assert files(blobs) == []


def test_a_cancelled_put_leaves_nothing(blobs):
    async def stalled():
        yield DATA[: 2 * BLOCK]
        await asyncio.sleep(3600)

    async def main():
        task = asyncio.create_task(blobs.put(DIGEST, stalled()))
        while not any(path.stat().st_size for path in files(blobs)):
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert files(blobs) == []


def test_cancelled_while_a_thread_writes(blobs, monkeypatch):
    writing, go_on = threading.Event(), threading.Event()
    real = os.fsync

    def slow(descriptor):
        writing.set()
        assert go_on.wait(10)
        real(descriptor)

    monkeypatch.setattr("coordinator.blobs.os.fsync", slow)

    async def main():
        task = asyncio.create_task(blobs.put(DIGEST, body(DATA)))
        await asyncio.to_thread(writing.wait, 10)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0.01)
        assert not task.done()  # the thread still holds the file
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert files(blobs) == [blobs.path(DIGEST)]  # complete, since the thread was past the last check
    assert blobs.path(DIGEST).read_bytes() == DATA


def test_many_writers_of_one_blob(blobs):
    async def main():
        return await asyncio.gather(*(blobs.put(DIGEST, body(DATA)) for _ in range(8)))

    assert any(asyncio.run(main()))
    assert b"".join(asyncio.run(read(blobs, DIGEST))) == DATA
    assert len(files(blobs)) == 1


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk(blobs, monkeypatch, number):
    def full(descriptor):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("coordinator.blobs.os.fsync", full)
    for store in (lambda: put(blobs, DIGEST, DATA), lambda: blobs.put_bytes(DATA)):
        with pytest.raises(StorageFullError) as caught:
            store()
        assert str(blobs.root) in caught.value.detail
    assert files(blobs) == []


def test_a_missing_blob_is_named_before_the_first_block(blobs):
    async def main():
        with pytest.raises(NotFoundError) as caught:
            await blobs.open(DIGEST)
        return caught.value

    error = asyncio.run(main())
    assert error.code == "blob_not_found"
    assert DIGEST in error.detail
    with pytest.raises(NotFoundError):
        blobs.size(DIGEST)


@pytest.mark.parametrize("digest", ["", "../../etc/passwd", DIGEST.upper(), DIGEST + "\n", DIGEST[:-1], "incoming"])
def test_only_digests_are_names(blobs, digest):
    for use in (blobs.path, blobs.has, blobs.size, lambda digest: put(blobs, digest, b"")):
        with pytest.raises(InvalidError) as caught:
            use(digest)
        assert caught.value.code == "bad_digest"


def test_drafts_of_killed_processes_are_removed_and_those_of_living_ones_kept(tmp_path):
    program = (
        "import sys, pathlib, coordinator.blobs as b\n"
        "draft = b.BlobDirectory(pathlib.Path(sys.argv[1]))._draft()\n"
        "draft.write(b'half')\n"
        "print('written', flush=True)\n"
        "sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout.readline() == "written\n"
        assert len(files(BlobDirectory(tmp_path))) == 1
        process.kill()
    assert files(BlobDirectory(tmp_path)) == []
