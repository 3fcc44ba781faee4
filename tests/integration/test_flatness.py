"""A real coordinator through failed rounds and returns of a site: it grows by the entries of the log, and no more."""

import json
import secrets
from collections import Counter
from contextlib import suppress

import psutil
import pytest
import redis

from api.client import CoordinatorClient
from api.errors import GoneError, InvalidError
from api.schemas import CaughtUp, Heartbeat, JoinRequest, Position, Seat
from api.specs import RoundsSpec
from coordinator.redis_server import EmbeddedRedis
from tests.contract.by_hand import LAYOUT, RunByHand
from tests.integration.test_restart import PATIENT

WARM_UP, ROUNDS, RETURNS = 100, 500, 2
"""Rounds that fail, and returns of a site after each of them."""
GROWTH = 1.05
ENDLESS = RoundsSpec(deadline_s=0.1, late_rounds=10**6, restarts=10**6)
LOG = {"headers", "steps", "messages", "packed", "segments", "segment-steps", "garbage", "blobs"}


class Truant:
    """One site of two, the other of which is in time for every round. Each keeps its connection."""

    def __init__(self, live):
        self.run = RunByHand(live, steps=10**6, rounds=ENDLESS)
        self.steady, self.truant = self.run.sites
        self.clients = {site.name: site.ranks for site in self.run.sites}
        self.agent = self.truant.agent
        self.step, self.position = 0, self.head()

    def head(self) -> Position:
        return self.run.admin.log(self.run.id, "west", 0, 1).head

    def fail_a_round(self):
        """In one of three ways; the other site goes on alone, unless the round was over before it came."""
        self.step += 1
        way = (self.send_nothing, self.send_nonsense, self.lose_ranks)[self.step % 3]
        way()
        with suppress(GoneError):
            self.send(self.steady, self.steady.message(self.step, position=self.position), wait=20.0)
        page = self.run.admin.log(self.run.id, "west", self.position.seq + 1, wait=20.0)
        assert [header["step"] for header in page.items] == [self.step]
        self.position = page.head

    def send(self, site, body, wait):
        self.clients[site.name].contribute(self.run.id, "west", self.step, site.name, 0, body, wait)

    def send_nothing(self):
        """The round ends at its deadline."""

    def send_nonsense(self):
        body = self.truant.message(self.step, arrays={}, position=self.position)
        with pytest.raises(InvalidError):
            self.send(self.truant, body, wait=0)

    def lose_ranks(self):
        self.send(self.truant, self.truant.message(self.step, position=self.position), wait=0)
        reply = self.agent.heartbeat(self.truant.name, Heartbeat(processes=[self.truant.failed()]), 0)
        self.truant.attempt = reply.assignments[0].attempt

    def come_back(self):
        """With new ranks, as after a start of the agent."""
        site = self.truant
        self.clients[site.name].close()
        site.seat = secrets.token_urlsafe(32)
        self.agent.take_seat(self.run.id, site.name, Seat(attempt=site.attempt, secret=site.seat))
        ranks = self.clients[site.name] = CoordinatorClient(site.url, site.seat)
        ranks.join(self.run.id, site.name, JoinRequest(attempt=site.attempt, layout=LAYOUT.to_json()))
        page = ranks.log(self.run.id, "west", max(self.position.seq - 3, 0))
        assert page.head == self.position
        report = CaughtUp(attempt=site.attempt, position=page.head)
        assert ranks.caught_up(self.run.id, site.name, report).active

    def go_on(self, rounds):
        for _ in range(rounds):
            self.fail_a_round()
            for _ in range(RETURNS):
                self.come_back()


def figures(live, server):
    """What must not grow: everything but the log, of which Redis holds headers, and messages as payloads."""
    process = psutil.Process(live.service._process.pid)
    with redis.Redis.from_url(server.url) as client:
        total = client.info("memory")["used_memory"]
        messages = {
            f"payload:{key.decode().split(':')[1]}:{digest}".encode()
            for key in client.keys("messages:*")
            for digests in client.hvals(key)
            for digest in json.loads(digests)
        }
        keys, sizes, of_log = Counter(), Counter(), 0
        for key in client.scan_iter():
            kind = key.decode().partition(":")[0]
            size = client.memory_usage(key, samples=0)
            if key in messages or kind in LOG:
                of_log += size
            else:
                keys[kind] += 1
                sizes[kind] += size
    return {
        "resident bytes": process.memory_info().rss,
        "file descriptors": process.num_fds(),
        "Redis bytes": total - of_log,
        **{f"keys {kind}": count for kind, count in keys.items()},
        **{f"bytes of keys {kind}": size for kind, size in sizes.items()},
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_failed_rounds_and_returns_leave_nothing_behind(new_coordinator, tmp_path):
    with EmbeddedRedis(tmp_path / "redis") as server:
        live = new_coordinator(*PATIENT, "--tick-s", "0.2", "--log-recent", "40", "--redis-url", server.url)
        truant = Truant(live)
        figures(live, server)  # Redis makes room for statistics of a command when it is first used
        truant.go_on(WARM_UP)
        before = figures(live, server)
        truant.go_on(ROUNDS)
        after = figures(live, server)
        grown = {name: (before.get(name, 0), now) for name, now in after.items() if now > GROWTH * before.get(name, 0)}
        assert not grown
        assert truant.run.view.alarms == []
