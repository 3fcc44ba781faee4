"""When a round closes, and which copy is a region's."""

from datetime import timedelta

import pytest

from api.specs import RoundsSpec
from coordinator.events import SiteLost
from coordinator.quorum import agreed_copies, all_announced, allowance_s, may_close
from coordinator.records import FragmentRound, Round
from coordinator.state import due_at
from coordinator.transitions import with_region
from tests.unit.coordinator.runs import NOW, Driver, sent

SENT = sent("sent", tokens=1)
THREE = {"a": "west", "b": "west", "c": "east"}
FIVE = dict.fromkeys("abcde", "west")


@pytest.mark.parametrize(
    ("delays", "seconds"),
    [
        ([], 60),
        ([1.0] * 3, 60),
        ([1.0] * 4, 10),
        ([20.0] * 8, 30),
        ([20.0, 24.0] * 4, 22 + 6 * 2),
        ([100.0, 300.0] * 4, 600),
        ([600.0] * 8, 600),
        ([600.5] * 8, 10),
        ([2.0] * 7 + [500.0], 10),
    ],
)
def test_a_site_is_waited_for_by_its_own_delays(delays, seconds):
    assert allowance_s(delays, RoundsSpec()) == pytest.approx(seconds)
    assert allowance_s(delays, RoundsSpec(deadline_s=3)) == 3


@pytest.mark.parametrize(
    ("answers", "least", "in_time", "at_the_deadline"),
    [
        ("", 1, False, False),
        ("ab", 1, False, False),
        ("abc", 1, False, True),
        ("abcd", 1, False, True),
        ("abcde", 1, True, True),
        ("abcd", 4, False, True),
        ("abc", 4, False, False),
        ("abcde", 5, True, True),
    ],
)
def test_all_live_members_at_once_or_half_of_them_at_the_deadline(answers, least, in_time, at_the_deadline):
    driver = Driver(FIVE, min_sites=least, deadline_s=5).begin()
    round_ = Round(
        step=1,
        contributions=dict.fromkeys(answers[::2], SENT),
        abstentions=dict.fromkeys(answers[1::2], "none"),
        first_answer=NOW if answers else None,
    )
    state = with_region(driver.state, "west", round=round_)
    west = state.regions["west"]
    assert may_close(state, west, NOW) is in_time
    assert may_close(state, west, NOW + timedelta(seconds=4.999)) is in_time
    assert may_close(state, west, NOW + timedelta(seconds=5)) is at_the_deadline
    assert in_time or due_at(state) == (NOW + timedelta(seconds=5) if at_the_deadline else None)


def test_answers_of_absent_members_do_not_make_a_quorum():
    driver = Driver(FIVE, min_sites=2, deadline_s=5).begin()
    driver.send(driver.contribution("a"))
    driver.send(driver.contribution("b"))
    driver.send(SiteLost("a", "no heartbeat"))
    driver.pass_time(10)
    assert not driver.state.regions["west"].round.frozen
    for site in "cde":
        driver.send(SiteLost(site, "no heartbeat"))
    assert driver.live() == ["b"]
    assert not driver.state.regions["west"].round.frozen
    assert "1 of at least 2 sites there: a (away since 10:00:00 UTC: no heartbeat" in driver.words


@pytest.mark.parametrize(
    ("copies", "agreed"),
    [
        ({"a": "x"}, ("x",)),
        ({"a": "x", "b": "y", "c": "y"}, ("y",)),
        ({"b": "y", "a": "x"}, ("x", "y")),
        ({"a": "z", "b": "z", "c": "y", "d": "x"}, ("x", "y", "z")),
        ({"a": "y", "b": "y", "c": "y", "d": "x", "e": "x"}, ("y",)),
    ],
)
def test_a_strict_majority_decides_or_all_copies_count(copies, agreed):
    assert agreed_copies(copies, list(copies)) == agreed
    assert agreed_copies(copies, list(reversed(copies))) == agreed
    assert agreed_copies(copies | {"stranger": "y", "other": "y"}, list(copies)) == agreed


def test_all_announced():
    driver = Driver(THREE, steps=1, every=1).begin().until_outer()
    assert not all_announced(FragmentRound(copies={"a": "x", "b": "x"}), driver.state)
    assert all_announced(FragmentRound(copies=dict.fromkeys("abc", "x")), driver.state)
    driver.send(SiteLost("c", "no heartbeat"))
    assert all_announced(FragmentRound(copies={"a": "x", "b": "x"}), driver.state)
    for site in "ab":
        driver.send(SiteLost(site, "no heartbeat"))
    assert not all_announced(FragmentRound(copies=dict.fromkeys("abc", "x")), driver.state)
