"""Members that fail, leave, come back, catch up, are late, are added and removed: one example of each rule."""

import re
from datetime import timedelta

import pytest

from api.schemas import Condition, RunStatus
from coordinator.events import (
    Aggregated,
    Announced,
    AnsweredLate,
    CaughtUp,
    Norm,
    ProcessesGone,
    SeatTaken,
    SiteAdded,
    SiteBack,
    SiteLost,
    SiteRemoved,
    StartRequested,
    StartUploaded,
    Ticked,
)
from coordinator.records import Start
from coordinator.state import AggregateRound, due_at, pending, transition
from coordinator.waiting import reason_of
from tests.unit.coordinator.runs import NOW, START, Driver, digest_of

TWO = {"a": "west", "b": "west"}
THREE = {"a": "west", "b": "west", "c": "west"}
APART = {"a": "west", "b": "west", "c": "east"}
LOST = "no heartbeat for more than 15 s"


def condition(driver, site):
    return driver.member(site).condition


# --- agents -----------------------------------------------------------------------------------------------------------


def test_a_lost_site_is_not_waited_for_and_comes_back_by_a_heartbeat():
    driver = Driver(TWO).begin()
    driver.send(SiteLost("stranger", LOST))
    driver.send(driver.contribution("a"))
    driver.now = NOW.replace(second=20)
    driver.send(SiteLost("b", LOST))
    assert (condition(driver, "b"), driver.member("b").since) == (Condition.AWAY, driver.now)
    assert pending(driver.state) == [AggregateRound("west", 1)]
    driver.work()
    driver.send(SiteLost("b", "another reason"))
    assert driver.member("b").away == LOST
    driver.send(SiteBack("b"))
    assert driver.live() == ["a", "b"]
    assert driver.member("b").attempt == 1
    driver.send(driver.contribution("a"))
    assert not pending(driver.state)
    assert driver.finish().status is RunStatus.SUCCEEDED


def test_a_site_that_comes_back_without_its_ranks_is_not_waited_for_until_others_have_caught_up():
    driver = Driver(TWO).begin()
    driver.send(SiteLost("b", LOST))
    driver.send(SiteBack("b", ranks=False))
    assert (condition(driver, "b"), driver.member("b").attempt) == (Condition.JOINING, 1)
    driver.send(driver.contribution("a"))
    assert pending(driver.state) == [AggregateRound("west", 1)]
    driver.work()
    driver.catch_up("b")
    assert driver.live() == ["a", "b"]


def test_an_answer_brings_an_absent_site_back():
    driver = Driver(TWO).begin()
    driver.send(SiteLost("b", LOST))
    driver.send(driver.contribution("b"))
    assert driver.live() == ["a", "b"]
    assert not pending(driver.state)


def test_a_run_that_everybody_has_left_waits_and_goes_on():
    driver = Driver(TWO).begin()
    for site in TWO:
        driver.send(SiteLost(site, LOST))
    driver.pass_time(86_400)
    assert driver.status is RunStatus.RUNNING
    assert "0 of at least 1 sites there: a (away since" in driver.words
    driver.send(SiteBack("a"))
    assert driver.finish().status is RunStatus.SUCCEEDED
    assert [line["site"] for line in driver.logs["west"][-1]["contributors"]] == ["a"]


# --- ranks ------------------------------------------------------------------------------------------------------------


def test_ranks_that_fail_are_asked_for_again():
    driver = Driver(TWO).begin()
    driver.take_seat("b")
    driver.send(driver.contribution("a"))
    driver.send(driver.gone("b", 3, rank=1, detail="a traceback\nboom"))
    member = driver.member("b")
    assert (member.condition, member.attempt, member.seat, member.ready) == (Condition.JOINING, 2, None, False)
    assert member.failure == "rank 1: exit code 3: boom\na traceback\nboom"
    assert driver.state.assigned == {"a": 1, "b": 2}
    assert driver.send(ProcessesGone("b", 1, 3)).state == driver.state
    driver.work()
    driver.refused(SeatTaken("b", 1, digest_of("old")), "stale_attempt")
    contribution = driver.contribution("b")
    driver.catch_up("b")
    assert driver.live() == ["a", "b"]
    driver.send(driver.contribution("a"))
    assert driver.words.startswith("region west: step 2, waiting for 1 of 2 sites: b")
    driver.send(contribution)
    assert driver.finish().status is RunStatus.SUCCEEDED


@pytest.mark.parametrize(
    ("code", "how", "failure"),
    [
        (1, {}, "exit code 1"),
        (-9, {"rank": 0}, "rank 0: killed (out of memory?)"),
        (137, {}, "killed (out of memory?)"),
        (0, {}, "its training script ended before the run did, at step 0 of 3"),
    ],
)
def test_how_ranks_failed(code, how, failure):
    driver = Driver(TWO).begin()
    driver.send(driver.gone("b", code, **how))
    assert driver.member("b").failure == failure


def test_processes_that_nobody_saw_end_change_nothing():
    driver = Driver(TWO).begin()
    assert driver.send(ProcessesGone("b", 1)).state == driver.state
    assert driver.live() == ["a", "b"]


