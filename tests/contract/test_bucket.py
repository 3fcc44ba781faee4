"""Two real coordinators with one Redis, whose blobs are in one bucket of an S3-compatible server: a run to its end."""

import hashlib
import secrets
import tempfile
from pathlib import Path

import httpx
import numpy as np
import pytest
import redis
from safetensors.numpy import load_file

from api.client import CoordinatorClient
from api.errors import NotFoundError
from api.export import export_model, file_digest
from api.schemas import RunStatus
from api.specs import OuterSpec
from coordinator.blob_bucket import BlobBucket
from coordinator.redis_server import EmbeddedRedis
from tests.blob_stores import bucket_server, make_due, stored
from tests.conftest import start_coordinator, wait_until
from tests.contract.by_hand import LAYOUT, RunByHand, problem


@pytest.fixture(scope="module")
def bucket():
    with bucket_server() as bucket:
        yield bucket


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory):
    with EmbeddedRedis(tmp_path_factory.mktemp("bucket-redis")) as server:
        yield server


@pytest.fixture(scope="module")
def pair(bucket, redis_server, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in bucket.variables.items():
            patch.setenv(name, value)
        options = ["--lease-s", "36000", "--tick-s", "0.1", "--redis-url", redis_server.url, "--blob-quota-gb", "0.01"]
        folders = [tmp_path_factory.mktemp(name) for name in ("first", "second")]
        for scope in ("admin", "join", "observer"):
            token = secrets.token_hex(16)
            for folder in folders:
                (folder / f"{scope}-token").write_text(token)
        live = [start_coordinator(folder, "--blobs", "s3://blobs/some/where", *options) for folder in folders]
    yield live
    for coordinator in live:
        coordinator.service.interrupt()
        coordinator.service.join()


def objects(bucket):
    with tempfile.TemporaryDirectory() as folder:
        return stored(BlobBucket("s3://blobs/some/where", Path(folder), bucket.config()))


def test_what_one_takes_the_other_gives(pair):
    first, second = pair
    run = RunByHand(first)
    data = secrets.token_bytes(3_000_000)
    digest = run.sites[0].ranks.put_blob(data)
    with CoordinatorClient(second.url, run.sites[0].seat) as other:
        assert other.get_blob(digest) == data
        headers = {"Authorization": f"Bearer {run.sites[0].seat}", "Range": "bytes=2000000-2000009"}
        answer = httpx.get(f"{second.url}/v1/blobs/{digest}", headers=headers)
        assert (answer.status_code, answer.content) == (206, data[2_000_000:2_000_010])
    assert run.admin.ready().status == "ok"


def test_more_than_the_quota(pair):
    run = RunByHand(pair[1])
    headers = {"Authorization": f"Bearer {run.sites[0].seat}"}
    body = bytes(10_000_001)
    url = f"{run.url}/v1/blobs/{hashlib.sha256(body).hexdigest()}"
    refused = problem(httpx.put(url, content=body, headers=headers, timeout=60), 507, "blob_quota")
    assert "blob_quota_gb" in refused["detail"]
    headers |= {"Upload-Offset": "0", "Upload-Length": str(len(body))}
    problem(httpx.patch(url, content=body[:5], headers=headers), 507, "blob_quota")


def test_a_run_to_its_end(pair, bucket, redis_server, tmp_path):
    """Each site talks to another coordinator. In the end everything is gone that nobody needs any more."""
    run = RunByHand(pair[0], ("east", "west"), steps=2, outer=OuterSpec(every=1, lr=0.7, momentum=0.9))
    run.sites[1].url = pair[1].url
    random = np.random.default_rng(1)
    copies = []
    for number in (1, 2):
        for region in ("east", "west"):
            run.round(number, region)
        for site in run.sites:
            copies.append(random.standard_normal(LAYOUT.parameter_count).astype("<f4").tobytes())
            assert site.announce(number, 0, copies[-1])
        wait_until(lambda number=number: run.view.outer_rounds == number, "the outer round")
    (anchor,) = run.admin.outer_rounds(run.id)[-1].fragments
    for site in run.sites:
        site.report_final(anchor)
    assert run.view.status is RunStatus.SUCCEEDED
    path = tmp_path / "model.safetensors"
    assert export_model(run.admin, run.id, path) == file_digest(path) == anchor
    assert b"".join(load_file(path)[tensor.name].tobytes() for tensor in LAYOUT.tensors) == run.admin.get_blob(anchor)
    there = objects(bucket)
    gone = {hashlib.sha256(copy).hexdigest() for copy in copies}
    assert gone < there
    with redis.Redis.from_url(redis_server.url) as client:
        make_due(client)
        wait_until(lambda: not objects(bucket) & gone, "the copies to be removed")
        assert {anchor, run.admin.outer_rounds(run.id)[0].fragments[0]} <= objects(bucket)
        run.admin.delete_run(run.id)
        make_due(client)
        wait_until(lambda: anchor not in objects(bucket), "the anchor to be removed")
    with pytest.raises(NotFoundError):
        run.admin.get_blob(anchor)
