"""What a run waits for, in words: whom, since when, and what ends it."""

from api.schemas import RunStatus
from coordinator.events import (
    GuardTripped,
    LayoutPresented,
    PauseRequested,
    SiteBack,
    SiteLost,
    SiteRemoved,
    StartRequested,
    StopRequested,
)
from coordinator.waiting import reason_of
from tests.unit.coordinator.runs import LAYOUT, Driver, digest_of

TWO = {"a": "west", "b": "west"}
THREE = {"a": "west", "b": "west", "c": "east"}


def test_a_sentence_for_every_wait():
    driver = Driver(THREE, steps=2, every=1, fragments=2)
    seen = [driver.words]

    def note():
        if driver.words != seen[-1]:
            seen.append(driver.words)

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
        "region west: step 1, waiting for 1 of 2 sites: b, since 10:00:00 UTC and until 10:01:00 UTC",
        "region west: step 1, aggregating",
        "outer round 1, fragment 0 (0 of 2 done): waiting for the digests of a, b, c",
        "outer round 1, fragment 0 (0 of 2 done): waiting for the digests of b, c",
        "outer round 1, fragment 0 (0 of 2 done): waiting for the digests of c",
        "outer round 1, fragment 0 (0 of 2 done): averaging",
        "outer round 1, fragment 1 (1 of 2 done): waiting for the digests of a, b, c",
        "outer round 1, fragment 1 (1 of 2 done): waiting for the digests of b, c",
        "outer round 1, fragment 1 (1 of 2 done): waiting for the digests of c",
        "outer round 1, fragment 1 (1 of 2 done): averaging",
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
    assert driver.words == "all 1 steps done, waiting for a to upload the parameters"


def test_a_stopped_run_says_why():
    driver = Driver(THREE)
    driver.send(StopRequested())
    assert driver.words == "stopped by request at step 0 of 3"


def test_too_few_answers_for_the_deadline():
    driver = Driver({**TWO, "c": "west"}, deadline_s=5).begin()
    driver.send(driver.contribution("a"))
    assert driver.words == (
        "region west: step 1, waiting for 2 of 3 sites: b, c, since 10:00:00 UTC and until 2 have answered"
    )


def test_too_few_sites():
    driver = Driver(TWO, min_sites=2)
    driver.send(StartRequested(TWO))
    driver.send(SiteLost("b", "its agent was stopped"))
    absent = "b (away since 10:00:00 UTC: its agent was stopped; a heartbeat brings it back)"
    assert driver.words == f"region west: 1 of at least 2 sites there: {absent}"
    driver.send(SiteRemoved("b", "removed"))
    assert driver.words == "region west: 1 of at least 2 sites there: add sites"

    driver = Driver(TWO, min_sites=2, steps=2, every=1).begin()
    driver.pass_time(5)
    driver.send(driver.gone("b", -9))
    assert driver.words == (
        "region west: step 1, 1 of at least 2 sites there: b (joining since 10:00:05 UTC: its ranks have not joined; "
        "attempt 2 after killed (out of memory?))"
    )


def test_what_went_wrong_while_it_starts():
    driver = Driver(THREE)
    driver.send(StartRequested(THREE))
    driver.send(driver.gone("b", 3, rank=1, detail="Traceback\nValueError: boom"))
    boom = "b (attempt 2 after rank 1: exit code 3: ValueError: boom)"
    assert driver.words == f"waiting for 3 of 3 sites to join: a, {boom}, c"
    driver.send(driver.layout("a"))
    assert driver.words == f"waiting for 2 of 3 sites to join: {boom}, c"