def test_requests_of_an_attempt_that_is_over_are_refused():
    driver = Driver(TWO, steps=1, every=1).begin()
    old = [driver.contribution("b"), driver.abstention("b"), driver.refusal("b"), driver.caught_up("b")]
    old += [driver.announcement("b", 0), driver.final("b"), driver.layout("b"), StartUploaded("b", 1, START)]
    driver.send(driver.gone("b"))
    for event in old:
        driver.refused(event, "stale_attempt")


def test_too_many_failures_in_a_row_exclude_a_site():
    driver = Driver(TWO, steps=9, restarts=2).begin()
    for _ in range(2):
        driver.send(driver.gone("b"))
        driver.catch_up("b")
    assert driver.member("b").failures == 2
    driver.send(driver.contribution("b"))
    assert driver.member("b").failures == 0
    driver.send(driver.gone("b"))
    driver.send(driver.contribution("a"))
    driver.work()
    assert [line["site"] for line in driver.logs["west"][-1]["contributors"]] == ["a", "b"]
    assert driver.member("b").failures == 1  # it failed after what is listed here
    driver.catch_up("b")
    driver.send(driver.contribution("b"))
    for _ in range(3):
        driver.send(driver.gone("b", 5))
    assert condition(driver, "b") is Condition.EXCLUDED
    assert driver.member("b").excluded == "exit code 5"
    assert driver.state.assigned == {"a": 1}
    driver.refused(SeatTaken("b", 5, digest_of("seat")), "excluded")
    assert driver.finish().status is RunStatus.SUCCEEDED


BROKEN = "[rank0]: Traceback\n[rank0]: ImportError: no module named nothing"


def test_an_error_that_comes_again_before_the_first_step_is_not_tried_a_third_time():
    driver = Driver(TWO, steps=2, restarts=9)
    driver.send(StartRequested(TWO))
    driver.send(driver.gone("b", rank=0, detail=BROKEN))
    assert (condition(driver, "b"), driver.attempt("b")) == (Condition.JOINING, 2)
    driver.send(driver.gone("b", rank=1, detail=BROKEN.replace("[rank0]", "[rank1]")))
    assert condition(driver, "b") is Condition.EXCLUDED
    assert driver.member("b").excluded.splitlines()[::2] == [
        "the same twice before its first step, rank 1: exit code 1: [rank1]: ImportError: no module named nothing",
        "[rank1]: ImportError: no module named nothing",
    ]
    driver.begin()
    for _ in range(2):
        driver.send(driver.gone("a", 0))
    assert driver.state.ended_because.startswith("no site is left in region west: site a, the same twice before its f")


@pytest.mark.parametrize(
    "ends",
    [
        ((1, "ValueError: 1"), (1, "ValueError: 2"), (1, "ValueError: 1")),
        ((-9, "killed"), (-9, "killed"), (137, "killed"), (137, "killed")),
        ((1, ""), (1, "")),  # nobody knows whether that is the same
    ],
)
def test_what_may_be_an_accident_is_tried_again(ends):
    driver = Driver(TWO, restarts=9).begin()
    for code, detail in ends:
        driver.send(driver.gone("b", code, detail=detail))
    assert (condition(driver, "b"), driver.attempt("b")) == (Condition.JOINING, 1 + len(ends))


def test_after_its_first_step_a_site_has_all_its_restarts():
    driver = Driver(TWO, steps=9, restarts=2).begin().until_step(1)
    for _ in range(2):
        driver.send(driver.gone("b", detail=BROKEN))
        assert condition(driver, "b") is Condition.JOINING
    driver.send(driver.gone("b", detail=BROKEN))
    assert condition(driver, "b") is Condition.EXCLUDED


def fail_and_go_on(driver, *ends):
    """Site b fails like this, comes back and contributes, again and again; the delays in between, in seconds."""
    delays = []
    for code, detail in ends:
        driver.send(driver.gone("b", code, rank=0, detail=detail))
        restart_at = driver.member("b").restart_at
        delays.append((restart_at - driver.now).total_seconds() if restart_at else 0)
        assert ("b" in driver.state.assigned) == (not delays[-1])
        driver.pass_time(delays[-1])
        assert "b" in driver.state.assigned
        driver.catch_up("b")
        driver.until_step(driver.state.step + 1)
    return delays


def test_an_error_that_comes_again_and_again_is_an_alarm_and_delays_the_next_attempt():
    driver = Driver(TWO, steps=99).begin().until_step(1)
    assert fail_and_go_on(driver, *[(1, BROKEN)] * 2) == [0, 0]
    assert not driver.state.alarms
    assert fail_and_go_on(driver, *[(1, BROKEN)] * 7) == [10, 20, 40, 80, 160, 300, 300]
    (alarm,) = driver.state.alarms
    assert re.sub(r"\d{4}-\d\d-\d\d at \d\d:\d\d:\d\d", "THEN", alarm) == (
        "site b has failed again and again, 9 times in a row with the same error, the last time on THEN UTC, step 9: "
        "exit code 1: ImportError: no module named nothing; mend its training script or its data there, or take it out "
        "(`isthmus run remove-site drill-1 b`)"
    )
    driver.send(driver.gone("b", detail=BROKEN))
    at = f"{driver.now + timedelta(seconds=300):%H:%M:%S} UTC"
    assert reason_of(driver.member("b"), driver.state).startswith(f"its ranks are started again at {at}; attempt 11 af")
    driver.send(SiteBack("b", ranks=False))  # somebody has mended it, and has started its agent again
    assert driver.state.assigned["b"] == 11
    assert driver.finish().status is RunStatus.SUCCEEDED


