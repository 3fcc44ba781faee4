"""Regions that come to a run that goes on, in the state machine."""

import pytest

from api.schemas import Condition, RunStatus
from api.specs import Change
from coordinator.events import ChangeRequested, SiteAdded, SiteLost, SiteRemoved, StartRequested
from coordinator.records import Start
from tests.unit.coordinator.runs import START, Driver, digest_of

TWO = {"a": "west", "b": "east"}
WITH_BUFFERS = Start(parameters=START.parameters, buffers=digest_of("buffers"))


def kinds(log):
    return [(line["kind"], line["step"], line.get("fragment")) for line in log]


def test_its_log_begins_with_entry_0_and_the_newest_anchors():
    driver = Driver(TWO, steps=12, every=3, fragments=2, start=WITH_BUFFERS).begin().until_outer_round(2).until_step(7)
    driver.send(SiteAdded("c", "north"))
    driver.send(SiteAdded("c", "north"))
    assert list(driver.state.regions) == ["east", "north", "west"]
    log, west = driver.logs["north"], driver.logs["west"]
    assert kinds(log) == [("start", 0, None), ("anchor", 6, 0), ("anchor", 6, 1), ("anchor", 6, 2)]
    assert log[0] == west[0]
    anchors = {line["fragment"]: line for line in west if line["kind"] == "anchor"}
    for line in log[1:]:
        own = ("seq", "previous", "participants", "before")
        known = {name: value for name, value in anchors[line["fragment"]].items() if name not in own}
        assert {name: value for name, value in line.items() if name not in own} == known
        assert line["participants"] == []
    assert [line.get("before", "none") for line in log[1:]] == [None, None, "none"]
    resume = driver.state.entrance("north")
    assert resume.position == driver.state.regions["north"].head
    theirs = driver.state.entrance("west")
    assert resume.model_dump(exclude={"position"}) == theirs.model_dump(exclude={"position"})


def test_its_rounds_begin_at_the_step_of_the_anchors_and_the_others_wait_at_the_next_outer_round():
    driver = Driver(TWO, steps=9, every=3).begin().until_outer_round(1).until_step(5)
    driver.send(SiteAdded("c", "north"))
    assert driver.state.regions["north"].round.step == 4
    driver.catch_up("c")
    while driver.state.regions["west"].step < 6 or driver.state.regions["east"].step < 6:
        driver.send(driver.contribution("a" if driver.state.regions["west"].step < 6 else "b"))
        driver.work()
    assert driver.words == "region north: step 4, waiting for 1 of 1 sites: c"
    for _ in range(3):
        driver.send(driver.contribution("c", tokens=11))
        driver.work()
    assert driver.state.outer.weights == {"east": 21, "north": 33, "west": 21}
    assert driver.finish().status is RunStatus.SUCCEEDED
    assert {line["region"] for line in driver.logs["west"][-1]["participants"]} == {"east", "north", "west"}


def test_outer_rounds_go_on_without_it_while_nobody_is_there():
    driver = Driver(TWO, steps=9, every=3).begin().until_outer_round(1)
    driver.send(SiteAdded("c", "north"))
    driver.until_outer_round(2)
    assert kinds(driver.logs["north"]) == [("start", 0, None), ("anchor", 3, 0), ("anchor", 6, 0)]
    assert driver.logs["north"][-1]["before"] is None
    driver.catch_up("c")
    assert driver.finish().status is RunStatus.SUCCEEDED


def test_before_the_first_outer_round_it_begins_with_entry_0():
    driver = Driver(TWO, steps=4, every=3).begin().until_step(1)
    driver.send(SiteAdded("c", "north"))
    assert kinds(driver.logs["north"]) == [("start", 0, None)]
    assert driver.state.entrance("north") is None
    driver.catch_up("c")
    assert driver.finish().status is RunStatus.SUCCEEDED
    assert sum(line["kind"] == "step" for line in driver.logs["north"]) == 4


@pytest.mark.parametrize("averaged", [0, 1])
def test_an_outer_round_that_is_open_goes_on_without_it(averaged):
    driver = Driver(TWO, steps=9, every=3, fragments=2, start=WITH_BUFFERS).begin().until_outer_round(1).until_outer()
    before = driver.state.anchors
    for fragment in range(averaged):
        for site in TWO:
            driver.send(driver.announcement(site, fragment))
        driver.work()
    assert (driver.state.anchors == before) == (averaged == 0)
    driver.send(SiteAdded("c", "north"))
    assert driver.state.outer.weights.keys() == {"east", "west"}
    assert [line["digest"] for line in driver.logs["north"][1:3]] == list(before)
    driver.catch_up("c")
    assert driver.member("c").condition is Condition.JOINING
    driver.until_outer_round(2)
    assert kinds(driver.logs["north"])[-3:] == [("anchor", 6, 0), ("anchor", 6, 1), ("anchor", 6, 2)]
    assert {line.get("before") for line in driver.logs["north"]} == {None}
    assert driver.state.entrance("north").position == driver.state.regions["north"].head
    driver.catch_up("c")
    assert driver.finish().status is RunStatus.SUCCEEDED


