"""What goes wrong while a blob is written to a real file: nothing is left of it."""

import asyncio
import errno
import hashlib
import os
import subprocess
import sys
import threading

import pytest

from api.errors import IsthmusError, StorageFullError, TooLargeError
from coordinator import blobs as module
from coordinator.blob_directory import BlobDirectory
from coordinator.blob_stores import blob_store
from coordinator.blobs import BLOCK
from coordinator.settings import Settings
from tests.blob_stores import store_bytes

DATA = os.urandom(2 * BLOCK + 12345)
DIGEST = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def blobs(tmp_path):
    return BlobDirectory(tmp_path / "blobs")


async def body(data, size=65536):
    for start in range(0, len(data), size):
        yield data[start : start + size]


def put(blobs, digest, data):
    return asyncio.run(module.put(blobs, digest, body(data)))


def files(blobs):
    return sorted(path for path in blobs.root.rglob("*") if path.is_file())


def test_an_endless_body_is_cut_at_the_limit(tmp_path):
    blobs = BlobDirectory(tmp_path, max_bytes=2 * BLOCK)
    digest = store_bytes(blobs, b"stored")
    taken = 0

    async def endless():
        nonlocal taken
        while True:
            taken += 65536
            yield bytes(65536)

    for name in (DIGEST, digest):
        taken = 0
        with pytest.raises(TooLargeError):
            asyncio.run(module.put(blobs, name, endless()))
        assert taken <= 3 * BLOCK


def test_a_client_that_disconnects_leaves_nothing(blobs):
    async def broken():
        yield DATA[: 2 * BLOCK]
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        asyncio.run(module.put(blobs, DIGEST, broken()))
    assert files(blobs) == []


def test_a_cancelled_put_leaves_nothing(blobs):
    async def stalled():
        yield DATA[: 2 * BLOCK]
        await asyncio.sleep(3600)

    async def main():
        task = asyncio.create_task(module.put(blobs, DIGEST, stalled()))
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

    monkeypatch.setattr("coordinator.drafts.os.fsync", slow)

    async def main():
        task = asyncio.create_task(module.put(blobs, DIGEST, body(DATA)))
        await asyncio.to_thread(writing.wait, 10)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0.01)
        assert not task.done()  # the thread still holds the file
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert files(blobs) == [blobs._path(DIGEST)]  # complete, since the thread was past the last check
    assert blobs._path(DIGEST).read_bytes() == DATA


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk(blobs, monkeypatch, number):
    def full(descriptor):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("coordinator.drafts.os.fsync", full)
    for store in (lambda: put(blobs, DIGEST, DATA), lambda: store_bytes(blobs, DATA)):
        with pytest.raises(StorageFullError) as caught:
            store()
        assert str(blobs.root) in caught.value.detail
    assert files(blobs) == []


def test_drafts_of_killed_processes_are_removed_and_those_of_living_ones_kept(tmp_path):
    program = (
        "import sys, pathlib, coordinator.blob_directory as b\n"
        "draft = b.BlobDirectory(pathlib.Path(sys.argv[1])).draft()\n"
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


def test_which_store_the_settings_name(tmp_path, monkeypatch):
    data, named = tmp_path / "data", tmp_path / "named"
    assert blob_store(Settings(data_dir=data)).root == data / "blobs"
    assert blob_store(Settings(data_dir=data, blobs=str(named))).root == named
    bucket = blob_store(Settings(data_dir=data, blobs="s3://bucket/some/where"))
    assert (bucket.url, bucket.upload(DIGEST, "me").path.parent) == ("s3://bucket/some/where", data / "blobs/uploads")
    with pytest.raises(IsthmusError, match="a directory or s3://BUCKET/PREFIX is needed"):
        blob_store(Settings(data_dir=data, blobs="gs://bucket"))
    (tmp_path / "file").touch()
    with pytest.raises(IsthmusError, match=r"cannot keep blobs in .*: Not a directory"):
        blob_store(Settings(data_dir=data, blobs=str(tmp_path / "file" / "blobs")))
    monkeypatch.setitem(sys.modules, "coordinator.blob_bucket", None)
    with pytest.raises(IsthmusError, match="pip install"):
        blob_store(Settings(data_dir=data, blobs="s3://bucket"))