def test_nobody_is_there():
    driver = Driver(TWO, steps=1, every=1).begin().until_outer()
    driver.send(SiteLost("a", "no heartbeat"))
    driver.send(SiteLost("b", "no heartbeat"))
    away = "(away since 10:00:00 UTC: no heartbeat; a heartbeat brings it back)"
    assert driver.words == (
        f"outer round 1, fragment 0 (0 of 1 done): none of its participants is there: a {away}, b {away}"
    )
    driver = Driver({"a": "west"}, steps=1, every=1).begin()
    driver.send(driver.contribution("a"))
    driver.send(SiteLost("a", "no heartbeat"))
    driver.work()
    assert driver.words == f"outer round 1 is due, no site is there: a {away}"
    driver = Driver({"a": "west"}, steps=1).begin().until_done()
    driver.send(SiteLost("a", "no heartbeat"))
    assert driver.words == f"all 1 steps done, no site is there to report the parameters: a {away}"


def test_who_is_asked_for_a_copy():
    driver = Driver(THREE, steps=1, every=1).begin().until_outer()
    for site in "cba":
        driver.send(driver.announcement(site, 0, digest=digest_of(THREE[site]), stored=False))
    assert driver.words == "outer round 1, fragment 0 (0 of 1 done): waiting for the copies of b, c"
    driver.send(SiteLost("b", "no heartbeat"))
    assert driver.words == "outer round 1, fragment 0 (0 of 1 done): waiting for the copies of a, c"


def test_reasons_of_members():
    driver = Driver({**TWO, "c": "west"}, late_rounds=1, deadline_s=5, restarts=0).begin()
    assert reason_of(driver.member("a"), driver.state) == ""
    driver.send(driver.contribution("a"))
    driver.send(driver.contribution("b"))
    driver.pass_time(5)
    late = "missed 1 rounds in a row; back when it has caught up, but not before 10:01:05 UTC"
    assert reason_of(driver.member("c"), driver.state) == late
    driver.take_seat("c", "another")
    assert reason_of(driver.member("c"), driver.state) == "its ranks have not joined"
    driver.send(driver.layout("c"))
    assert reason_of(driver.member("c"), driver.state) == "its ranks replay the log"
    driver.send(driver.gone("c", 3, rank=1, detail="boom"))
    assert reason_of(driver.member("c"), driver.state) == "rank 1: exit code 3: boom\nboom"


def test_a_run_that_is_paused_after_its_last_step_needs_no_resume():
    driver = Driver(TWO, steps=1).begin()
    driver.send(PauseRequested())
    assert driver.words.startswith("paused, `isthmus run resume` goes on; region west: step 1, waiting")
    driver.until_done()
    assert driver.words == "paused; all 1 steps done, waiting for the final digests of a, b"
    driver.send(driver.final("a"))
    driver.send(driver.final("b"))
    assert (driver.status, driver.words) == (RunStatus.SUCCEEDED, "all 1 steps done, digests equal")


def test_an_outer_round_that_is_due_needs_a_resume():
    driver = Driver(TWO, steps=1, every=1).begin()
    driver.send(GuardTripped(1, "loss is NaN"))
    driver.until_done()
    assert driver.words == "paused: loss is NaN, `isthmus run resume` goes on"


def test_who_has_reported_its_end_is_not_missed():
    driver = Driver({**TWO, "c": "west"}, steps=1).begin()
    driver.send(SiteLost("c", "no heartbeat"))
    driver.until_done()
    driver.send(driver.final("a", stored=False))
    driver.send(SiteLost("a", "no heartbeat"))  # which was to upload the model
    assert (driver.member("a").condition, driver.words) == (
        "away",
        "all 1 steps done, waiting for the final digests of b",
    )
    driver.send(SiteBack("a"))
    driver.send(driver.final("a"))
    driver.send(SiteLost("a", "no heartbeat"))
    driver.send(driver.final("b"))
    assert driver.status is RunStatus.SUCCEEDED
    conditions = {
        site: (member.condition, reason_of(member, driver.state)) for site, member in driver.state.members.items()
    }
    without = ("away", "no heartbeat; the run has ended without it")
    assert conditions == {"a": ("active", ""), "b": ("active", ""), "c": without}
