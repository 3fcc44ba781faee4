"""What pauses a run by itself: losses, and storage that is full."""

import math

import pytest

from api.schemas import MetricPoint, RunStatus
from api.specs import GuardsSpec
from coordinator.events import GuardTripped, HeldBack, PauseRequested, ResumeRequested, StartRequested, StorageFull
from coordinator.guards import tripped
from coordinator.state import AggregateRound, pending
from tests.unit.coordinator.runs import Driver

TWO = {"a": "west", "b": "west"}
FULL = StorageFull("the disk is full; free some space on it")


def points(*losses):
    return [MetricPoint(step=step, values={"loss": loss}) for step, loss in enumerate(losses, 5)]


@pytest.mark.parametrize(
    ("losses", "before", "guards", "because"),
    [
        ([1.0, 2.0], [], GuardsSpec(), None),
        ([1.0, None], [], GuardsSpec(), "the loss of site a is not finite at step 6"),
        ([math.inf], [], GuardsSpec(), "the loss of site a is not finite at step 5"),
        ([None, math.nan], [], GuardsSpec(nonfinite=False, spike=3), None),
        ([10.0], [1.0] * 50, GuardsSpec(), None),
        ([10.0], [1.0] * 7, GuardsSpec(spike=9), None),
        ([1.0, 10.0], [1.0] * 7, GuardsSpec(spike=9), "the loss of site a is 10 at step 6, the median before 1: more"),
        ([10.0], [1.0] * 8, GuardsSpec(spike=10), None),
        ([3.0], [2.0] * 30 + [1.0] * 21, GuardsSpec(spike=2), None),
    ],
)
def test_which_losses_trip_a_guard(losses, before, guards, because):
    event = tripped("a", points(*losses), before, guards)
    assert (event is None) if because is None else event.because.startswith(because)


def test_other_metrics_are_not_looked_at():
    assert tripped("a", [MetricPoint(step=1, values={"bytes_up": None})], [], GuardsSpec(spike=2)) is None


def test_a_tripped_guard_pauses_once_and_steps_known_at_the_resume_trip_nothing():
    driver = Driver(TWO, steps=9).begin().until_step(2)
    driver.send(GuardTripped(2, "the loss of site a is not finite at step 2"))
    assert driver.status is RunStatus.PAUSED
    assert driver.words.startswith("paused: the loss of site a is not finite at step 2, `isthmus run resume` goes on; ")
    driver.send(GuardTripped(2, "the loss of site b is not finite at step 2"))
    assert driver.state.paused_because == "the loss of site a is not finite at step 2"
    driver.send(ResumeRequested())
    assert (driver.status, driver.state.paused_because) == (RunStatus.RUNNING, "")
    for step in (1, 2, 3):  # step 3 was open
        driver.send(GuardTripped(step, "again"))
        assert driver.status is RunStatus.RUNNING
    driver.send(GuardTripped(4, "again"))
    assert driver.status is RunStatus.PAUSED
    driver.send(ResumeRequested())
    assert driver.finish().status is RunStatus.SUCCEEDED


def test_a_pause_that_somebody_asked_for_stays_that():
    driver = Driver(TWO).begin()
    driver.send(PauseRequested())
    driver.send(GuardTripped(1, "the loss of site a is not finite at step 1"))
    assert driver.words.startswith("paused, `isthmus run resume` goes on; region west: step 1")


@pytest.mark.parametrize("paused", [False, True])
def test_full_storage_pauses_and_leaves_work_alone_until_the_run_is_resumed(paused):
    driver = Driver(TWO).begin()
    for site in TWO:
        driver.send(driver.contribution(site))
    if paused:
        driver.send(PauseRequested())
    assert pending(driver.state) == [AggregateRound("west", 1)]
    for _ in range(2):
        driver.send(FULL)
        assert pending(driver.state) == []
        assert driver.state.alarms == ()
        assert driver.words == f"paused: {FULL.because}, `isthmus run resume` goes on"
    driver.send(ResumeRequested())
    assert pending(driver.state) == [AggregateRound("west", 1)]
    assert driver.finish().status is RunStatus.SUCCEEDED


def test_full_storage_before_the_start_is_an_alarm():
    driver = Driver(TWO)
    driver.send(StartRequested(TWO))
    for _ in range(2):
        driver.send(FULL)
    assert (driver.status, driver.state.alarms) == (RunStatus.STARTING, (FULL.because,))
    driver.begin()


def test_contributions_that_are_held_back_pause_nothing_and_the_run_says_why_it_waits():
    driver = Driver(TWO).begin()
    for because in ("Redis holds 9 MiB", "Redis holds 10 MiB"):
        driver.send(HeldBack(because))
        assert driver.status is RunStatus.RUNNING
        assert driver.words.endswith("waiting for 2 of 2 sites: a, b; contributions wait: Redis holds 9 MiB")
    driver.send(driver.contribution("a"))
    assert "contributions wait" not in driver.words
