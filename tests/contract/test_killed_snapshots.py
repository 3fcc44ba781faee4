"""Coordinators killed while a snapshot is made: real processes, a real Redis that stays, the same blob directory."""

import json

import pytest
import redis

from api.errors import NotFoundError
from api.schemas import Manifest, SnapshotUpload
from coordinator.redis_server import EmbeddedRedis
from tests.conftest import wait_until
from tests.contract.by_hand import WAIT_S, RunByHand


@pytest.fixture
def server(tmp_path):
    with EmbeddedRedis(tmp_path / "redis") as server:
        yield server


def killed(live):
    live.service.kill()
    live.service.join()


def upload(site, run, *, parameters=True, buffers=True):
    head = site.position()
    stored = site.ranks.put_blob(run.parameters.tobytes()) if parameters else "0" * 64
    more = site.ranks.put_blob(b"buffers") if buffers else "1" * 64
    return SnapshotUpload(position=head, step=1, parameters=stored, buffers=more)


def test_a_snapshot_is_made_again_after_a_kill_at_any_point(server, new_coordinator):
    options = ("--lease-s", "36000", "--tick-s", "0.1", "--redis-url", server.url)
    live = new_coordinator(*options)
    run = RunByHand(live, ("west",))
    (site,) = run.sites
    run.admin.request_snapshot(run.id)
    site.contribute(1)
    assert site.ranks.update_answer(run.id, "west", 1, 0, WAIT_S).snapshot == 1
    site.ranks.put_blob(run.parameters.tobytes())
    killed(live)  # between the uploads of the parameters and of the buffers

    live = new_coordinator(*options)
    run.move(live)
    page = run.admin.snapshots(run.id)
    assert (page.items, page.wanted) == ([], 1)
    with pytest.raises(NotFoundError, match="is not stored here"):
        site.ranks.take_snapshot(run.id, 1, site.name, upload(site, run, buffers=False))
    assert site.ranks.update_answer(run.id, "west", 1, 0, WAIT_S).snapshot == 1, "the site is asked as before"
    site.ranks.take_snapshot(run.id, 1, site.name, upload(site, run))
    (made,) = wait_until(lambda: run.admin.snapshots(run.id).items, "the snapshot")
    killed(live)

    with redis.Redis.from_url(server.url) as client:  # as if the commit that registered it had not come to pass
        (key,) = client.keys("run:*")
        state = json.loads(client.hget(key, "state"))
        (snapshot,) = state["snapshots"]
        resume, state["regions"]["west"]["resume"] = state["regions"]["west"]["resume"], None
        state["wanted"] = {"number": 1, "contents": snapshot["contents"]}
        state["snapshots"] = []
        client.hset(key, "state", json.dumps(state))
    incoming = live.directory / "blobs" / "incoming"
    (incoming / ("f" * 32)).write_bytes(b"half a manifest")

    live = new_coordinator(*options)
    run.move(live)
    assert wait_until(lambda: run.admin.snapshots(run.id).items, "the snapshot") == [made]
    manifest = Manifest.model_validate_json(run.admin.get_blob(made.manifest))
    assert (manifest.number, manifest.step) == (1, 1)
    site.beat(site.failed())
    assert site.start_again().resume.model_dump(mode="json") == resume
    assert list(incoming.iterdir()) == []
