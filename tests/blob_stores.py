"""Every store of blobs that there is: a directory, and a bucket of an S3-compatible server in this process."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import obstore
import redis

from coordinator.blob_bucket import BlobBucket
from coordinator.blob_directory import BlobDirectory
from coordinator.blobs import Blobs

STORES = ["directory", "bucket"]


class Bucket:
    """`variables` are what a coordinator needs to be told of the server."""

    def __init__(self, endpoint: str) -> None:
        self.variables = {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "somebody",
            "AWS_SECRET_ACCESS_KEY": "something",
        }
        httpx.put(f"{endpoint}/blobs").raise_for_status()

    def config(self) -> Any:
        return {name.removeprefix("AWS_").lower(): value for name, value in self.variables.items()}


@contextmanager
def bucket_server() -> Iterator[Bucket]:
    from moto.server import ThreadedMotoServer  # takes seconds

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield Bucket(f"http://{host}:{port}")
    finally:
        server.stop()


def open_store(kind: str, folder: Path, bucket: Bucket, **options: int) -> Blobs:
    if kind == "directory":
        return BlobDirectory(folder / "blobs", **options)
    return BlobBucket(f"s3://blobs/{folder.name}", folder / "drafts", bucket.config(), **options)


def stored(blobs: Blobs) -> set[str]:
    """Digests of all blobs."""
    if isinstance(blobs, BlobDirectory):
        return {path.name for path in blobs.root.glob("??/*")}
    assert isinstance(blobs, BlobBucket)
    return {item["path"].rpartition("/")[2] for page in obstore.list(blobs._store) for item in page}


def left(blobs: Blobs) -> list[Path]:
    """Files of drafts and uploads."""
    return [path for name in ("incoming", "uploads") for path in (blobs._drafts.root / name).iterdir()]


def make_due(client: redis.Redis) -> None:
    """Of all blobs that may have to be removed the time has come, and nobody relies on them."""
    if due := client.zrange("garbage", 0, -1):
        client.zadd("garbage", dict.fromkeys(due, 1))
    for key in client.keys("told:*"):
        client.delete(key)


def store_bytes(blobs: Blobs, data: bytes) -> str:
    """Stores `data` and returns its digest. Blocks."""
    with blobs.draft() as draft:
        draft.write(data)
        return draft.commit()
