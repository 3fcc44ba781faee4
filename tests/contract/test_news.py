"""Two coordinator services in one process and a real Redis between them: who waits at one hears of the other."""

import asyncio
import secrets

import numpy as np
import pytest
import redis.asyncio

from api.schemas import JoinRequest, Seat, StartUpload
from api.specs import RunSpec
from coordinator import engine
from coordinator.blob_directory import BlobDirectory
from coordinator.redis_server import EmbeddedRedis
from coordinator.service import CoordinatorService
from coordinator.settings import Settings
from coordinator.store import Store
from tests.blob_stores import store_bytes
from tests.contract.by_hand import LAYOUT, OPTIMIZER, TASK, registration

PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as server:
        yield server


async def seat_site(service, blobs):
    """A run of one site that has joined, and what makes entry 0."""
    site = f"n-{secrets.token_hex(4)}"
    await service.register_site(site, registration())
    run = await service.create_run(RunSpec(name="news", task=TASK, steps=1, sites=[site], optimizer=OPTIMIZER), None)
    await service.start_run(run.id)
    await service.take_seat(run.id, site, Seat(attempt=1, secret=secrets.token_urlsafe(32)))
    await service.join(run.id, site, JoinRequest(attempt=1, layout=LAYOUT.to_json()))
    parameters = store_bytes(blobs, np.zeros(LAYOUT.parameter_count, "<f4").tobytes())
    return run.id, site, StartUpload(parameters=parameters)


async def entry_heard_of(server, folder, *, listening):
    """What a service that waits for entry 0 has, once another service has committed it."""
    stores, blobs = [Store(server.url), Store(server.url)], BlobDirectory(folder)
    here, there = (CoordinatorService(store, blobs, Settings(lease_s=36_000)) for store in stores)
    hearing = asyncio.create_task(here.keep_listening()) if listening else None
    try:
        if listening:
            await until_subscribed(server)
        run, site, start = await seat_site(there, blobs)
        page = asyncio.create_task(here.log(run, "west", 0, None, PATIENCE_S))
        for _ in range(10):  # answered after it has looked in vain
            await there.ready()
        await there.upload_start(run, site, 1, start)
        async with asyncio.timeout(PATIENCE_S / 2):
            return (await page).items
    finally:
        if hearing is not None:
            hearing.cancel()
        for store in stores:
            await store.close()


async def until_subscribed(server):
    async with redis.asyncio.Redis.from_url(server.url) as client, asyncio.timeout(PATIENCE_S):
        while not dict(await client.pubsub_numsub("isthmus:commits"))[b"isthmus:commits"]:
            await asyncio.sleep(0.01)


def test_a_commit_elsewhere_wakes_who_waits(server, tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "RECHECK_S", 3600.0)
    (entry,) = asyncio.run(entry_heard_of(server, tmp_path, listening=True))
    assert entry["kind"] == "start"


def test_a_wake_up_that_is_lost_costs_a_second(server, tmp_path):
    (entry,) = asyncio.run(entry_heard_of(server, tmp_path, listening=False))
    assert entry["kind"] == "start"