def test_a_script_that_ends_early_again_and_again_fails_alike_at_whatever_step():
    driver = Driver(TWO, steps=99).begin().until_step(1)
    assert fail_and_go_on(driver, *[(0, "")] * 3) == [0, 0, 10]


WARNING = (
    "\n[rank0]:[W1130 14:11:5{}.123456789 ProcessGroupNCCL.cpp:1496] Warning: process group has NOT been destroyed"
)


def test_numbers_and_addresses_make_no_other_error():
    driver = Driver(TWO, steps=99).begin().until_step(1)
    ends = [(1, f"RuntimeError: bad sample {n} in <Shard at 0x7f{n}c>") for n in range(3)]
    assert fail_and_go_on(driver, *ends) == [0, 0, 10]
    assert "bad sample 2 in" in driver.state.alarms[0]


def test_what_torch_says_last_hides_no_error():
    driver = Driver(TWO, steps=99).begin().until_step(1)
    assert fail_and_go_on(driver, *[(1, BROKEN + WARNING.format(digit)) for digit in range(3)]) == [0, 0, 10]
    assert "exit code 1: ImportError: no module named nothing;" in driver.state.alarms[0]


@pytest.mark.parametrize(
    "ends",
    [
        [(-9, "killed")] * 4,
        [(-15, "terminated")] * 4,
        [(3, "")] * 4,
        [(1, BROKEN), (1, BROKEN), (-9, BROKEN), (1, BROKEN), (1, BROKEN)],
        [(1, BROKEN), (1, BROKEN), (1, "ValueError: 1"), (1, BROKEN), (2, BROKEN)],
    ],
)
def test_accidents_and_other_errors_in_between_are_no_alarm(ends):
    driver = Driver(TWO, steps=99).begin().until_step(1)
    assert not any(fail_and_go_on(driver, *ends))
    assert not driver.state.alarms


def test_failures_count_anew_after_an_outer_round_where_there_are_no_rounds():
    driver = Driver({"a": "east", "b": "west"}, steps=4, every=1, exchange="none", restarts=1).begin()
    for number in (1, 2, 3):
        driver.send(driver.gone("b", detail=BROKEN))
        assert condition(driver, "b") is Condition.JOINING
        driver.catch_up("b")
        driver.until_outer_round(number)
        assert driver.member("b").failures == 0


def test_a_region_without_sites_is_the_end_of_a_run():
    driver = Driver({**TWO, "c": "east"}, restarts=0, steps=2, every=1).begin()
    driver.send(SiteRemoved("b", "removed by an administrator"))
    driver.refused(SiteRemoved("a", "removed by an administrator"), "last_site")
    assert driver.status is RunStatus.RUNNING
    driver.send(driver.gone("a", 1, rank=0, detail="traceback\nboom"))
    assert driver.status is RunStatus.FAILED
    assert driver.state.ended_because == (
        "no site is left in region west: site a, rank 0: exit code 1: boom\ntraceback\nboom; "
        "site b, removed by an administrator"
    )


def test_a_second_seat_of_an_attempt_joins_again():
    driver = Driver(TWO).begin()
    driver.take_seat("b", "first")
    driver.send(driver.layout("b"))
    driver.send(driver.caught_up("b"))
    driver.take_seat("b", "first")  # the answer to the first request was lost
    assert driver.live() == ["a", "b"]
    driver.take_seat("b", "second")
    assert (condition(driver, "b"), driver.member("b").attempt) == (Condition.JOINING, 1)
    driver.refused(driver.caught_up("b"), "no_layout")
    driver.refused(SeatTaken("b", 2, digest_of("third")), "stale_attempt")
    driver.refused(SeatTaken("stranger", 1, digest_of("third")), "not_a_member")
    driver.catch_up("b")
    assert driver.live() == ["a", "b"]


@pytest.mark.parametrize("answer", [Driver.contribution, Driver.abstention])
def test_what_lost_ranks_had_answered_stays_and_the_next_ones_cannot_answer_again(answer):
    driver = Driver(THREE).begin()
    driver.send(driver.contribution("a"))
    driver.send(answer(driver, "b"))
    driver.send(driver.gone("b"))
    assert driver.words.startswith("region west: step 1, waiting for 1 of 2 sites: c")
    driver.catch_up("b")
    assert driver.words.startswith("region west: step 1, waiting for 1 of 3 sites: c")
    driver.refused(driver.contribution("b", variant="other"), "other_bytes")
    driver.send(driver.refusal("b"))
    driver.send(SiteRemoved("a", "removed by an administrator"))
    driver.send(driver.contribution("c"))
    assert pending(driver.state) == [AggregateRound("west", 1)]
    driver.work()
    header = driver.logs["west"][-1]
    assert sorted(line["site"] for line in (*header["contributors"], *header["abstentions"])) == ["a", "b", "c"]


def test_new_ranks_may_send_something_better_than_what_was_refused():
    driver = Driver(TWO).begin()
    driver.send(driver.refusal("b"))
    driver.send(driver.gone("b"))
    driver.catch_up("b")
    assert driver.words.startswith("region west: step 1, waiting for 1 of 2 sites: a")
    driver.send(driver.contribution("b"))
    assert driver.state.regions["west"].round.refusals == {}


