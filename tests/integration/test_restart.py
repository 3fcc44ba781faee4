"""Coordinators that are killed, stopped and started again: real processes, real Redis, the same data directory."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from datetime import datetime, timedelta
from urllib.parse import urlsplit

import httpx
import pytest
import redis

from algorithms.aggregate import aggregate
from algorithms.codec import digest_arrays, pack_update, unpack_contribution
from api.client import CoordinatorClient
from api.errors import ProblemError
from api.payload import decode_message
from api.schemas import RunStatus
from api.specs import RoundsSpec
from coordinator.redis_server import EmbeddedRedis
from coordinator.store import Store
from tests.conftest import ROOT, wait_until
from tests.contract.by_hand import LAYOUT, OPTIMIZER, WAIT_S, RunByHand

PATIENT = ("--lease-s", "36000")
POLLS = 50
EXIT_S = 5.0


def pid_of(live, name):
    path = live.directory / "redis" / f"{name}.pid"
    return int(wait_until(path.read_text, f"{path} to be written"))


def alive(pid):
    """A zombie is dead: its parent is this test's process, which reaps it at the end."""
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def kill(live, *names):
    for name in names:
        os.kill(pid_of(live, name), signal.SIGKILL)
    wait_until(lambda: not alive(pid_of(live, "coordinator")), "the end of the coordinator", 30)


@pytest.fixture
def restart(new_coordinator):
    """Starts another coordinator on the same data directory."""
    return lambda: new_coordinator(*PATIENT)


def update_of(*bodies):
    """The digest of what these contributions come to."""
    updates = [
        unpack_contribution(decode_message("contribution", body)[1], LAYOUT, codec="sign", k=OPTIMIZER.k, absent=())
        for body in bodies
    ]
    return digest_arrays(pack_update(aggregate(updates, LAYOUT, [0] * len(updates)), LAYOUT))


@pytest.mark.parametrize("killed", [("coordinator",), ("server", "coordinator")], ids=["coordinator", "both"])
def test_a_round_outlives_a_killed_coordinator(new_coordinator, restart, killed):
    live = new_coordinator(*PATIENT)
    run = RunByHand(live)
    other = RunByHand(live, ("west",), steps=1)
    run.round(1, "west")
    first, second = run.sites
    body = first.message(2)
    assert first.send(2, body).status_code == 202
    log = run.admin.log(run.id, "west", 0)
    messages = [run.admin.entry(run.id, "west", seq) for seq in range(len(log.items))]
    kill(live, *killed)

    again = restart()
    run.move(again)
    other.move(again)
    assert run.view.status is RunStatus.RUNNING
    assert run.view.reason.startswith(f"region west: step 2, waiting for 1 of 2 sites: {second.name}, since ")
    assert run.admin.log(run.id, "west", 0) == log
    assert [run.admin.entry(run.id, "west", seq) for seq in range(len(log.items))] == messages
    assert first.send(2, body).status_code == 202
    second_body = second.message(2)
    header, arrays = decode_message("entry", second.send(2, second_body, wait=WAIT_S).content)
    assert [line["site"] for line in header["contributors"]] == [first.name, second.name]
    assert header["previous"] == log.head.hash
    assert header["parts"] == [digest_arrays(arrays)] == [update_of(body, second_body)]
    run.round(3, "west")
    other.round(1, "west")
    assert httpx.get(f"{run.url}/healthz").json()["status"] == "ok"
    assert httpx.get(f"{run.url}/readyz").json() == {"status": "ok", "detail": {}}


def test_a_round_outlives_a_killed_redis(new_coordinator):
    live = new_coordinator(*PATIENT)
    run = RunByHand(live)
    first, second = run.sites
    assert first.send(1, first.message(1)).status_code == 202
    killed = pid_of(live, "server")
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: pid_of(live, "server") != killed, "another server", 30)
    wait_until(lambda: httpx.get(f"{run.url}/readyz").status_code == 200, "readiness", 30)
    header, _ = decode_message("entry", second.send(1, second.message(1), wait=WAIT_S).content)
    assert [line["site"] for line in header["contributors"]] == [first.name, second.name]


def test_work_that_was_left_is_done_after_a_kill(new_coordinator, restart):
    """Killed right after the last contribution was taken in: whether it had aggregated or not, there is one entry."""
    live = new_coordinator(*PATIENT)
    run = RunByHand(live)
    bodies = [site.message(1) for site in run.sites]
    for site, body in zip(run.sites, bodies, strict=True):
        site.send(1, body)
    kill(live, "coordinator")

    run.move(restart())
    wait_until(lambda: run.view.step == 1, "the entry of step 1", 30)
    for site, body in zip(run.sites, bodies, strict=True):
        assert site.send(1, body).status_code == 200
    (header,) = run.admin.log(run.id, "west", 1).items
    assert header["parts"] == [update_of(*bodies)]


