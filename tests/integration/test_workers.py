"""Several processes of the coordinator serve one run: real processes on one port, or on two, and one real Redis."""

import os
import signal
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import httpx
import numpy as np
import psutil
import pytest

from api.payload import decode_message
from api.schemas import RunStatus
from api.specs import OuterSpec
from coordinator.redis_server import EmbeddedRedis
from tests.conftest import wait_until
from tests.contract.by_hand import LAYOUT, WAIT_S, RunByHand
from tests.contract.test_run_over_http import assert_chained
from tests.integration.test_restart import EXIT_S, PATIENT, alive, pid_of
from tests.integration.test_three_sites import read_headers

REGIONS = ("west", "west", "east")
STEPS = 4
OUTER = OuterSpec(every=2, fragments=2)
POLLS = 20


@pytest.fixture
def redis_server(tmp_path):
    """One that no coordinator owns."""
    with EmbeddedRedis(tmp_path / "redis") as server:
        yield server


@pytest.fixture
def two(new_coordinator, redis_server):
    """Two coordinators with one Redis and one data directory."""
    return [new_coordinator(*PATIENT, "--redis-url", redis_server.url) for _ in range(2)]


def served_by(request, kind):
    if kind == "two coordinators":
        return request.getfixturevalue("two")
    return [request.getfixturevalue("new_coordinator")(*PATIENT, "--workers", kind)]


def workers_of(live):
    """Processes that serve, once all of them are up."""
    parent = psutil.Process(pid_of(live, "coordinator"))

    def listening():
        found = [child for child in parent.children() if "coordinator.worker" in child.cmdline()]
        return found if len(found) == 2 and all(connections(worker, "LISTEN") for worker in found) else None

    return wait_until(listening, "two workers", 60)


def connections(worker, status):
    try:
        return [found for found in worker.net_connections("tcp") if found.status == status]
    except psutil.NoSuchProcess:
        return []


def answer_of(site, step, body):
    """As ranks do it: sends the same bytes until there is an update, whoever answers."""
    while (message := site.ranks.contribute(site.run, site.region, step, site.name, 0, body, WAIT_S).message) is None:
        pass
    return message


def train(run, lives, during=lambda step: None):
    """All sites at once, each asking another process at every step."""
    anchor = run.parameters
    with ThreadPoolExecutor(len(run.sites)) as pool:
        for step in range(1, STEPS + 1):
            for number, site in enumerate(run.sites):
                site.url = lives[(step + number) % len(lives)].url
            bodies = [site.message(step) for site in run.sites]
            during(step)
            messages = pool.map(answer_of, run.sites, [step] * len(bodies), bodies)
            assert len(set(messages)) == len(set(REGIONS))
            if step % OUTER.every == 0:
                copies = [anchor + np.float32(0.5 if site.region == "west" else -0.25) for site in run.sites]
                number = step // OUTER.every
                list(pool.map(announce, run.sites, [number] * len(copies), copies))
                wait_until(lambda number=number: run.view.outer_rounds == number, f"outer round {number}")


def announce(site, number, copy):
    for fragment, tensors in enumerate(LAYOUT.fragments(OUTER.fragments)):
        start = LAYOUT.offsets[tensors.start]
        site.announce(number, fragment, copy[start : start + LAYOUT.fragment_elements(tensors)].tobytes())


def logs_of(run, lives):
    """Of all regions, the same at every process; without what depends on the run's id, which is new every time.

    Processes may compute the anchors of an outer round in any order.
    """
    logs = []
    for region in sorted(set(REGIONS)):
        first, *others = (read_headers(live.client(), run.id, region) for live in lives)
        assert all(other == first for other in others)
        assert_chained(first)
        first.sort(key=lambda header: (header["step"], header["kind"] == "anchor", header.get("fragment", 0)))
        for header in first:
            del header["seq"], header["previous"]
            for contributor in header.get("contributors", ()):
                del contributor["digest"]
        logs.append(first)
    return logs


@pytest.mark.parametrize("kind", ["2", "two coordinators"])
def test_the_run_is_that_of_one_process(request, new_coordinator, kind):
    alone = new_coordinator(*PATIENT, name="alone")
    lives = served_by(request, kind)
    logs = []
    for served in ([alone], lives):
        run = RunByHand(served[0], REGIONS, steps=STEPS, outer=OUTER, prefix="same")
        train(run, served)
        logs.append(logs_of(run, served))
        (end,) = {header["digest"] for log in logs[-1] for header in log[-1:]}
        for site in run.sites:
            site.report_final(end)
    assert len(logs[0][0]) == 1 + STEPS + 2 * OUTER.fragments
    assert logs[0] == logs[1]


def test_a_killed_worker_is_replaced_and_the_run_goes_on(new_coordinator):
    live = new_coordinator(*PATIENT, "--workers", "2")
    run = RunByHand(live, REGIONS, steps=STEPS, outer=OUTER)
    killed = []

    def kill(step):
        if step in (2, 3):
            worker = workers_of(live)[step % 2]
            killed.append(worker.pid)
            worker.kill()

    train(run, [live], kill)
    assert not {worker.pid for worker in workers_of(live)} & set(killed)
    assert run.view.alarms == []


