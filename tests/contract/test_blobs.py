"""Blobs in a real directory and in a bucket of a real S3-compatible server: the same from outside."""

import asyncio
import hashlib
import os

import pytest

from api.errors import ConflictError, InvalidError, NotFoundError, TooLargeError, UnavailableError
from coordinator.blob_bucket import BlobBucket
from coordinator.blobs import BLOCK, put
from tests.blob_stores import STORES, bucket_server, left, open_store, store_bytes, stored

DATA = os.urandom(2 * BLOCK + 12345)
DIGEST = hashlib.sha256(DATA).hexdigest()
OTHER = hashlib.sha256(b"other").hexdigest()


@pytest.fixture(scope="module")
def bucket():
    with bucket_server() as bucket:
        yield bucket


@pytest.fixture(params=STORES)
def open_one(request, tmp_path, bucket):
    return lambda **options: open_store(request.param, tmp_path, bucket, **options)


@pytest.fixture
def blobs(open_one):
    return open_one()


async def body(data, size=65536):
    for start in range(0, len(data), size):
        yield data[start : start + size]


def put_now(blobs, digest, data):
    return asyncio.run(put(blobs, digest, body(data)))


def opened(blobs, digest, *place):
    async def read():
        return [block async for block in await blobs.open(digest, *place)]

    return asyncio.run(read())


@pytest.mark.parametrize("size", [0, 1, BLOCK, BLOCK + 1, len(DATA)])
def test_what_is_put_is_what_is_read(blobs, size):
    data = DATA[:size]
    digest = hashlib.sha256(data).hexdigest()
    assert not asyncio.run(blobs.has(digest))
    assert put_now(blobs, digest, data) is True
    assert asyncio.run(blobs.has(digest))
    assert asyncio.run(blobs.size(digest)) == size
    blocks = opened(blobs, digest)
    assert b"".join(blocks) == data == blobs.read(digest)
    assert all(0 < len(block) <= BLOCK for block in blocks)
    assert (stored(blobs), left(blobs)) == ({digest}, [])


def test_more_than_one_part_of_an_upload(blobs):
    data = DATA * 5
    digest = store_bytes(blobs, data)
    assert blobs.read(digest) == data
    assert b"".join(opened(blobs, digest)) == data


@pytest.mark.parametrize("place", [(0, 0), (0, 1), (5, 5), (BLOCK - 1, BLOCK + 1), (len(DATA) - 1, None), (7, None)])
def test_ranges(blobs, place):
    store_bytes(blobs, DATA)
    start, stop = place
    assert blobs.read(DIGEST, start, stop) == DATA[start:stop] == b"".join(opened(blobs, DIGEST, start, stop))


@pytest.mark.parametrize("start", [0, len(DATA) - 1, len(DATA), len(DATA) + 1])
def test_a_range_ends_with_the_blob(blobs, start):
    store_bytes(blobs, DATA)
    stop = len(DATA) + 100
    assert blobs.read(DIGEST, start, stop) == DATA[start:stop] == b"".join(opened(blobs, DIGEST, start, stop))


def test_put_again_reads_the_body_and_changes_nothing(blobs):
    assert put_now(blobs, DIGEST, DATA)
    taken = 0

    async def counted():
        nonlocal taken
        async for piece in body(DATA):
            taken += len(piece)
            yield piece

    assert asyncio.run(put(blobs, DIGEST, counted())) is False
    assert taken == len(DATA)
    assert blobs.read(DIGEST) == DATA
    assert store_bytes(blobs, DATA) == DIGEST
    assert (stored(blobs), left(blobs)) == ({DIGEST}, [])


@pytest.mark.parametrize("data", [DATA + b"x", DATA[:-1], b""])
def test_other_bytes_than_announced_leave_nothing(blobs, data):
    with pytest.raises(InvalidError) as caught:
        put_now(blobs, DIGEST, data)
    assert caught.value.code == "digest_mismatch"
    assert DIGEST in caught.value.detail
    assert hashlib.sha256(data).hexdigest() in caught.value.detail
    assert (stored(blobs), left(blobs)) == (set(), [])


def test_too_large_leaves_nothing(open_one):
    blobs = open_one(max_bytes=len(DATA) - 1)
    with pytest.raises(TooLargeError):
        put_now(blobs, DIGEST, DATA)
    with pytest.raises(TooLargeError):
        store_bytes(blobs, DATA)
    assert (stored(blobs), left(blobs)) == (set(), [])
    assert put_now(open_one(max_bytes=len(DATA)), DIGEST, DATA)