def test_a_round_that_everybody_has_answered_waits_for_sites_enough():
    """Of the lost ranks nobody counts, but what they have answered is not asked for again."""
    driver = Driver(TWO, min_sites=2).begin()
    driver.send(driver.contribution("a"))
    driver.send(driver.gone("a"))
    driver.send(driver.contribution("b"))
    driver.pass_time(3600)
    assert not pending(driver.state)
    assert driver.words.startswith("region west: step 1, 1 of at least 2 sites there: a (joining since 10:00:00 UTC")
    driver.catch_up("a")
    assert pending(driver.state) == [AggregateRound("west", 1)]


@pytest.mark.parametrize("answer", [Driver.contribution, Driver.abstention])
def test_what_a_region_has_accepted_is_listed_before_it_is_taken_along(answer):
    driver = Driver({**TWO, "c": "east"}, steps=6, every=2).begin()
    driver.send(answer(driver, "a"))
    for site in "ab":
        driver.send(SiteLost(site, LOST))
    while driver.state.outer is None:
        driver.exchange()
    assert driver.logs["west"][-1]["step"] == 1
    while driver.state.outer is not None:
        driver.exchange()
    assert [(line["kind"], line["step"]) for line in driver.logs["west"]] == [("start", 0), ("step", 1), ("anchor", 2)]
    for site in "ab":
        driver.send(SiteBack(site))
    assert driver.finish().status is RunStatus.SUCCEEDED


def test_a_round_that_is_being_aggregated_is_not_dropped_by_an_outer_round():
    driver = Driver({**TWO, "c": "east"}, steps=6, every=2).begin()
    for site in "ab":
        driver.send(driver.contribution(site))
    for site in "ab":
        driver.send(SiteLost(site, LOST))
    for _ in range(2):
        driver.send(driver.contribution("c"))
        step = driver.state.regions["east"].step + 1
        driver.send(Aggregated("east", step, (digest_of("parts"),), {"c": Norm(1.0)}))
    assert driver.state.outer is None
    assert pending(driver.state) == [AggregateRound("west", 1)]
    driver.work()
    assert driver.state.outer is not None


def test_catching_up_ends_near_the_head_of_the_log():
    driver = Driver(TWO, steps=12).begin()
    driver.send(driver.gone("b"))
    driver.until_step(8)
    driver.take_seat("b")
    driver.send(driver.layout("b"))
    entry = driver.logs["west"][3]
    behind = driver.state.regions["west"].head.model_copy(update={"seq": entry["seq"]})
    driver.send(driver.caught_up("b", behind))
    assert condition(driver, "b") is Condition.JOINING
    for seq, hash_ in ((8, "1" * 64), (9, "1" * 64)):
        driver.refused(driver.caught_up("b", behind.model_copy(update={"seq": seq, "hash": hash_})), "off_chain")
    driver.send(driver.contribution("a"))
    near = driver.position(driver.state.regions["west"]).model_copy(update={"seq": 4})
    driver.send(driver.caught_up("b", near))  # while step 9 is being aggregated
    assert condition(driver, "b") is Condition.ACTIVE
    driver.refused(driver.contribution("b"), "closed_without_you")
    driver.work()
    driver.send(driver.contribution("a"))
    assert driver.words.startswith("region west: step 10, waiting for 1 of 2 sites: b")


# --- late sites -------------------------------------------------------------------------------------------------------


def test_late_sites_are_benched_and_released_by_time_once_they_have_caught_up():
    driver = Driver(THREE, steps=9, late_rounds=2, bench_s=30, deadline_s=5).begin()
    for missed in (1, 2):
        driver.send(driver.contribution("a"))
        driver.pass_time(1)
        driver.send(driver.contribution("b"))
        assert due_at(driver.state) == NOW.replace(second=5 * missed)
        driver.pass_time(4)
        assert driver.member("c").missed == missed
        driver.work()
    assert condition(driver, "c") is Condition.BENCHED
    driver.send(driver.contribution("a"))
    driver.send(driver.contribution("b"))
    driver.work()
    assert driver.state.step == 3
    assert due_at(driver.state) is None
    driver.send(AnsweredLate("c", 1, 1))
    assert due_at(driver.state) == NOW.replace(second=10 + 30)
    driver.now = NOW.replace(second=39)
    driver.send(Ticked())
    assert condition(driver, "c") is Condition.BENCHED
    driver.pass_time(1)
    assert driver.live() == ["a", "b", "c"]


def test_an_answer_releases_a_benched_site():
    driver = Driver(THREE, late_rounds=1, deadline_s=5).begin()
    driver.send(driver.contribution("a"))
    driver.send(driver.abstention("b"))
    driver.pass_time(5)
    driver.refused(driver.contribution("c"), "closed_without_you")
    driver.work()
    assert driver.live() == ["a", "b"]
    driver.send(driver.contribution("c"))
    assert driver.live() == ["a", "b", "c"]
    assert driver.member("c").missed == 0


