"""Everything real, and killed with -9 at named points of outer rounds and of snapshots: nothing may come of it."""

import time
from collections.abc import Callable, Sequence
from functools import partial

import pytest

from api.specs import OuterSpec, SnapshotsSpec
from tests.conftest import wait_until
from tests.faults.points import IN_RANK, OF_OUTER_ROUNDS, OF_REMOVAL, OF_SNAPSHOTS
from tests.faults.stage import GatedRun, Stage
from tests.faults.traps import Point, Victim

EVERY = 2
PACE_S = 0.3
SEGMENTS = 8
"""Steps that are several segments, if Redis keeps two entries."""
VICTIMS = pytest.mark.parametrize("victim", ["coordinator", "redis", "site"])


def of_victim(points: Sequence[Point], victim: Victim) -> list[Point]:
    """All; but of a site, whose ranks take long to start, those in it and some of the others."""
    others = [point for point in points if point not in IN_RANK]
    return [point for point in points if victim != "site" or point in IN_RANK or point in others[::4]]


# --- outer rounds -----------------------------------------------------------------------------------------------------


def outer_run(stage: Stage, rounds: int) -> GatedRun:
    """With a snapshot behind each outer round, of which one is kept."""
    snapshots = SnapshotsSpec(every=EVERY, keep=1)
    outer = OuterSpec(every=EVERY, fragments=2)
    return GatedRun(stage, steps=EVERY * rounds, sites=("a", "b", "c"), outer=outer, snapshots=snapshots)


@pytest.mark.slow
@pytest.mark.timeout(900)
@VICTIMS
def test_outer_rounds_survive_a_kill_at_every_point(victim: Victim) -> None:
    points = of_victim(OF_OUTER_ROUNDS, victim)
    with Stage() as stage:
        run = outer_run(stage, len(points) + 1)
        for number, point in enumerate(points, 1):
            run.strike(point, victim, "bc"[number % 2], partial(run.let, run.reached + EVERY))
            run.until(run.settled, f"outer round {number} after: {point.name}")
            (manifest,) = run.snapshots(number)
            assert manifest.step == run.reached
        run.end()
        ended = run.judge()
        if victim != "site":
            assert [member.attempt for member in run.view.members] == [1, 1, 1]
            undisturbed = outer_run(stage, len(points) + 1)
            undisturbed.end()
            assert undisturbed.judge() == ended


# --- snapshots --------------------------------------------------------------------------------------------------------


def plain_run(stage: Stage, steps: int) -> GatedRun:
    return GatedRun(stage, steps=steps, sites=("a", "b"), snapshots=SnapshotsSpec(keep=2))


def steps_until(run: GatedRun, done: Callable[[], bool], what: str) -> None:
    """More steps, since a site is asked for a snapshot by the answer to one, and not while it is busy with another; no
    faster than what goes on beside them, such as the removal of what is old.
    """
    since = time.monotonic()

    def is_done() -> bool:
        nonlocal since
        if done():
            return True
        if run.settled(run.view) and time.monotonic() > since + PACE_S:
            run.let(run.reached + 1)
            since = time.monotonic()
        return False

    wait_until(is_done, what, 60)


def snapshot_taken(run: GatedRun, number: int) -> None:
    """Until there is a manifest, of the sites' parameters."""
    steps_until(
        run, lambda: any(item.number == number for item in run.client.snapshots(run.id).items), f"snapshot {number}"
    )
    manifest = run.snapshots(number)[-1]
    assert run.parameters(manifest) == run.said()["west"][manifest.step]


def next_snapshot(run: GatedRun, point: Point, after: int = 0) -> None:
    """So many steps after the last one, until the kill."""
    run.let(run.reached + after)
    run.until(run.settled, f"step {run.reached}")
    run.client.request_snapshot(run.id)
    run.let(run.reached + 2)
    steps_until(run, lambda: run.stage.traps.sprung, f"a kill when: {point.name}")


@pytest.mark.slow
@pytest.mark.timeout(900)
@VICTIMS
def test_snapshots_survive_a_kill_at_every_point(victim: Victim) -> None:
    points = of_victim(OF_SNAPSHOTS, victim)
    steps = 12 * len(points)
    with Stage(sites=("a", "b")) as stage:
        run = plain_run(stage, steps)
        for number, point in enumerate(points, 1):
            run.strike(point, victim, "ab"[number % 2], partial(next_snapshot, run, point))
            snapshot_taken(run, number)
            run.until(run.settled, f"the steps after: {point.name}")
        run.end()
        ended = run.judge()
        if victim != "site":
            undisturbed = plain_run(stage, steps)
            undisturbed.end()
            assert undisturbed.judge() == ended


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", ["coordinator", "redis"])
def test_snapshots_survive_a_kill_while_what_is_old_is_removed(victim: Victim) -> None:
    """Of snapshots one is kept, and of the log what is behind it."""
    steps = 60 * len(OF_REMOVAL)
    with Stage("--log-recent", "2", "--log-keep", "1", sites=("a", "b")) as stage:
        run = GatedRun(stage, steps=steps, sites=("a", "b"), snapshots=SnapshotsSpec(keep=1))
        run.client.request_snapshot(run.id)
        snapshot_taken(run, 1)
        manifests = [run.client.snapshots(run.id).items[-1].manifest]
        for number, point in enumerate(OF_REMOVAL, 2):
            run.strike(point, victim, "a", partial(next_snapshot, run, point, after=SEGMENTS))
            snapshot_taken(run, number)
            manifests.append(run.client.snapshots(run.id).items[-1].manifest)
        run.end()
        run.judge(whole_log=False)
        *old, newest = (stage.data / "blobs" / manifest[:2] / manifest for manifest in manifests)
        assert newest.exists()
        wait_until(lambda: not any(manifest.exists() for manifest in old), "older manifests to be removed")