def test_a_deadline_does_not_pass_while_the_coordinator_is_away(tmp_path, new_coordinator):
    """Rule A6: killed between two contributions of a round, and back an hour later, it still waits for the third."""
    with EmbeddedRedis(tmp_path / "redis") as server:
        options = (*PATIENT, "--tick-s", "0.1", "--redis-url", server.url)
        live = new_coordinator(*options)
        run = RunByHand(live, ("west",) * 3, rounds=RoundsSpec(deadline_s=20))
        first, second, third = run.sites
        assert first.contribute(1) is None
        assert second.contribute(1) is None
        live.service.kill()
        with redis.Redis.from_url(server.url) as client:
            client.decrby("tick", 3_600_000)
            (key,) = client.keys("run:*")
            state = json.loads(client.hget(key, "state"))
            began = state["regions"]["west"]["round"]["first_answer"]
            state["regions"]["west"]["round"]["first_answer"] = str(datetime.fromisoformat(began) - timedelta(hours=1))
            client.hset(key, "state", json.dumps(state))
        run.move(new_coordinator(*options))
        header, _ = decode_message("entry", third.contribute(1, wait=WAIT_S))
        assert [line["site"] for line in header["contributors"]] == [first.name, second.name, third.name]


def test_sigterm_answers_open_polls_and_ends(new_coordinator):
    live = new_coordinator(*PATIENT)
    run = RunByHand(live)
    site, address = run.sites[0], urlsplit(live.url)
    path = f"/v1/runs/{run.id}/regions/west/steps/1/update/parts/0?wait=25"
    request = f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {site.seat}\r\n\r\n".encode()
    polls = [socket.create_connection((address.hostname, address.port), timeout=60) for _ in range(POLLS)]
    for poll in polls:
        poll.sendall(request)
    for _ in range(5):  # connections that came after the polls' have been answered: the polls are being served
        live.client().version()
    started = time.monotonic()
    os.kill(pid_of(live, "coordinator"), signal.SIGTERM)
    answers = [poll.recv(4096) for poll in polls]
    wait_until(lambda: not alive(pid_of(live, "coordinator")), "the end of the coordinator", 60)
    assert time.monotonic() - started < EXIT_S
    assert [answer[:12] for answer in answers] == [b"HTTP/1.1 204"] * POLLS
    for poll in polls:
        poll.close()
    log = (live.directory / "coordinator.log").read_text()
    assert "Traceback" not in log, log


def test_a_taken_port_is_named(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "coordinator", "--port", str(port), "--data-dir", str(tmp_path)]
        ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)
    assert ended.returncode == 1
    assert "--port" in ended.stderr
    assert str(port) in ended.stderr
    assert "Traceback" not in ended.stderr


def test_settings_that_make_no_sense(tmp_path):
    command = [sys.executable, "-m", "coordinator", "--port", "70000", "--data-dir", str(tmp_path), "--lease-s", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)
    assert ended.returncode == 2
    assert "port" in ended.stderr
    assert "lease_s" in ended.stderr


def test_a_replaced_token_is_good_no_more(new_coordinator):
    live = new_coordinator()
    old, join = live.token("admin"), live.token("join")
    live.service.interrupt()
    live.service.join()
    again = new_coordinator("--admin-token", "another-token-of-the-operator")
    with pytest.raises(ProblemError, match="revoked"):
        CoordinatorClient(again.url, old).runs()
    assert CoordinatorClient(again.url, "another-token-of-the-operator").runs() == []
    with pytest.raises(ProblemError) as caught:
        CoordinatorClient(again.url, join).runs()
    assert caught.value.code == "wrong_scope"


def test_after_an_outage_leases_go_on_where_they_were(tmp_path):
    """Rule A6; but a site that has renewed its lease since gets no more than that."""

    async def leases_after(server):
        store = Store(server.url)
        now, _ = await store.tick(1.0, 15.0)
        await store.sites.renew_lease("away", now - timedelta(hours=1) + timedelta(seconds=10))
        await store.sites.renew_lease("renewed", now + timedelta(seconds=15))
        with redis.Redis.from_url(server.url) as client:
            client.set("tick", int((now - timedelta(hours=1)).timestamp() * 1000))
        now, _ = await store.tick(1.0, 15.0)
        leases = await store.sites.leases()
        assert (await store.tick(1.0, 15.0))[0] >= now
        assert await store.sites.leases() == leases
        await store.close()
        return {site: (until - now).total_seconds() for site, until in leases.items()}

    with EmbeddedRedis(tmp_path) as server:
        left = asyncio.run(leases_after(server))
    assert left["away"] == pytest.approx(10, abs=1)
    assert left["renewed"] == pytest.approx(15, abs=0.01)