def test_deadlines_and_benches_do_not_run_while_nobody_was_there():
    driver = Driver(THREE, late_rounds=1, deadline_s=5, bench_s=10).begin()
    driver.send(driver.contribution("a"))
    driver.send(driver.contribution("b"))
    driver.now = NOW.replace(minute=10)
    driver.send(Ticked(outage_s=10 * 60 - 1))
    assert not pending(driver.state)
    driver.pass_time(4)
    assert pending(driver.state)
    assert condition(driver, "c") is Condition.BENCHED
    driver.work()
    driver.send(driver.caught_up("c"))
    driver.now = NOW.replace(minute=20)
    driver.send(Ticked(outage_s=10 * 60 - 5))
    assert due_at(driver.state) == NOW.replace(minute=20, second=9)


def test_a_site_that_is_busy_with_a_closed_round_stays_benched_until_it_has_caught_up():
    driver = Driver(THREE, steps=9, late_rounds=1, deadline_s=5, bench_s=10).begin()
    for site in "ab":
        driver.send(driver.contribution(site))
    driver.pass_time(5)
    driver.work()
    driver.pass_time(3600)
    assert condition(driver, "c") is Condition.BENCHED
    driver.send(driver.caught_up("c"))
    assert condition(driver, "c") is Condition.ACTIVE


def test_the_deadline_learns_from_the_delays_of_those_who_are_missing():
    driver = Driver(TWO, steps=20).begin()
    for _ in range(4):
        driver.send(driver.contribution("a"))
        driver.pass_time(20)
        driver.send(driver.contribution("b"))
        driver.work()
    assert [driver.member(site).delays for site in "ab"] == [(0.0,) * 4, (20.0,) * 4]
    driver.send(driver.contribution("a"))
    assert (due_at(driver.state) - driver.now).total_seconds() == 30
    driver.send(driver.contribution("b"))
    driver.work()
    driver.send(driver.contribution("b"))
    assert (due_at(driver.state) - driver.now).total_seconds() == 10


class Quick(Driver):
    """Checks nothing after an event, for long runs."""

    def send(self, event):
        done = transition(self.state, event, self.now)
        self.state = done.state
        return done


def with_a_slow_site(delay, rounds):
    """Sites a and b answer a second after each entry, c so long after the newest that it has, from step 9 on.

    The driver after so many rounds, and how long they took.
    """
    driver = Quick(THREE, steps=10**6).begin()
    lasted, busy_with, done_at = [], 1, NOW + timedelta(seconds=3)
    for step in range(1, rounds + 1):
        begun, sure = driver.now, NOW + timedelta(days=99)
        driver.now += timedelta(seconds=1)
        for site in "ab":
            driver.send(driver.contribution(site))
        while True:
            driver.work()
            if busy_with and busy_with < step and done_at <= driver.now:
                driver.send(AnsweredLate("c", 1, busy_with))
                driver.send(driver.caught_up("c"))
                busy_with, done_at = driver.state.step + 1, driver.now + timedelta(seconds=delay)
            if driver.state.step == step:
                break
            driver.now = max(driver.now, min(due_at(driver.state) or sure, done_at if busy_with else sure))
            driver.send(Ticked())
            if busy_with == step and done_at <= driver.now and not pending(driver.state):
                driver.send(driver.contribution("c"))
                busy_with = None
        lasted.append((driver.now - begun).total_seconds())
        if busy_with is None:
            busy_with, done_at = step + 1, driver.now + timedelta(seconds=3 if step < 9 else delay)
    return driver, lasted


def test_a_site_that_becomes_slower_than_the_deadline_is_waited_for_in_the_end():
    driver, lasted = with_a_slow_site(31, rounds=400)
    assert lasted[:9] == [3] * 9
    assert 11 in lasted
    assert lasted[-100:] == [31] * 100
    assert condition(driver, "c") is Condition.ACTIVE


def test_a_site_that_is_too_slow_for_any_deadline_costs_a_short_wait_each_time_it_has_caught_up():
    driver, lasted = with_a_slow_site(700, rounds=5000)
    assert condition(driver, "c") is Condition.BENCHED
    assert sum(lasted[-2000:]) < 1.02 * 2000
    assert "rounds in a row, its answers come 699 s after the first; back when" in reason_of(
        driver.member("c"), driver.state
    )


def test_how_late_an_answer_was_counts_once_and_only_for_a_round_that_was_missed():
    driver = Driver(THREE, late_rounds=1).begin()
    driver.send(AnsweredLate("c", 1, 1))
    assert driver.member("c").delays == ()
    for site in "ab":
        driver.send(driver.contribution(site))
    driver.pass_time(60)
    driver.work()
    driver.now = NOW.replace(minute=1, second=30)
    driver.send(Ticked(outage_s=20))
    driver.refused(AnsweredLate("c", 2, 1), "stale_attempt")
    driver.send(AnsweredLate("c", 1, 0))
    assert driver.member("c").delays == ()
    for _ in range(2):
        driver.send(AnsweredLate("c", 1, 1))
        assert driver.member("c").delays == (70.0,)
    assert condition(driver, "c") is Condition.BENCHED


def test_a_refused_contribution_is_an_answer_until_a_better_one_comes():
    driver = Driver(TWO).begin()
    driver.send(driver.refusal("b", "tensor w: not finite"))
    assert driver.state.regions["west"].round.first_answer == driver.now
    driver.send(driver.refusal("a", "rubbish"))
    assert driver.logs["west"][-1]["refusals"] == [
        {"site": "a", "reason": "rubbish"},
        {"site": "b", "reason": "tensor w: not finite"},
    ]
    driver.send(driver.refusal("b"))
    driver.send(driver.contribution("b"))
    driver.send(driver.refusal("b"))
    driver.send(driver.contribution("a"))
    driver.work()
    assert driver.logs["west"][-1]["refusals"] == []
    assert [line["site"] for line in driver.logs["west"][-1]["contributors"]] == ["a", "b"]