def test_both_workers_serve(new_coordinator):
    live = new_coordinator(*PATIENT, "--workers", "2")
    run = RunByHand(live)
    workers = workers_of(live)
    address = urlsplit(live.url)
    polls = []

    def served():
        polls.append(socket.create_connection((address.hostname, address.port)))
        polls[-1].sendall(poll_of(run))
        return all(connections(worker, "ESTABLISHED") for worker in workers)

    wait_until(served, "connections of both", 30)
    for poll in polls:
        poll.close()


def poll_of(run):
    path = f"/v1/runs/{run.id}/regions/west/steps/1/update/parts/0?wait=25"
    return f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {run.sites[0].seat}\r\n\r\n".encode()


def open_polls(live, run):
    """Connections to workers that are waiting for an answer."""
    address = urlsplit(live.url)
    polls = [socket.create_connection((address.hostname, address.port), timeout=60) for _ in range(POLLS)]
    for poll in polls:
        poll.sendall(poll_of(run))
    workers = workers_of(live)
    wait_until(lambda: sum(len(connections(worker, "ESTABLISHED")) for worker in workers) >= POLLS, "the polls", 30)
    for _ in range(10):  # requests that came after the polls have been answered
        live.client().version()
    return polls


def test_sigterm_answers_the_polls_of_all_workers_and_ends(new_coordinator):
    live = new_coordinator(*PATIENT, "--workers", "2")
    run = RunByHand(live)
    polls = open_polls(live, run)
    processes = [pid_of(live, "coordinator"), pid_of(live, "server"), *(worker.pid for worker in workers_of(live))]
    started = time.monotonic()
    os.kill(processes[0], signal.SIGTERM)
    answers = [poll.recv(4096) for poll in polls]
    wait_until(lambda: not any(map(alive, processes)), "the end of all", 60)
    assert time.monotonic() - started < EXIT_S
    assert [answer[:12] for answer in answers] == [b"HTTP/1.1 204"] * POLLS
    for poll in polls:
        poll.close()
    log = (live.directory / "coordinator.log").read_text()
    assert "Traceback" not in log, log
    live.service.join()


def test_a_killed_parent_leaves_nothing_behind(new_coordinator):
    live = new_coordinator(*PATIENT, "--workers", "2")
    port = str(urlsplit(live.url).port)
    run = RunByHand(live)
    polls = open_polls(live, run)
    left = [pid_of(live, "server"), *(worker.pid for worker in workers_of(live))]
    os.kill(pid_of(live, "coordinator"), signal.SIGKILL)
    wait_until(lambda: not any(map(alive, left)), "the end of Redis and the workers", 30)
    for poll in polls:
        poll.close()
    again = new_coordinator(*PATIENT, "--workers", "2", "--port", port)
    assert again.url == live.url
    run.round(1, "west")


def test_the_other_coordinator_closes_the_round_of_one_that_was_killed(two):
    """Killed between two contributions of a round, while the first site waits for its answer."""
    run = RunByHand(two[0], steps=2)
    first, second = run.sites
    body = first.message(1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.send, 1, body, wait=WAIT_S)
        wait_until(lambda: "waiting for 1 of 2" in run.view.reason, "the first contribution", 30)
        two[0].service.kill()
        with pytest.raises(httpx.TransportError):
            waiting.result()
    run.move(two[1])
    messages = [second.contribute(1, wait=WAIT_S), first.send(1, body).content]
    assert messages[0] == messages[1]
    header, _ = decode_message("entry", messages[0])
    assert [line["site"] for line in header["contributors"]] == [first.name, second.name]
    run.round(2, "west")


def test_a_run_outlives_a_killed_redis_that_two_coordinators_share(two, redis_server):
    run = RunByHand(two[0])
    first, second = run.sites
    second.url = two[1].url
    run.round(1, "west")
    log = run.admin.log(run.id, "west", 0)
    with ThreadPoolExecutor(1) as pool:
        body = first.message(2)
        waiting = pool.submit(answer_of, first, 2, body)
        wait_until(lambda: "waiting for 1 of 2" in run.view.reason, "the first contribution", 30)
        subprocess.run(["pkill", "-KILL", "-F", str(redis_server._directory / "server.pid")], check=True)
        wait_until(redis_server.revive, "another server", 30)
        for live in two:
            wait_until(lambda live=live: httpx.get(f"{live.url}/readyz").status_code == 200, "readiness", 30)
        message = answer_of(second, 2, second.message(2))
        assert waiting.result() == message
    header, _ = decode_message("entry", message)
    assert [line["site"] for line in header["contributors"]] == [first.name, second.name]
    assert header["previous"] == log.head.hash
    run.round(3, "west")
    assert run.view.status is RunStatus.RUNNING


def test_coordinators_that_share_a_directory_have_the_same_tokens(two):
    first, second = two
    assert first.url != second.url
    assert [live.client().runs() for live in two] == [[], []]
