"""A coordinator whose Redis is full, by its budget or by its own limit: a real server, real HTTP."""

import threading

import httpx
import numpy as np
import pytest
import redis

from algorithms.layout import ParameterLayout, TensorSpec
from api.payload import decode_message
from api.schemas import Abstention, Condition, RunStatus
from api.specs import RoundsSpec
from coordinator.redis_server import EmbeddedRedis
from tests.conftest import start_coordinator, wait_until
from tests.contract.by_hand import WAIT_S, RunByHand, problem

BUDGET_MB = 8


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with EmbeddedRedis(tmp_path_factory.mktemp("full-redis")) as server:
        yield server


@pytest.fixture(scope="module")
def live(server, tmp_path_factory):
    options = ("--lease-s", "36000", "--tick-s", "0.1", "--redis-url", server.url, "--redis-budget-mb", str(BUDGET_MB))
    live = start_coordinator(tmp_path_factory.mktemp("pressed"), *options)
    yield live
    live.service.interrupt()
    live.service.join()


@pytest.fixture
def client(server):
    with redis.Redis.from_url(server.url) as client:
        yield client
        client.config_set("maxmemory", 0)
        client.delete("ballast")


def test_parts_wait_while_redis_holds_more_than_its_budget(live, client):
    run, other = RunByHand(live), RunByHand(live)
    first, second = run.sites
    assert first.send(1, first.message(1)).status_code == 202
    client.set("ballast", bytes(2 * BUDGET_MB << 20))
    probe = other.sites[0].message(1, arrays={})  # which is never taken in
    wait_until(lambda: other.sites[0].send(1, probe).status_code == 429, "a new reading", 10)
    body = second.message(1)
    answer = second.send(1, body)
    assert answer.headers["retry-after"] == "1"
    assert f"redis_budget_mb is {BUDGET_MB}" in problem(answer, 429, "redis_full")["detail"]
    assert run.view.status is RunStatus.RUNNING
    assert "waiting for 1 of 2 sites" in run.view.reason
    assert "; contributions wait: Redis holds " in run.view.reason
    assert first.send(1, first.message(1)).status_code == 202  # it is there already
    answers = []
    place = (run.id, "west", 1, second.name, 0, body, WAIT_S)
    patient = threading.Thread(target=lambda: answers.append(second.ranks.contribute(*place)))
    patient.start()
    assert run.view.step == 0
    client.delete("ballast")
    patient.join(60)
    assert "contributions wait" not in run.view.reason
    header, _ = decode_message("entry", answers[0].message)
    assert [line["site"] for line in header["contributors"]] == [first.name, second.name]


def test_a_round_that_never_fits_is_refused_with_the_remedy(live, client):
    large = ParameterLayout([TensorSpec("w", (7168, 7168), 0)], 32)
    run = RunByHand(live, begin=False)
    for site in run.sites:
        site.join(large)
    run.sites[0].upload_start(np.zeros(large.parameter_count, "<f4").tobytes())
    site = run.sites[0]
    answer = site.send(1, site.message(1, {"layout": large.digest}, arrays={}))
    assert answer.headers["retry-after"] == "10"
    detail = problem(answer, 507, "round_too_large")["detail"]
    assert f"2 sites to one round take 8 MiB, redis_budget_mb is {BUDGET_MB}: raise it" in detail
    assert run.admin.stop_run(run.id)


def test_a_redis_at_its_own_limit_is_no_internal_error(live, client):
    run = RunByHand(live)
    first, second = run.sites
    body = first.message(1)
    client.config_set("maxmemory", client.info("memory")["used_memory"] // 2)
    answers = [
        first.send(1, body),
        httpx.post(f"{run.url}/v1/sites/{first.name}/leave", headers={"Authorization": f"Bearer {first.secret}"}),
    ]
    for answer in answers:
        assert answer.headers["retry-after"] == "10"
        assert "maxmemory" in problem(answer, 507, "redis_out_of_memory")["detail"]
    assert run.view.step == 0
    assert run.view.status is RunStatus.PAUSED
    assert "takes nothing more: raise it, or delete old runs, `isthmus run resume`" in run.view.reason
    client.config_set("maxmemory", 0)
    run.admin.resume_run(run.id)
    assert first.send(1, body).status_code == 202
    assert second.send(1, second.message(1), wait=WAIT_S).status_code == 200
    assert (run.view.status, run.view.paused_because) == (RunStatus.RUNNING, "")


def test_at_its_own_limit_redis_takes_what_is_due_and_what_frees_it(live, client):
    old, run = RunByHand(live), RunByHand(live, rounds=RoundsSpec(deadline_s=0.2))
    first, second = run.sites
    old.round(1, "west")
    old.admin.stop_run(old.id)
    for site in old.sites:
        site.beat()
    client.config_set("maxmemory", client.info("memory")["used_memory"] // 2)
    first.ranks.abstain(run.id, "west", 1, first.name, Abstention(position=first.position(), reason="no data"), 0)
    wait_until(lambda: run.view.step == 1, "the end of the round at its deadline", 30)
    client.zrem("leases", second.name)
    wait_until(lambda: run.member(second).condition is Condition.AWAY, "the loss of a site", 30)
    second.beat(second.running())
    assert run.member(second).condition is Condition.ACTIVE
    wait_until(lambda: client.hkeys(f"headers:{old.id}:west") == [b"0"], "the log in segments", 30)
    old.admin.delete_run(old.id)
    assert run.admin.audit(None, 1).items[0].act == "run.delete"
    with pytest.raises(redis.exceptions.OutOfMemoryError):
        client.set("ballast", b"1")