def test_anchors_that_are_on_their_way_are_not_yet_those_it_begins_with():
    """H = 4, two fragments by turns, delay 1: the mean of fragment 0 is there after step 6, and applied after 7."""
    outer = {"stagger": True, "delay": 1}
    driver = Driver(TWO, steps=12, every=4, fragments=2, outer=outer, start=WITH_BUFFERS).begin()
    driver.until_outer_round(2).until_outer()
    before = driver.state.anchors
    for site in TWO:
        driver.send(driver.announcement(site, 0))
    driver.work()
    assert driver.state.anchors[0] != before[0]
    driver.send(SiteAdded("c", "north"))
    log = driver.logs["north"]
    assert kinds(log) == [("start", 0, None), ("anchor", 5, 0), ("anchor", 5, 1), ("anchor", 5, 2)]
    assert [line["digest"] for line in log[1:]] == [*before, driver.state.buffers]
    assert driver.state.regions["north"].round is None
    driver.until_outer_round(3)
    assert kinds(log)[-1] == ("anchor", 7, 0)
    assert driver.state.entrance("north") is None
    driver.catch_up("c")
    assert driver.finish().status is RunStatus.SUCCEEDED


def test_a_fragment_whose_first_anchor_is_on_its_way_is_that_of_entry_0():
    outer = {"stagger": True, "delay": 1}
    driver = Driver(TWO, steps=12, every=4, fragments=2, outer=outer).begin().until_outer_round(1).until_outer()
    for site in TWO:
        driver.send(driver.announcement(site, 1))
    driver.work()
    assert driver.state.anchors[1] is not None
    driver.send(SiteAdded("c", "north"))
    assert kinds(driver.logs["north"]) == [("start", 0, None), ("anchor", 3, 0)]
    assert driver.finish().status is RunStatus.SUCCEEDED


def test_its_log_has_the_changes_of_settings():
    driver = Driver(TWO, steps=12, every=3).begin()
    driver.send(ChangeRequested(Change(from_step=3, lr=2e-3)))
    driver.send(ChangeRequested(Change(from_step=4, every=4, k=16)))
    driver.until_outer_round(1).until_step(6)
    driver.send(SiteAdded("c", "north"))
    told = [(line["kind"], line.get("from_step"), line.get("k")) for line in driver.logs["north"][1:]]
    assert told == [("anchor", None, None), ("change", 3, 32), ("change", 4, 16)]
    assert driver.state.entrance("north").position.seq == 1
    driver.catch_up("c")
    assert driver.finish().status is RunStatus.SUCCEEDED
    assert [summary.step for summary in driver.summaries] == [3, 4, 8, 12]


def test_where_there_are_no_rounds_its_site_enters_behind_others_that_wait_already():
    driver = Driver(TWO, steps=6, every=2, exchange="none").begin().until_outer_round(1)
    driver.send(SiteAdded("c", "north"))
    assert kinds(driver.logs["north"]) == [("start", 0, None), ("anchor", 2, 0)]
    driver.refused(SiteAdded("d", "north"), "region_taken")
    driver.send(driver.arrival("a"))
    driver.catch_up("c")
    assert driver.member("c").condition is Condition.JOINING
    driver.until_outer_round(2)
    driver.catch_up("c")
    driver.send(driver.arrival("a"))
    driver.send(driver.arrival("b"))
    assert driver.words == "outer round 3, after step 6: 1 of 3 sites on their way: c"
    driver.send(driver.arrival("c", tokens=20))
    assert driver.state.outer.weights == {"east": 7, "north": 20, "west": 7}
    assert driver.finish().status is RunStatus.SUCCEEDED


def test_the_run_goes_on_if_its_sites_are_excluded_but_not_without_one_that_it_began_with():
    driver = Driver(TWO, steps=9, every=3, restarts=0).begin().until_outer_round(1)
    driver.send(SiteAdded("c", "north"))
    driver.take_seat("c")
    driver.send(driver.gone("c"))
    assert driver.member("c").condition is Condition.EXCLUDED
    assert "north" not in driver.words
    driver.until_outer_round(2)
    driver.send(SiteAdded("c", "north"))
    assert driver.member("c").attempt == 2
    driver.send(SiteRemoved("c", "removed"))
    assert driver.finish().status is RunStatus.SUCCEEDED
    driver = Driver(TWO, steps=9, every=3).begin().until_outer_round(1)
    driver.send(SiteAdded("c", "north"))
    driver.refused(SiteRemoved("b", "removed"), "last_site")
    for _ in range(driver.spec.rounds.restarts + 1):
        driver.send(driver.gone("b"))
    assert driver.status is RunStatus.FAILED


def test_a_region_that_comes_while_the_run_is_starting_is_one_that_it_begins_with():
    driver = Driver(TWO, steps=3, every=3)
    driver.send(StartRequested(TWO))
    driver.send(SiteAdded("c", "north"))
    assert driver.state.regions["north"].head is None
    driver.begin()
    assert {log[0]["kind"] for log in driver.logs.values()} == {"start"}
    assert driver.member("c").live
    driver.refused(SiteRemoved("c", "removed"), "last_site")


def test_it_may_come_when_all_is_done_and_it_may_be_cut_off_at_once():
    driver = Driver(TWO, steps=3, every=3).begin().until_done()
    driver.send(SiteAdded("c", "north"))
    assert driver.state.regions["north"].step == 3
    driver.catch_up("c")
    assert "waiting for the final digests of a, b, c" in driver.words
    driver.send(SiteLost("c", "no heartbeat"))
    assert driver.finish().status is RunStatus.SUCCEEDED
