"""Regions and sites that are there, but not in time for an outer round, in the state machine."""

from datetime import timedelta

import pytest

from api.schemas import RunStatus
from coordinator.events import PauseRequested, ResumeRequested, Ticked
from coordinator.quorum import remaining
from coordinator.state import due_at, pending
from tests.unit.coordinator.runs import NOW, START, Driver, digest_of

APART = {"a": "west", "b": "west", "c": "east"}
ALONE = {"a": "here", "b": "there", "c": "yonder"}
DEADLINE = {"deadline_s": 30}


def west_at_the_outer_round(sites=APART, **spec):
    """West is due after its step 2, east has not begun."""
    driver = Driver(sites, **{"steps": 6, "every": 2, "outer": DEADLINE} | spec).begin()
    while driver.state.regions["west"].step < 2:
        step(driver, "a", "b")
    return driver


def step(driver, *sites):
    for site in sites:
        driver.send(driver.contribution(site))
    assert driver.work()


def anchors_of(driver, region):
    return [line for line in driver.logs[region] if line["kind"] == "anchor"]


def test_without_a_deadline_everybody_is_waited_for():
    driver = west_at_the_outer_round(outer={})
    driver.pass_time(80_000)
    assert driver.state.outer is None
    assert due_at(driver.state) is None


def test_an_outer_round_opens_without_a_region_that_is_late():
    driver = west_at_the_outer_round()
    step(driver, "c")
    assert due_at(driver.state) == NOW + timedelta(seconds=30)
    assert driver.words == (
        "outer round 1 goes on without east at 10:00:30 UTC; region east: step 2, waiting for 1 of 1 sites: c"
    )
    driver.pass_time(30)
    assert driver.state.outer.weights == {"west": 28}
    driver.refused(driver.contribution("c"), "round_not_open")
    driver.refused(driver.announcement("c", 0), "not_a_participant")
    driver.until_outer_round(1)
    east = driver.state.regions["east"]
    assert (east.step, east.apart, east.tokens) == (2, True, 7)
    assert anchors_of(driver, "east")[0]["before"] == START.parameters
    assert driver.summaries[0].late == ["c"]
    assert driver.state.alarms[-1] == "site c was late for an outer round, which went on without it: number 1"
    driver.refused(driver.contribution("c", step=2), "closed_without_you")
    driver.until_outer()
    assert driver.state.outer.weights == {"east": 21, "west": 28}
    assert driver.finish().status is RunStatus.SUCCEEDED
    assert sum("was late" in alarm for alarm in driver.state.alarms) == 1


def test_what_a_late_region_has_accepted_is_listed_before():
    driver = west_at_the_outer_round(APART | {"d": "east"})
    driver.pass_time(29)
    driver.send(driver.contribution("c"))
    assert not pending(driver.state)
    driver.pass_time(1)
    assert driver.state.outer is None
    assert [(job.region, job.step) for job in pending(driver.state)] == [("east", 1)]
    assert due_at(driver.state) is None
    driver.work()
    assert driver.state.outer.weights == {"west": 28}
    assert driver.logs["east"][-1]["step"] == 1


def test_half_of_the_regions_must_be_in_time():
    three = {"a": "here", "b": "there", "c": "yonder"}
    driver = Driver(three, steps=2, every=1, outer=DEADLINE).begin()
    step(driver, "a")
    driver.pass_time(31)
    assert driver.state.outer is None
    step(driver, "b")
    assert driver.state.outer.weights.keys() == {"here", "there"}


def test_a_pause_and_an_outage_do_not_count():
    driver = west_at_the_outer_round()
    driver.pass_time(29)
    driver.send(PauseRequested())
    driver.pass_time(100)
    driver.send(ResumeRequested())
    driver.pass_time(29)
    driver.now += timedelta(seconds=100)
    driver.send(Ticked(100.0))
    assert driver.state.outer is None
    driver.pass_time(1)
    assert driver.state.outer is not None


def test_sites_without_rounds_that_are_late():
    driver = Driver(ALONE, steps=6, every=2, exchange="none", outer=DEADLINE).begin()
    driver.send(driver.arrival("a"))
    driver.send(driver.arrival("b"))
    assert driver.words == "outer round 1, after step 2: 1 of 3 sites on their way: c until 10:00:30 UTC"
    driver.pass_time(30)
    assert driver.state.outer.participants == {"a", "b"}
    driver.send(driver.arrival("c"))
    driver.refused(driver.announcement("c", 0), "not_a_participant")
    driver.until_outer_round(1)
    assert anchors_of(driver, "yonder")[-1]["before"] == START.parameters
    assert driver.member("c").live
    driver.send(driver.arrival("c", number=2, tokens=21))
    driver.until_outer()
    assert driver.state.outer.weights == {"here": 7, "there": 7, "yonder": 21}
    assert driver.finish().status is RunStatus.SUCCEEDED


