"""Outer rounds whose fragments are due by turns, and whose anchors are applied later, in the state machine."""

import pytest

from api.schemas import RunStatus
from api.specs import Change
from coordinator.events import ChangeRequested, PauseRequested, ResumeRequested, SiteAdded, SiteLost
from coordinator.quorum import remaining
from coordinator.records import Start
from coordinator.waiting import waiting_for
from tests.unit.coordinator.runs import START, Driver, digest_of

THREE = {"a": "west", "b": "west", "c": "east"}
STREAMING = {"stagger": True, "delay": 1}
WITH_BUFFERS = Start(parameters=START.parameters, buffers=digest_of("buffers"))


def places(log):
    return [(line["fragment"], line["taken_after"], line["step"]) for line in log if line["kind"] == "anchor"]


@pytest.mark.parametrize("exchange", ["demo", "none"])
def test_a_whole_run(exchange):
    sites = THREE if exchange == "demo" else {"a": "here", "b": "there"}
    driver = Driver(sites, steps=7, every=4, fragments=2, exchange=exchange, outer=STREAMING).finish()
    assert driver.status is RunStatus.SUCCEEDED
    assert [summary.step for summary in driver.summaries] == [2, 4, 6, 7]
    assert [None in summary.fragments for summary in driver.summaries] == [True, False, False, False]
    for log in driver.logs.values():
        assert places(log) == [(0, 2, 3), (1, 4, 5), (0, 6, 7), (0, 7, 7), (1, 7, 7)]


def test_buffers_are_due_with_the_last_fragment():
    driver = Driver({"a": "west"}, steps=7, every=4, fragments=2, outer=STREAMING, start=WITH_BUFFERS).finish()
    expected = [(0, 2, 3), (1, 4, 5), (2, 4, 5), (0, 6, 7), (0, 7, 7), (1, 7, 7), (2, 7, 7)]
    assert places(driver.logs["west"]) == expected


def test_logs_with_rounds_are_entered_only_where_the_anchors_are_all_parameters():
    driver = Driver(THREE, steps=7, every=4, fragments=2, outer=STREAMING).begin().until_outer_round(3)
    assert driver.state.regions["west"].resume is None
    driver.finish()
    assert driver.state.regions["west"].resume.position == driver.state.regions["west"].head


def test_logs_without_rounds_are_entered_behind_any_outer_round_once_all_fragments_have_anchors():
    apart = {"a": "here", "b": "there"}
    driver = Driver(apart, steps=8, every=4, fragments=2, exchange="none", outer=STREAMING, snapshots=1).begin()
    driver.until_outer_round(1)
    assert driver.state.regions["here"].resume is None
    driver.until_outer_round(2)
    resume = driver.state.regions["here"].resume
    assert (resume.step, resume.outer_step, resume.outer_round) == (5, 4, 2)
    assert resume.anchors == list(driver.state.anchors)
    assert driver.finish().state.snapshots[-1].contents.step == 8


def test_rounds_go_on_until_the_anchors_are_due():
    driver = Driver({"a": "west"}, steps=9, every=4, outer={"delay": 2}).begin().until_outer()
    assert driver.state.outer.step == 4
    for step in (5, 6):
        assert driver.state.regions["west"].round.step == step
        driver.send(driver.contribution("a"))
        driver.work()
    assert driver.state.regions["west"].round is None
    assert waiting_for(driver.state).startswith("outer round 1, fragment 0")
    driver.send(driver.announcement("a", 0))
    driver.work()
    assert driver.logs["west"][-1]["step"] == 6
    assert driver.state.outer is None
    assert driver.state.regions["west"].round.step == 7


def test_anchors_that_are_there_early_wait_for_their_step():
    driver = Driver({"a": "west"}, steps=9, every=4, outer={"delay": 2}).begin().until_outer()
    driver.send(driver.announcement("a", 0))
    driver.work()
    assert driver.logs["west"][-1]["kind"] == "step"
    assert waiting_for(driver.state).startswith("outer round 1: its anchors are applied after step 6; region west")
    driver.send(PauseRequested())
    driver.send(driver.contribution("a"))
    assert driver.work()
    assert driver.state.outer is not None, "nothing opens in a run that is paused"
    driver.send(ResumeRequested())
    driver.until_outer_round(1)
    assert places(driver.logs["west"]) == [(0, 4, 6)]