# --- before the start -------------------------------------------------------------------------------------------------


def test_the_start_does_not_wait_for_sites_that_are_away():
    driver = Driver(THREE)
    driver.send(StartRequested(THREE))
    for site in "bc":
        driver.send(driver.layout(site))
    driver.refused(StartUploaded("b", 1, START), "not_the_donor")
    driver.send(SiteLost("a", LOST))
    assert driver.words == "waiting for b to upload the initial parameters"
    driver.send(StartUploaded("b", 1, START))
    assert (driver.status, driver.live()) == (RunStatus.RUNNING, ["b", "c"])
    driver.send(SiteBack("a"))
    driver.send(driver.layout("a"))
    assert condition(driver, "a") is Condition.JOINING
    driver.refused(StartUploaded("a", 1, Start(parameters=digest_of("other"))), "other_bytes")
    driver.send(driver.caught_up("a"))
    assert driver.live() == ["a", "b", "c"]


def test_the_start_needs_sites_enough():
    driver = Driver(TWO, min_sites=2)
    driver.send(StartRequested(TWO))
    driver.send(driver.layout("a"))
    driver.send(StartUploaded("a", 1, START))
    driver.send(SiteLost("b", LOST))
    assert driver.status is RunStatus.STARTING
    driver.send(SiteBack("b"))
    driver.send(driver.layout("b"))
    assert driver.status is RunStatus.RUNNING


def test_ranks_that_fail_before_the_start_are_asked_for_again():
    driver = Driver(TWO, restarts=1)
    driver.send(StartRequested(TWO))
    driver.send(driver.layout("b"))
    driver.send(driver.gone("b"))
    driver.send(driver.gone("a"))
    assert driver.state.assigned == {"a": 2, "b": 2}
    driver.send(driver.gone("a"))
    assert driver.state.assigned == {"b": 2}
    assert driver.begin().live() == ["b"]


# --- outer rounds -----------------------------------------------------------------------------------------------------


def test_an_outer_round_goes_on_without_participants_that_are_lost():
    driver = Driver(APART, steps=2, every=1).begin().until_outer()
    for site, copy in (("a", "west"), ("b", "west"), ("c", "east")):
        driver.send(driver.announcement(site, 0, digest=digest_of(copy), stored=copy == "east"))
    averaged = driver.average(1, 0)
    driver.send(SiteLost("a", LOST))
    driver.send(SiteLost("b", LOST))
    assert driver.send(averaged).state == driver.state  # of copies that count no more
    assert driver.work()
    (anchor,) = [line for line in driver.logs["west"] if line["kind"] == "anchor"]
    assert [part["region"] for part in anchor["participants"]] == ["east"]
    driver.send(SiteBack("a"))
    assert driver.finish().status is RunStatus.SUCCEEDED


def away(driver):
    """East is lost after one step of its own; until west has held an outer round without it."""
    driver.send(driver.contribution("c"))
    driver.work()
    driver.send(SiteLost("c", LOST))
    return driver.until_outer_round(1)


def anchors_of(driver, region):
    return [line for line in driver.logs[region] if line["kind"] == "anchor"]


def test_a_region_that_was_not_in_the_mean_keeps_what_it_did_and_its_tokens_count_next_time():
    driver = away(Driver(APART, steps=9, every=3, snapshots=3).begin())
    east = driver.state.regions["east"]
    assert (east.apart, east.resume, east.tokens) == (True, None, 7)
    assert anchors_of(driver, "east")[-1]["before"] == START.parameters
    assert "before" not in anchors_of(driver, "west")[-1]
    assert driver.work()
    assert driver.state.snapshots[-1].contents.positions.keys() == {"west"}
    driver.send(SiteBack("c"))
    driver.until_outer()
    assert driver.state.outer.weights == {"east": 28, "west": 42}
    driver.until_outer_round(2)
    east = driver.state.regions["east"]
    assert (east.apart, east.resume.position, east.tokens) == (False, east.head, 0)
    assert driver.finish().state.snapshots[-1].contents.positions.keys() == {"east", "west"}


def test_a_region_that_is_away_for_long_follows_the_anchors():
    """Whoever comes back need not read all of them. Nobody keeps anything after the last step."""
    driver = away(Driver(APART, steps=12, every=3, fragments=2).begin()).until_outer_round(2)
    assert [line["before"] is None for line in anchors_of(driver, "east")] == [False, False, True, True]
    east = driver.state.regions["east"]
    assert (east.apart, east.resume.position, east.tokens) == (False, east.head, 0)
    driver.until_outer_round(3)
    assert driver.state.regions["east"].resume.outer_round == 3
    driver.until_outer_round(4)
    assert [line["before"] for line in anchors_of(driver, "east")[2:]] == [None] * 6


def test_a_region_that_has_not_moved_follows_the_anchors():
    driver = Driver(APART, steps=6, every=3).begin()
    driver.send(SiteLost("c", LOST))
    driver.until_outer_round(1)
    assert driver.state.regions["east"].resume.position == driver.state.regions["east"].head
    assert anchors_of(driver, "east")[-1]["before"] is None


