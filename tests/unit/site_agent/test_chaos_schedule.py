"""Plans of chaos: they follow from the seed, and leave nothing out."""

import pytest

from site_agent.chaos.schedule import SITES, Kind, plan

SEEDS = range(30)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_plan_follows_from_its_seed(seed):
    assert plan(seed, 20) == plan(seed, 20)
    assert plan(seed, 20).faults != plan(seed + 1, 20).faults


@pytest.mark.parametrize("seed", SEEDS)
def test_twenty_faults_are_of_every_kind(seed):
    faults = plan(seed, 20).faults
    assert [fault.number for fault in faults] == list(range(20))
    assert {fault.kind for fault in faults} == set(Kind)
    assert max(sum(fault.kind is kind for fault in faults) for kind in Kind) == 2
    assert {fault.site for fault in faults} <= set(SITES)
    assert all(0 <= fault.place <= 1 and fault.seconds > 0 for fault in faults)


@pytest.mark.parametrize("seed", SEEDS)
def test_faults_come_one_after_the_other_and_the_run_goes_on_after_them(seed):
    made = plan(seed, 20)
    steps = [fault.step for fault in made.faults]
    assert steps == sorted(set(steps))
    assert steps[-1] < made.hold_at < made.steps


def test_seeds_take_turns():
    made = [plan(seed, 5) for seed in SEEDS]
    assert {len(set(one.regions.values())) for one in made} == {1, 2}
    assert all((one.outer_every is None) == (len(set(one.regions.values())) == 1) for one in made)
    assert {max(one.ranks.values()) for one in made} == {1, 2}
    assert {(one.parts, one.overlap) for one in made} == {(True, True), (True, False), (False, True), (False, False)}
    assert {one.workers for one in made} == {1, 2}
    assert {fault.in_round for one in made for fault in one.faults} == {True, False}
    assert {fault.site for one in made for fault in one.faults} == set(SITES)


@pytest.mark.parametrize("faults", [1, 13, 40])
def test_any_number_of_faults(faults):
    assert len(plan(1, faults).faults) == faults
