"""May a round close, which copy is a region's, and what a run waits for."""

import pytest

from api.schemas import RunStatus
from coordinator.quorum import agreed_copy, all_announced, may_close, waiting_for
from coordinator.records import FragmentRound, LayoutPresented, Round, Sent, StartRequested, StopRequested
from tests.unit.coordinator.runs import LAYOUT, Driver, digest_of

SENT = Sent(digest=digest_of("sent"), tokens=1)
THREE = {"a": "west", "b": "west", "c": "east"}


@pytest.mark.parametrize(
    ("contributed", "abstained", "closes"),
    [("", "", False), ("a", "", False), ("ab", "", True), ("a", "b", True), ("", "ab", True), ("b", "", False)],
)
def test_a_round_closes_when_every_member_has_answered(contributed, abstained, closes):
    round_ = Round(step=1, contributions=dict.fromkeys(contributed, SENT), abstentions=dict.fromkeys(abstained, "none"))
    assert may_close(round_, ["a", "b"]) is closes


@pytest.mark.parametrize(
    ("copies", "agreed"),
    [
        ({"a": "x"}, "x"),
        ({"a": "x", "b": "y", "c": "y"}, "y"),
        ({"a": "x", "b": "y"}, "x"),
        ({"b": "y", "a": "x"}, "x"),
        ({"a": "z", "b": "y", "c": "x", "d": "y", "e": "x"}, "y"),
    ],
)
def test_most_members_decide_which_copy_is_the_regions(copies, agreed):
    assert agreed_copy(copies, list(copies)) == agreed
    assert agreed_copy(copies, list(reversed(copies))) == agreed
    assert agreed_copy(copies | {"stranger": "y", "other": "y"}, list(copies)) == agreed


def test_all_announced():
    driver = Driver(THREE).begin()
    assert not all_announced(FragmentRound(copies={"a": "x", "b": "x"}), driver.state)
    assert all_announced(FragmentRound(copies=dict.fromkeys("abc", "x")), driver.state)


def test_a_sentence_for_every_wait():
    driver = Driver(THREE, steps=2, every=1, fragments=2)
    seen = [waiting_for(driver.state)]

    def note():
        if (words := waiting_for(driver.state)) != seen[-1]:
            seen.append(words)

    driver.send(StartRequested(THREE))
    note()
    for site in THREE:
        driver.send(LayoutPresented(site, 1, LAYOUT))
        note()
    driver.begin()
    note()
    while driver.state.step < 1 or driver.state.outer is not None:
        driver.exchange()
        note()
    while driver.exchange():
        pass
    note()
    for site in THREE:
        driver.send(driver.final(site))
        note()
    assert seen == [
        "not started yet: `isthmus run start` starts it",
        "waiting for 3 of 3 sites to join: a, b, c",
        "waiting for 2 of 3 sites to join: b, c",
        "waiting for 1 of 3 sites to join: c",
        "waiting for a to upload the initial parameters",
        "region east: step 1, waiting for 1 of 1 sites: c; region west: step 1, waiting for 2 of 2 sites: a, b",
        "region east: step 1, aggregating; region west: step 1, waiting for 2 of 2 sites: a, b",
        "region west: step 1, waiting for 2 of 2 sites: a, b",
        "region west: step 1, waiting for 1 of 2 sites: b",
        "region west: step 1, aggregating",
        "outer round 1, fragment 0 (0 of 2 done): waiting for the digests of a, b, c",
        "outer round 1, fragment 0 (0 of 2 done): waiting for the digests of b, c",
        "outer round 1, fragment 0 (0 of 2 done): waiting for the digests of c",
        "outer round 1, fragment 0 (0 of 2 done): waiting for uploads, or averaging",
        "outer round 1, fragment 1 (1 of 2 done): waiting for the digests of a, b, c",
        "outer round 1, fragment 1 (1 of 2 done): waiting for the digests of b, c",
        "outer round 1, fragment 1 (1 of 2 done): waiting for the digests of c",
        "outer round 1, fragment 1 (1 of 2 done): waiting for uploads, or averaging",
        "region east: step 2, waiting for 1 of 1 sites: c; region west: step 2, waiting for 2 of 2 sites: a, b",
        "all 2 steps done, waiting for the final digests of a, b, c",
        "all 2 steps done, waiting for the final digests of b, c",
        "all 2 steps done, waiting for the final digests of c",
        "all 2 steps done, digests equal",
    ]


def test_the_last_wait_may_be_for_the_model():
    driver = Driver({"a": "west"}, steps=1).begin().until_done()
    driver.send(driver.final("a", stored=False))
    assert driver.status is RunStatus.RUNNING
    assert waiting_for(driver.state) == "all 1 steps done, waiting for a to upload the parameters"


def test_a_stopped_run_says_why():
    driver = Driver(THREE)
    driver.send(StopRequested())
    assert waiting_for(driver.state) == "stopped by request at step 0 of 3"