def test_a_region_that_is_lost_in_an_outer_round_keeps_what_it_did():
    driver = Driver(APART, steps=6, every=3, fragments=2).begin().until_outer()
    for site in APART:
        driver.send(driver.announcement(site, 0))
    driver.work()
    driver.send(SiteLost("c", LOST))
    driver.until_outer_round(1)
    in_the_mean, without = anchors_of(driver, "east")
    assert "before" not in in_the_mean
    assert without["before"] == START.parameters
    east = driver.state.regions["east"]
    assert (east.apart, east.resume, east.tokens) == (True, None, 0)


def test_after_the_last_step_nobody_keeps_anything():
    driver = Driver(APART, steps=3, every=3).begin().until_outer()
    driver.send(SiteLost("c", LOST))
    driver.until_outer_round(1)
    assert anchors_of(driver, "east")[-1]["before"] is None
    driver.send(SiteBack("c"))
    assert driver.finish().status is RunStatus.SUCCEEDED


def test_without_rounds_a_site_that_was_not_waited_for_keeps_what_it_did():
    """What that is, no log tells: new ranks enter at the anchors all the same."""
    driver = Driver({"a": "here", "b": "there"}, steps=8, every=2, exchange="none").begin()
    driver.send(SiteLost("b", LOST))
    driver.until_outer_round(1)
    there = driver.state.regions["there"]
    assert anchors_of(driver, "there")[-1]["before"] == START.parameters
    assert (there.apart, there.resume.position) == (True, there.head)
    driver.until_outer_round(2)
    assert anchors_of(driver, "there")[-1]["before"] is None


def test_a_region_that_is_away_is_taken_along():
    driver = Driver(APART, steps=6, every=3).begin()
    driver.send(driver.contribution("c"))
    driver.work()
    driver.send(SiteLost("c", LOST))
    driver.until_outer()
    assert driver.state.outer.weights == {"west": 42}
    driver.send(SiteBack("c"))
    driver.refused(driver.contribution("c"), "round_not_open")
    driver.refused(driver.announcement("c", 0), "not_a_participant")
    while driver.state.outer is not None:
        driver.exchange()
    assert driver.state.regions["east"].step == 3
    assert [line["kind"] for line in driver.logs["east"]] == ["start", "step", "anchor"]
    driver.refused(driver.contribution("c", step=3), "closed_without_you")
    assert driver.words.startswith("region east: step 4, waiting for 1 of 1 sites: c;")
    assert driver.finish().status is RunStatus.SUCCEEDED


def test_new_ranks_do_not_take_part_in_an_open_outer_round():
    driver = Driver(TWO, steps=2, every=1, fragments=2).begin().until_outer()
    driver.send(driver.announcement("b", 0))
    driver.send(driver.announcement("b", 1, digest=digest_of("astray"), stored=False))
    driver.send(driver.gone("b"))
    assert driver.state.outer.participants == {"a"}
    driver.catch_up("b")
    assert condition(driver, "b") is Condition.JOINING
    driver.refused(driver.announcement("b", 0), "not_a_participant")
    driver.exchange()
    driver.exchange()
    driver.send(SiteLost("a", LOST))  # nobody is left: whoever holds the log's head stands in
    driver.send(driver.caught_up("b"))
    assert driver.state.outer.participants == {"a", "b"}
    driver.send(driver.announcement("b", 1))
    while driver.state.outer is not None:
        assert driver.exchange()
    assert driver.state.regions["west"].resume.step == 1
    driver.send(SiteBack("a"))
    assert driver.finish().status is RunStatus.SUCCEEDED


def test_a_participant_that_was_away_is_heard_by_its_announcement():
    driver = Driver(TWO, steps=1, every=1).begin().until_outer()
    driver.send(SiteLost("b", LOST))
    driver.send(driver.announcement("b", 0, stored=False))
    assert driver.live() == ["a", "b"]
    driver.send(driver.announcement("a", 0, stored=False))
    driver.send(SiteLost("b", LOST))
    assert driver.words.endswith("waiting for the copies of a")


def test_where_a_log_may_be_entered():
    driver = Driver(APART, steps=6, every=2, fragments=2).begin()
    assert driver.state.regions["west"].resume is None
    while driver.state.outer_rounds < 1:
        driver.exchange()
    first = driver.state.regions["west"].resume
    assert (first.position.seq, first.step) == (4, 2)
    assert first.anchors == [digest_of("anchor", 1, 0), digest_of("anchor", 1, 1)]
    driver.until_outer()
    while driver.state.outer.fragments[0].anchor is None:
        driver.exchange()
    assert driver.state.regions["west"].resume == first
    while driver.state.outer_rounds < 2:
        driver.exchange()
    assert driver.state.regions["east"].resume.step == 4


# --- the end ----------------------------------------------------------------------------------------------------------


def test_the_end_does_not_wait_for_sites_that_are_not_live():
    driver = Driver(THREE, steps=1).begin().until_done()
    driver.send(SiteLost("c", LOST))
    driver.send(driver.final("b", stored=False))
    driver.send(driver.final("a"))
    assert driver.status is RunStatus.SUCCEEDED