@pytest.mark.parametrize("fragments", [1, 2])
def test_fragments_close_without_a_site_that_does_not_announce(fragments):
    driver = Driver(APART, steps=4, every=2, fragments=fragments, outer=DEADLINE).begin().until_outer()
    driver.pass_time(100)
    for site in "ab":
        for fragment in range(fragments):
            driver.send(driver.announcement(site, fragment))
    assert not driver.work()
    until = "waiting for the digests of c until 10:02:10 UTC"
    assert driver.words == f"outer round 1, fragment 0 (0 of {fragments} done): {until}"
    assert due_at(driver.state) == NOW + timedelta(seconds=130)
    driver.pass_time(29)
    driver.now += timedelta(seconds=50)
    driver.send(Ticked(50.0))
    assert not pending(driver.state)
    driver.pass_time(1)
    assert remaining(driver.state) == ["a", "b"]
    driver.refused(driver.announcement("c", 0), "not_a_participant")
    while driver.state.outer is not None:
        assert driver.work()
    assert driver.summaries[0].late == ["c"]
    assert driver.state.regions["east"].tokens == 14
    assert [line["before"] for line in anchors_of(driver, "east")] == [START.parameters] * fragments
    assert driver.finish().status is RunStatus.SUCCEEDED


def test_a_region_goes_on_with_those_of_its_sites_that_are_in_time():
    driver = Driver(APART, steps=2, every=1, outer=DEADLINE).begin().until_outer()
    driver.send(driver.announcement("a", 0))
    driver.pass_time(30)
    assert due_at(driver.state) == NOW + timedelta(seconds=30) or remaining(driver.state) == ["a"]
    assert driver.work()
    assert [part["region"] for part in anchors_of(driver, "west")[0]["participants"]] == ["west"]
    assert driver.state.outer is None
    assert driver.summaries[0].late == ["b", "c"]


def test_a_copy_that_is_not_uploaded_is_not_waited_for_either():
    driver = Driver(APART, steps=2, every=1, outer=DEADLINE).begin().until_outer()
    for site in "ab":
        driver.send(driver.announcement(site, 0))
    driver.send(driver.announcement("c", 0, digest=digest_of("c"), stored=False))
    assert driver.words.endswith("waiting for the copies of c until 10:00:30 UTC")
    driver.pass_time(30)
    assert driver.work()
    assert driver.summaries[0].late == ["c"]


def test_less_than_half_of_the_regions_are_waited_for():
    driver = Driver(ALONE, steps=2, every=1, outer=DEADLINE).begin().until_outer()
    driver.send(driver.announcement("a", 0))
    driver.pass_time(100)
    assert remaining(driver.state) == ["a", "b", "c"]
    driver.send(driver.announcement("b", 0))
    assert remaining(driver.state) == ["a", "b"]


def test_after_the_last_step_who_is_late_takes_the_anchor():
    driver = Driver(APART, steps=1, every=1, outer=DEADLINE).begin().until_outer()
    for site in "ab":
        driver.send(driver.announcement(site, 0))
    driver.pass_time(30)
    driver.work()
    assert anchors_of(driver, "east")[0]["before"] is None
    assert driver.finish().status is RunStatus.SUCCEEDED


def test_a_region_that_does_not_come_to_where_its_anchors_are_is_late():
    """Its copy was in the mean; what it had accepted since is in its log."""
    driver = Driver(APART, steps=9, every=4, outer={**DEADLINE, "delay": 2}).begin().until_outer()
    assert [driver.state.regions[name].step for name in ("east", "west")] == [6, 4]
    for site in APART:
        driver.send(driver.announcement(site, 0))
    driver.work()
    assert [len(anchors_of(driver, name)) for name in ("east", "west")] == [1, 0]
    driver.pass_time(29)
    driver.send(driver.contribution("a"))
    assert "outer round 1 goes on without west at 10:00:30 UTC" in driver.words
    driver.pass_time(1)
    assert [(job.region, job.step) for job in pending(driver.state)] == [("west", 5)]
    driver.work()
    assert driver.state.outer is None
    assert driver.logs["west"][-2]["step"] == 5
    assert "before" not in anchors_of(driver, "west")[0]
    assert driver.summaries[0].late == ["a", "b"]
    assert driver.state.regions["west"].tokens == 7
    assert driver.finish().status is RunStatus.SUCCEEDED


def test_a_site_without_rounds_that_announces_late_says_itself_what_counts_next_time():
    driver = Driver(ALONE, steps=6, every=2, exchange="none", outer=DEADLINE).begin().until_outer()
    for site in "ab":
        driver.send(driver.announcement(site, 0))
    driver.pass_time(30)
    driver.work()
    (anchor,) = anchors_of(driver, "yonder")
    assert anchor["before"] == START.parameters
    assert driver.state.regions["yonder"].apart
    assert driver.state.regions["yonder"].tokens == 0
    for site in ALONE:
        driver.send(driver.arrival(site, tokens=14))
    assert driver.state.outer.weights == {"here": 14, "there": 14, "yonder": 14}