def test_what_is_removed_is_gone(blobs):
    store_bytes(blobs, DATA)
    asyncio.run(blobs.remove(DIGEST))
    asyncio.run(blobs.remove(DIGEST))
    assert stored(blobs) == set()
    assert not asyncio.run(blobs.has(DIGEST))
    assert put_now(blobs, DIGEST, DATA)


def test_many_writers_of_one_blob(blobs, open_one):
    async def main():
        return await asyncio.gather(*(put(one, DIGEST, body(DATA)) for one in [blobs, open_one()] * 3))

    assert any(asyncio.run(main()))
    assert blobs.read(DIGEST) == DATA
    assert (stored(blobs), left(blobs)) == ({DIGEST}, [])


def test_a_missing_blob_is_named_before_the_first_block(blobs):
    for use in (
        lambda: asyncio.run(blobs.open(DIGEST)),
        lambda: asyncio.run(blobs.size(DIGEST)),
        lambda: blobs.read(DIGEST),
    ):
        with pytest.raises(NotFoundError, match=DIGEST) as caught:
            use()
        assert caught.value.code == "blob_not_found"


@pytest.mark.parametrize("digest", ["", "../../etc/passwd", OTHER.upper(), OTHER + "\n", OTHER[:-1], "incoming"])
def test_only_digests_are_names(blobs, digest):
    uses = (
        lambda: asyncio.run(blobs.has(digest)),
        lambda: asyncio.run(blobs.size(digest)),
        lambda: asyncio.run(blobs.open(digest)),
        lambda: asyncio.run(blobs.remove(digest)),
        lambda: blobs.read(digest),
        lambda: blobs.upload(digest, "me"),
        lambda: put_now(blobs, digest, b""),
    )
    for use in uses:
        with pytest.raises(InvalidError) as caught:
            use()
        assert caught.value.code == "bad_digest"


def test_an_upload_goes_on_where_it_ended(blobs, open_one):
    """Also in another process, which has not seen its beginning."""
    upload = blobs.upload(DIGEST, "me")
    assert upload.size() == 0
    upload.append(0, DATA[:BLOCK])
    upload.append(BLOCK, DATA[BLOCK : 2 * BLOCK])
    assert blobs.upload(DIGEST, "another").size() == 0
    assert blobs.upload(OTHER, "me").size() == 0
    for offset in (0, BLOCK, 2 * BLOCK + 1):
        with pytest.raises(ConflictError) as caught:
            upload.append(offset, b"x")
        assert (caught.value.code, caught.value.context) == ("wrong_offset", {"offset": 2 * BLOCK})
    there = open_one().upload(DIGEST, "me")
    assert there.size() == 2 * BLOCK
    there.append(2 * BLOCK, b"wrong")
    there.cut(2 * BLOCK, 2 * BLOCK + 1)  # more has come since
    assert upload.size() == 2 * BLOCK + 5
    there.cut(2 * BLOCK, 2 * BLOCK + 5)
    upload.append(2 * BLOCK, DATA[2 * BLOCK :])
    with upload.draft() as draft:
        assert upload.draft() is None
        assert (draft.size, draft.digest) == (len(DATA), DIGEST)
        assert draft.commit() == DIGEST
    assert upload.draft() is None
    assert (stored(blobs), left(blobs)) == ({DIGEST}, [])
    assert blobs.read(DIGEST) == DATA


def test_only_uploads_of_long_ago_are_removed(blobs):
    for name in ("me", "another"):
        blobs.upload(DIGEST, name).append(0, b"half")
    old = blobs.upload(DIGEST, "me").path
    os.utime(old, (old.stat().st_mtime - 4000,) * 2)
    blobs.remove_stale_uploads()
    assert [blobs.upload(DIGEST, name).size() for name in ("me", "another")] == [0, 4]


def test_a_store_that_is_there(blobs):
    asyncio.run(blobs.check())


def test_a_bucket_that_is_not_there(tmp_path, bucket):
    blobs = BlobBucket("s3://nowhere/blobs", tmp_path, bucket.config())
    for use in (lambda: asyncio.run(blobs.check()), lambda: store_bytes(blobs, DATA)):
        with pytest.raises(UnavailableError, match=r"s3://nowhere/blobs .* does the bucket exist"):
            use()
    assert left(blobs) == []


def test_a_server_that_does_not_answer(tmp_path, bucket):
    gone = {**bucket.config(), "endpoint_url": "http://127.0.0.1:9"}
    with pytest.raises(UnavailableError, match="AWS_ENDPOINT_URL"):
        asyncio.run(BlobBucket("s3://blobs", tmp_path, gone).has(DIGEST))
