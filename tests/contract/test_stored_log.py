"""The log of a run over real HTTP while it is packed and trimmed: what sites read and what they are told."""

import hashlib
import json

import httpx
import pytest
import redis

from api.errors import GoneError
from api.schemas import MetricPoint, Resume
from api.specs import OuterSpec
from coordinator.redis_server import EmbeddedRedis
from tests.conftest import start_coordinator, wait_until
from tests.contract.by_hand import RunByHand, problem


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with EmbeddedRedis(tmp_path_factory.mktemp("stored-redis")) as server:
        yield server


@pytest.fixture(scope="module")
def trimming(server, tmp_path_factory):
    options = ("--lease-s", "36000", "--tick-s", "0.05", "--log-recent", "2", "--log-keep", "1")
    live = start_coordinator(tmp_path_factory.mktemp("stored"), "--redis-url", server.url, *options)
    yield live
    live.service.interrupt()
    live.service.join()


def outer_round(run, number):
    copy = run.parameters.tobytes()
    for site in run.sites:
        site.announce(number, 0, copy)
    wait_until(lambda: run.view.outer_rounds == number, f"outer round {number}")


def test_a_trimmed_log_is_entered_at_the_last_outer_step(trimming, server):
    run = RunByHand(trimming, steps=20, outer=OuterSpec(every=2))
    first, second = run.sites
    for step in range(1, 7):
        run.round(step, "west")
        if step == 2:
            body = second.message(3)
        if step % 2 == 0:
            outer_round(run, step // 2)
    run.round(7, "west")
    with redis.Redis.from_url(server.url) as client:
        wait_until(lambda: int(client.get(f"dropped:{run.id}:west") or 0) >= 4, "the log to be trimmed")

    def gone():
        with pytest.raises(GoneError) as caught:
            first.ranks.log(run.id, "west", 1)
        assert caught.value.code == "log_trimmed"
        return Resume.model_validate(caught.value.context["resume"])

    resume = gone()
    assert (resume.position.seq, resume.step) == (9, 6)
    assert resume.anchors == [hashlib.sha256(run.parameters.tobytes()).hexdigest()]
    assert [header["seq"] for header in first.ranks.log(run.id, "west", 0).items] == [0]
    (header,) = first.ranks.log(run.id, "west", 10).items
    assert (header["step"], header["previous"]) == (7, resume.position.hash)
    headers = {"Authorization": f"Bearer {trimming.token('observer')}"}
    region = f"{run.url}/v1/runs/{run.id}/regions/west"
    answer = httpx.get(f"{region}/steps/1/update/parts/0", headers=headers)
    assert "at entry 9" in problem(answer, 410, "log_trimmed")["detail"]
    assert httpx.get(f"{region}/steps/7/update/parts/0", headers=headers).status_code == 200
    problem(second.send(3, body), 410, "log_trimmed")
    second.beat(second.failed())
    assert second.start_again().resume == resume
    assert second.caught_up(resume.position).active


def test_a_run_that_is_deleted_takes_its_blobs_along(trimming, server):
    run = RunByHand(trimming, ("west",), steps=20)
    for step in range(1, 8):
        run.round(step, "west")
    run.sites[0].ranks.add_metrics(run.id, run.sites[0].name, [MetricPoint(step=1, values={"loss": 1.0})])
    with redis.Redis.from_url(server.url) as client:
        wait_until(lambda: client.exists(f"segments:{run.id}:west"), "a segment")
        assert any(b"metrics" in key and run.id.encode() in key for key in client.keys("*"))
        run.admin.stop_run(run.id)
        site = run.sites[0]
        site.beat(site.failed())
        wait_until(lambda: run.view.status.terminal, "the end")
        wait_until(lambda: client.hkeys(f"headers:{run.id}:west") == [b"0"], "the log in segments")
        segments = [json.loads(line) for line in client.zrange(f"segments:{run.id}:west", 0, -1)]
        files = [trimming.directory / "blobs" / segment["blob"][:2] / segment["blob"] for segment in segments]
        assert all(file.exists() for file in files)
        run.admin.delete_run(run.id)
        assert [key for key in client.keys("*") if run.id.encode() in key] == []
        wait_until(lambda: not any(file.exists() for file in files), "the segments to go")