def test_a_region_that_dies_meanwhile_is_taken_along():
    driver = Driver({"a": "west", "b": "east"}, steps=9, every=4, outer={"delay": 2}).begin().until_outer()
    for site in "ab":
        driver.send(driver.announcement(site, 0))
    driver.send(SiteLost("b", "no heartbeat"))
    assert remaining(driver.state) == ["a"]
    while driver.state.outer is not None:
        assert driver.exchange()
    assert [region.step for region in driver.state.regions.values()] == [6, 6]
    assert driver.logs["east"][-1]["kind"] == "anchor"


def test_a_site_that_comes_meanwhile_is_waited_for_in_rounds_but_is_no_participant():
    driver = Driver(THREE, steps=9, every=4, outer={"delay": 2}).begin().until_outer()
    driver.send(SiteAdded("d", "west"))
    driver.catch_up("d")
    assert driver.member("d").live
    driver.refused(driver.announcement("d", 0), "not_a_participant")
    assert driver.state.regions["west"].round.step == 5
    driver.send(driver.contribution("d"))
    assert driver.finish().status is RunStatus.SUCCEEDED


def test_after_a_change_of_h_turns_are_left_out_that_come_while_anchors_are_on_their_way():
    """H = 6, two fragments: turns after 3, 6, 9, ...; with H = 4 from step 10 on after 10, 12, 14, ...; delay 1."""
    driver = Driver(THREE, steps=16, every=6, fragments=2, outer=STREAMING).begin().until_step(2)
    driver.send(ChangeRequested(Change(from_step=10, every=4)))
    error = driver.refused(ChangeRequested(Change(from_step=11, every=2)), "bad_change")
    assert "below 1" in error.detail
    assert driver.finish().status is RunStatus.SUCCEEDED
    assert [summary.step for summary in driver.summaries] == [3, 6, 9, 12, 14, 16]
    for log in driver.logs.values():
        assert places(log)[:5] == [(0, 3, 4), (1, 6, 7), (0, 9, 10), (1, 12, 13), (0, 14, 15)]


def test_encodings_are_asked_of_one_site_in_each_region_and_listed():
    driver = Driver(THREE, steps=1, every=1, outer={"codec": "int8"}).begin().until_outer()
    copy = digest_of("copy")
    for site in THREE:
        driver.send(driver.announcement(site, 0, digest=copy, stored=False))
    assert not driver.work()
    fragment = driver.state.outer.fragments[0]
    assert [fragment.upload(region, copy) for region in ("east", "west")] == [None, None]
    for site in THREE:
        driver.send(driver.announcement(site, 0, digest=copy))
    assert driver.work()
    lines = [(line["region"], line["uploads"]) for line in driver.logs["west"][-1]["participants"]]
    assert lines == [(region, [digest_of("upload", region, copy)]) for region in ("east", "west")]


def test_without_rounds_settings_change_behind_late_anchors():
    """Turns after 2, 4, 6, ..., anchors one step later; with H = 6 from step 6 on turns after 9 and 12."""
    apart = {"a": "here", "b": "there"}
    driver = Driver(apart, steps=13, every=4, fragments=2, exchange="none", outer=STREAMING).begin()
    error = driver.refused(ChangeRequested(Change(from_step=3, lr=0.5)), "step_open")
    assert error.context == {"from_step": 4}
    error = driver.refused(ChangeRequested(Change(from_step=5, lr=0.5)), "not_behind_an_outer_step")
    assert "its delay of 1: with H = 4 before it make that 4 or 6" in str(error)
    driver.send(ChangeRequested(Change(from_step=6, every=6)))
    assert driver.finish().status is RunStatus.SUCCEEDED
    assert [summary.step for summary in driver.summaries] == [2, 4, 6, 9, 12, 13]
    kinds = [(line["kind"], line["step"]) for line in driver.logs["here"]]
    assert kinds[:5] == [("start", 0), ("anchor", 3), ("anchor", 5), ("change", 5), ("anchor", 7)]
