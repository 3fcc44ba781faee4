"""The real `isthmus replay` against real coordinators: of a run of real agents, and of runs driven by hand."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from api.schemas import RunStatus
from api.specs import OuterSpec, SnapshotsSpec
from coordinator.redis_server import EmbeddedRedis
from coordinator.segments import read_index
from tests import reference
from tests.conftest import LiveCoordinator, start_coordinator, wait_until
from tests.contract.by_hand import LAYOUT, RunByHand
from tests.integration.test_three_sites import read_log, tensors_of

BIN = Path(sys.executable).parent / "isthmus"
OPTIONS = ("--lease-s", "36000", "--log-recent", "2", "--tick-s", "0.1")
FRAGMENTS = LAYOUT.fragments(2)


def replay(folder: Path, url: str, token: str, *words: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ISTHMUS_")}
    environment = {**kept, "ISTHMUS_COORDINATOR": url, "ISTHMUS_TOKEN": token, "COLUMNS": "200"}
    return subprocess.run(
        [BIN, "replay", *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path_factory.mktemp("replay-redis")) as server:
        yield server


@pytest.fixture(scope="module")
def live(server: EmbeddedRedis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCoordinator]:
    live = start_coordinator(tmp_path_factory.mktemp("replay"), "--redis-url", server.url, *OPTIONS)
    yield live
    live.service.interrupt()
    live.service.join()


@dataclass
class Hand:
    """A run of two sites with three steps and an outer round, which holds what its log leads to, unless told to lie."""

    run: RunByHand
    final: str

    @classmethod
    def of(cls, live: LiveCoordinator, *, lie: bool = False) -> "Hand":
        run = RunByHand(live, steps=3, outer=OuterSpec(every=3, fragments=2), snapshots=SnapshotsSpec(every=3))
        for step in (1, 2, 3):
            run.round(step, "west")
        log = read_log(run.admin, run.id, "west")
        start = tensors_of(LAYOUT, run.parameters.tobytes())
        groups = [tensor.group for tensor in LAYOUT.tensors]
        rebuilt = reference.replay(log, start, run.admin.get_blob, chunk=32, groups=groups)
        for fragment, tensors in enumerate(FRAGMENTS):
            names = [LAYOUT.tensors[index].name for index in tensors]
            copy = b"".join(rebuilt[name].astype("<f4").tobytes() for name in names)
            for site in run.sites:
                site.announce(1, fragment, bytes(len(copy)) if lie else copy)
        wait_until(lambda: run.view.outer_rounds == 1, "the outer round")
        (outer,) = run.admin.outer_rounds(run.id)
        return cls(run, hashlib.sha256(b"".join(map(run.admin.get_blob, outer.fragments))).hexdigest())

    def end(self) -> None:
        for site in self.run.sites:
            site.report_final(self.final)
        assert self.run.view.status is RunStatus.SUCCEEDED


def test_a_run_of_real_sites(finished_run, tmp_path):
    words = (finished_run.run_id, "--json")
    done = replay(tmp_path, finished_run.url, finished_run.observer_token, *words)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    digest = finished_run.run.members[0].digest
    assert (report["run"], report["equal"]) == (finished_run.run_id, True)
    found = {
        line["region"]: (line["seq"], line["step"], line["digest"], line["reported"], line["equal"])
        for line in report["regions"]
    }
    assert found == {
        "west": (21, 12, digest, {"a": digest, "b": digest}, True),
        "east": (21, 12, digest, {"c": digest}, True),
    }
    assert [(line["copies"], line["copies_differ"]) for line in report["regions"]] == [(9, []), (9, [])]


@pytest.mark.slow
def test_a_run_that_goes_on_and_then_ends(live, tmp_path):
    hand = Hand.of(live)
    place = (tmp_path, live.url, live.token("observer"), hand.run.id)
    running = replay(*place, "--json")
    assert running.returncode == 3
    assert f"run {hand.run.id} is running: compared with no digest" in running.stderr
    report = json.loads(running.stdout)
    assert report["equal"] is None
    assert report["regions"][0]["digest"] == hand.final
    hand.end()
    ended = replay(*place)
    assert ended.returncode == 0
    for site in hand.run.sites:
        assert f"{site.name} equal" in ended.stdout
    part = replay(*place, "--to", "2", "--region", "west", "--json")
    assert (part.returncode, json.loads(part.stdout)["regions"][0]["seq"]) == (3, 2)
    assert "replayed to step 2 only" in part.stderr
    late = replay(*place, "--from", "1", "--to", "9", "--json")
    assert (late.returncode, late.stderr.strip()) == (
        0,
        "isthmus: the log of region west ends with step 3: replayed to there, not to 9",
    )
    (line,) = json.loads(late.stdout)["regions"]
    assert (line["first"], line["seq"], line["digest"], line["equal"]) == (5, 5, hand.final, True)
    early = replay(*place, "--from", "1", "--to", "2")
    assert early.returncode == 1
    assert f"snapshot 1 of run {hand.run.id} is after step 3: it does not lead to step 2 (--to)" in early.stderr
    assert f"run {hand.run.id} has no snapshot 2; its snapshots: 1" in replay(*place, "--from", "2").stderr


def test_sites_that_held_something_else(live, tmp_path):
    hand = Hand.of(live, lie=True)
    hand.end()
    done = replay(tmp_path, live.url, live.token("observer"), hand.run.id)
    assert done.returncode == 1
    assert "the sites held other copies before the anchors 4, 5" in done.stdout
    assert "does not lead to what the sites have reported" in done.stderr


@pytest.fixture
def another(live: LiveCoordinator, server: EmbeddedRedis) -> Iterator[LiveCoordinator]:
    """A second coordinator of the same runs, which has nothing in memory."""
    another = start_coordinator(live.directory, "--redis-url", server.url, *OPTIONS)
    yield another
    another.service.interrupt()
    another.service.join()


def test_a_damaged_segment_is_named_by_its_entry(live, another, server, tmp_path):
    hand = Hand.of(live)
    hand.end()
    place = (tmp_path, another.url, live.token("observer"), hand.run.id, "--json")
    with redis.Redis.from_url(server.url, decode_responses=True) as client:
        wait_until(lambda: client.hkeys(f"headers:{hand.run.id}:west") == ["0"], "the log in segments")
        first, *_ = map(json.loads, client.zrange(f"segments:{hand.run.id}:west", 0, -1))
    assert first["first"] == 1
    path = live.directory / "blobs" / first["blob"][:2] / first["blob"]
    body = path.read_bytes()
    start, _ = read_index(lambda begin, end: body[begin:end]).spans[2, 0]
    flipped = start + 8 + int.from_bytes(body[start : start + 8], "little")  # where the arrays of the message begin
    path.write_bytes(body[:flipped] + bytes([body[flipped] ^ 1]) + body[flipped + 1 :])
    done = replay(*place)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"isthmus: run {hand.run.id}, region west, entry 2: entry 2 arrived with other arrays" in done.stderr
    path.write_bytes(body)


@pytest.mark.slow
def test_what_cannot_be_replayed(live, tmp_path):
    run = RunByHand(live, begin=False)
    place = (tmp_path, live.url, live.token("observer"))
    assert "has no region 'north'; its regions: west" in replay(*place, run.id, "--region", "north").stderr
    empty = replay(*place, run.id)
    assert empty.returncode == 1
    assert "no site has presented the layout" in empty.stderr
    run.sites[0].join()
    assert "has no entry 0 yet: nothing to replay" in replay(*place, run.id).stderr