def test_a_site_that_has_done_its_part_may_go():
    driver = Driver(TWO, steps=1).begin().until_done()
    driver.send(driver.final("b", stored=False))
    driver.send(driver.gone("b", 0))
    assert driver.state.assigned == {"a": 1}
    driver.send(SiteLost("b", "its agent was stopped"))
    assert driver.status is RunStatus.RUNNING
    driver.send(driver.final("a"))
    assert driver.status is RunStatus.SUCCEEDED


def test_who_gives_the_model_may_not_go_before():
    driver = Driver(TWO, steps=1).begin().until_done()
    driver.send(driver.final("a", stored=False))
    driver.send(driver.gone("a", 0))
    driver.send(driver.final("b", stored=False))
    assert driver.words == "all 1 steps done, waiting for b to upload the parameters"
    driver.send(driver.gone("b", 0))  # nobody has the parameters any more: one site replays the log
    assert driver.state.assigned == {"a": 2}
    assert condition(driver, "a") is Condition.JOINING
    driver.catch_up("a")
    driver.send(driver.final("a"))
    assert driver.status is RunStatus.SUCCEEDED


# --- administrators ---------------------------------------------------------------------------------------------------


def test_a_site_is_added_to_a_run_that_goes_on():
    driver = Driver(TWO, steps=3).begin()
    error = driver.refused(SiteAdded("c", "east"), "no_such_region")
    assert "has west only" in error.detail
    assert "--region west" in error.detail
    driver.until_step(1)
    driver.send(SiteAdded("c", "west"))
    assert (condition(driver, "c"), driver.state.assigned["c"]) == (Condition.JOINING, 1)
    driver.send(SiteAdded("c", "west"))
    driver.send(driver.contribution("a"))
    driver.send(driver.contribution("b"))
    driver.work()
    driver.catch_up("c")
    driver.send(driver.contribution("a"))
    driver.send(driver.contribution("b"))
    assert driver.words.startswith("region west: step 3, waiting for 1 of 3 sites: c")
    assert driver.finish().status is RunStatus.SUCCEEDED


def test_a_site_is_removed_and_added_again():
    driver = Driver(TWO).begin()
    driver.send(driver.contribution("a"))
    driver.refused(SiteRemoved("stranger", "removed"), "site_not_found")
    driver.send(SiteRemoved("b", "removed by an administrator"))
    driver.send(SiteRemoved("b", "another reason"))
    assert driver.member("b").excluded == "removed by an administrator"
    assert pending(driver.state) == [AggregateRound("west", 1)]
    driver.refused(driver.contribution("b"), "excluded")
    driver.work()
    driver.send(SiteAdded("b", "west"))
    assert (condition(driver, "b"), driver.state.assigned) == (Condition.JOINING, {"a": 1, "b": 2})
    driver.catch_up("b")
    assert driver.finish().status is RunStatus.SUCCEEDED


def test_sites_are_added_to_runs_that_go_on_only():
    driver = Driver(TWO)
    for event in (SiteAdded("c", "west"), SiteRemoved("a", "removed")):
        driver.refused(event, "wrong_status")
    driver.finish()
    for event in (SiteAdded("c", "west"), SiteRemoved("a", "removed")):
        driver.refused(event, "run_ended")


def test_excluded_sites_may_say_nothing():
    driver = Driver(TWO, steps=1, every=1).begin()
    driver.send(SiteRemoved("b", "removed"))
    for event in (
        driver.contribution("b"),
        driver.layout("b"),
        CaughtUp("b", 1, driver.state.regions["west"].head),
        Announced("b", 1, 1, 0, digest_of("copy"), True),
        driver.final("b"),
    ):
        driver.refused(event, "excluded")


# --- versions of the task ---------------------------------------------------------------------------------------------


def seat(driver, site, version):
    return SeatTaken(site, driver.attempt(site), digest_of("seat", site, driver.attempt(site), version), version)


def test_another_version_of_the_task_is_an_alarm_once():
    driver = Driver({**TWO, "c": "west"})
    driver.send(StartRequested(driver.sites))
    for site, version in {"a": "1", "b": "2", "c": "1"}.items():
        driver.send(seat(driver, site, version))
    expected = ["the sites have different versions of task drill: a 1, b 2"]
    assert list(driver.state.alarms) == expected
    driver.send(driver.gone("b"))
    driver.send(seat(driver, "b", "2"))
    assert list(driver.state.alarms) == expected
    assert [member.version for member in driver.state.members.values()] == ["1", "2", "1"]


def test_another_version_is_refused_where_the_same_is_asked_for():
    driver = Driver(TWO)
    driver.state = driver.state.model_copy(update={"spec": driver.spec.model_copy(update={"same_version": True})})
    driver.send(StartRequested(TWO))
    driver.send(seat(driver, "a", "1"))
    refused = driver.refused(seat(driver, "b", ""), "other_version")
    assert "different versions of task drill: a 1, b unknown; run drill-1 asks for the same" in str(refused)
    driver.send(SiteLost("a", LOST))
    driver.send(seat(driver, "b", "2"))  # the task was updated everywhere, and b is the first that is back
    driver.send(SiteBack("a", ranks=False))
    driver.send(SiteBack("b", ranks=False))  # which was stopped once more
    driver.send(seat(driver, "a", "3"))
    driver.refused(seat(driver, "b", "4"), "other_version")
