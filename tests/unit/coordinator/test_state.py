"""The state machine of a run: one example of each rule, from start to end."""

from dataclasses import replace
from typing import get_args

import pytest

from api.errors import ForbiddenError
from api.schemas import Position, RunStatus
from coordinator.events import (
    Abstained,
    Aggregated,
    Announced,
    Averaged,
    CaughtUp,
    Contributed,
    Event,
    FinalReported,
    LayoutPresented,
    Norm,
    PauseRequested,
    ProcessesGone,
    Refused,
    ResumeRequested,
    SiteAdded,
    SiteLost,
    SiteRemoved,
    StartRequested,
    StartUploaded,
    StopRequested,
    WorkFailed,
)
from coordinator.records import Layout, Start
from coordinator.state import TRANSITIONS, AggregateRound, pending
from coordinator.waiting import reason_of, waiting_for
from tests.unit.coordinator.runs import FINAL, LAYOUT, START, Driver, digest_of, sent

OTHER_LAYOUT = Layout(digest=digest_of("other layout"), blob=digest_of("other blob"), groups=("decay",))
TWO = {"a": "west", "b": "west"}
THREE = {"a": "west", "b": "west", "c": "east"}
ALONE = {"a": "east", "b": "north", "c": "west"}

# --- starting ---------------------------------------------------------------------------------------------------------


def test_a_run_of_one_site_succeeds():
    driver = Driver({"a": "west"}, steps=2).finish()
    assert driver.status is RunStatus.SUCCEEDED
    assert [header["kind"] for header in driver.logs["west"]] == ["start", "step", "step"]


def test_start_is_for_pending_runs_only():
    driver = Driver(TWO).begin()
    error = driver.refused(StartRequested(TWO), "wrong_status")
    assert "running" in str(error)
    assert "pending" in str(error)


def test_running_needs_every_layout_and_entry_0():
    driver = Driver(TWO)
    driver.send(StartRequested(TWO))
    driver.send(LayoutPresented("a", 1, LAYOUT))
    assert waiting_for(driver.state) == "waiting for 1 of 2 sites to join: b"
    driver.send(StartUploaded("a", 1, START))
    assert driver.status is RunStatus.STARTING
    driver.send(LayoutPresented("b", 1, LAYOUT))
    assert driver.status is RunStatus.RUNNING


def test_layouts_that_differ_are_refused():
    driver = Driver(TWO)
    driver.send(StartRequested(TWO))
    driver.send(LayoutPresented("a", 1, LAYOUT))
    error = driver.refused(LayoutPresented("b", 1, OTHER_LAYOUT), "layout_differs")
    assert "site b" in str(error)
    assert LAYOUT.digest[:12] in str(error)
    assert OTHER_LAYOUT.digest[:12] in str(error)
    assert driver.status is RunStatus.STARTING
    driver.refused(LayoutPresented("b", 2, LAYOUT), "stale_attempt")


def test_entry_0_comes_from_the_lowest_named_site_once():
    driver = Driver(THREE, every=1)
    driver.send(StartRequested(THREE))
    driver.refused(StartUploaded("a", 1, START), "no_layout")
    driver.send(LayoutPresented("b", 1, LAYOUT))
    error = driver.refused(StartUploaded("b", 1, START), "not_the_donor")
    assert "comes from a" in str(error)
    assert not driver.send(StartUploaded("a", 1, START)).entries
    assert not driver.send(StartUploaded("a", 1, START)).entries
    driver.send(LayoutPresented("c", 1, LAYOUT))
    assert driver.status is RunStatus.STARTING
    driver.send(LayoutPresented("a", 1, LAYOUT))
    assert driver.status is RunStatus.RUNNING
    assert driver.logs["west"][0]["parameters"] == driver.logs["east"][0]["parameters"] == START.parameters
    assert not driver.send(StartUploaded("a", 1, START)).entries
    driver.refused(StartUploaded("a", 1, Start(parameters=digest_of("other"))), "other_bytes")
    driver.refused(StartUploaded("stranger", 1, START), "not_a_member")


# --- rounds -----------------------------------------------------------------------------------------------------------


def test_a_round_closes_when_the_last_member_answers():
    driver = Driver(TWO).begin()
    driver.send(driver.contribution("b", tokens=3))
    assert pending(driver.state) == []
    assert "step 1, waiting for 1 of 2 sites: a" in waiting_for(driver.state)
    driver.send(driver.contribution("a", tokens=4))
    assert pending(driver.state) == [AggregateRound("west", 1)]
    assert "aggregating" in waiting_for(driver.state)
    driver.work()
    assert driver.state.regions["west"].tokens == 7
    assert [line["site"] for line in driver.logs["west"][1]["contributors"]] == ["a", "b"]


def test_the_same_bytes_count_once_and_others_are_refused():
    driver = Driver(TWO).begin()
    driver.send(driver.contribution("a"))
    before = driver.state
    driver.send(driver.contribution("a"))
    assert driver.state == before
    driver.refused(driver.contribution("a", variant="other"), "other_bytes")
    driver.refused(driver.abstention("a"), "other_bytes")
    driver.send(driver.abstention("b"))
    driver.refused(driver.contribution("b"), "other_bytes")
    assert driver.send(driver.abstention("b")).state == driver.state


def test_off_the_chain_is_refused():
    driver = Driver(TWO).begin()
    error = driver.refused(driver.contribution("a", position=Position(seq=0, hash="1" * 64)), "off_chain")
    assert "load the log again" in str(error)


def test_late_and_early_contributions():
    driver = Driver(TWO).begin()
    first = driver.contribution("a")
    driver.refused(driver.contribution("a", step=2), "round_not_open")
    driver.send(first)
    driver.send(driver.abstention("b"))
    driver.work()
    error = driver.refused(first, "closed_without_you")
    assert error.context == {"step": 1, "round": 2}
    driver.refused(driver.contribution("a", step=0), "closed_without_you")


def test_contributions_of_others():
    driver = Driver(THREE).begin()
    with pytest.raises(ForbiddenError, match="not a member"):
        driver.send(
            Contributed("stranger", 1, "west", 1, driver.state.regions["west"].head, sent("stranger", tokens=1))
        )
    driver.refused(driver.contribution("c", region="west"), "wrong_region")


def test_all_abstaining_gives_an_empty_entry():
    driver = Driver(TWO, steps=2).begin()
    driver.send(driver.abstention("a", reason="overflow"))
    done = driver.send(driver.abstention("b"))
    assert [region for region, _ in done.entries] == ["west"]
    header = driver.logs["west"][-1]
    assert (header["step"], header["parts"], header["contributors"]) == (1, [], [])
    assert [line["reason"] for line in header["abstentions"]] == ["overflow", "no data"]
    assert driver.state.step == 1
    assert driver.state.regions["west"].tokens == 0
    assert driver.finish().status is RunStatus.SUCCEEDED


def test_a_second_computation_of_a_round_is_dropped():
    driver = Driver({"a": "west"}).begin()
    driver.send(driver.contribution("a"))
    driver.work()
    before = driver.state
    assert not driver.send(Aggregated("west", 1, (digest_of("other"),), {"a": Norm(1.0)})).entries
    assert driver.state == before


def test_outliers_are_named_once_and_stand_in_the_entry():
    driver = Driver(TWO, steps=3).begin()
    for step in (1, 2):
        driver.send(driver.contribution("a"))
        driver.send(driver.contribution("b"))
        norms = {"a": Norm(1.0), "b": Norm(50.0 * step, 5)}
        driver.send(Aggregated("west", step, (digest_of("parts"),), norms))
        found = {line["site"]: (line["norm"], line["halvings"]) for line in driver.logs["west"][-1]["contributors"]}
        assert found == {"a": (1.0, 0), "b": (50.0 * step, 5)}
    (alarm,) = driver.state.alarms
    assert alarm == "site b sends outliers: the norm 50 of its contribution to step 1 is more than twice the median"


def test_no_round_opens_past_the_last_step():
    driver = Driver(THREE, steps=1).begin().until_done()
    assert all(region.round is None for region in driver.state.regions.values())
    driver.refused(driver.contribution("a"), "round_not_open")
    assert waiting_for(driver.state) == "all 1 steps done, waiting for the final digests of a, b, c"


# --- pause ------------------------------------------------------------------------------------------------------------


def test_a_pause_ends_what_is_open_and_opens_nothing():
    driver = Driver(TWO).begin()
    driver.send(driver.contribution("a"))
    driver.send(PauseRequested())
    assert driver.words.startswith("paused, `isthmus run resume` goes on; region west: step 1, waiting for 1 of 2")
    driver.send(driver.contribution("b"))
    driver.work()
    assert (driver.status, driver.state.step) == (RunStatus.PAUSED, 1)
    assert driver.words == "paused, `isthmus run resume` goes on"
    driver.refused(driver.contribution("a"), "round_not_open")
    driver.send(ResumeRequested())
    driver.send(driver.contribution("a"))
    assert driver.finish().status is RunStatus.SUCCEEDED


def test_a_pause_lets_an_outer_round_end_and_opens_none():
    driver = Driver(TWO, steps=2, every=1).begin().until_outer()
    driver.send(PauseRequested())
    while driver.exchange():
        pass
    assert (driver.state.outer_rounds, driver.state.outer, driver.state.step) == (1, None, 1)
    driver.send(ResumeRequested())
    driver.send(driver.contribution("a"))
    driver.send(driver.contribution("b"))
    driver.send(PauseRequested())
    driver.work()
    assert driver.state.outer is None
    driver.send(ResumeRequested())
    assert driver.state.outer.number == 2


def test_only_runs_that_go_on_are_paused():
    driver = Driver(TWO)
    driver.refused(PauseRequested(), "wrong_status")
    driver.refused(ResumeRequested(), "wrong_status")
    driver.begin()
    driver.send(ResumeRequested())
    driver.send(PauseRequested())
    driver.send(PauseRequested())
    driver.send(StopRequested())
    driver.refused(ResumeRequested(), "run_ended")


# --- outer rounds -----------------------------------------------------------------------------------------------------


def test_outer_rounds_wait_for_every_region():
    driver = Driver(THREE, steps=3, every=2, fragments=2).begin()
    for _ in range(2):
        driver.send(driver.contribution("c", tokens=5))
        driver.work()
    driver.refused(driver.contribution("c"), "round_not_open")
    driver.refused(driver.announcement("c", 0), "outer_round_not_open")
    assert "a, b" in waiting_for(driver.state)
    driver.until_outer()
    assert driver.state.outer.weights == {"east": 10, "west": 28}
    driver.refused(driver.announcement("c", 2), "no_such_fragment")
    driver.finish()
    assert [(round_.number, round_.step) for round_ in driver.summaries] == [(1, 2), (2, 3)]
    assert [header["kind"] for header in driver.logs["east"]] == ["start", *["step"] * 2, *["anchor"] * 2, "step"] + [
        "anchor"
    ] * 2


def test_averaging_waits_for_stored_copies():
    driver = Driver(THREE, steps=1, every=1).begin().until_outer()
    for site in THREE:
        driver.send(driver.announcement(site, 0, digest=digest_of(THREE[site]), stored=site == "c"))
    assert pending(driver.state) == []
    driver.send(driver.announcement("b", 0, digest=digest_of("west")))
    assert len(pending(driver.state)) == 1
    driver.work()
    assert driver.summaries[0].distinct == 2


def test_a_second_average_of_a_fragment_is_dropped():
    driver = Driver(TWO, steps=1, every=1, fragments=2).begin().until_outer()
    for site in TWO:
        driver.send(driver.announcement(site, 1))
    driver.work()
    before = driver.state
    driver.send(Averaged(1, 1, {"west": (digest_of("copy", 1, 1),)}, digest_of("other"), None))
    assert driver.state == before
    assert before.anchors == (None, digest_of("anchor", 1, 1))


def test_another_copy_after_the_first_is_refused():
    driver = Driver(THREE, steps=1, every=1).begin().until_outer()
    driver.send(driver.announcement("a", 0))
    driver.refused(driver.announcement("a", 0, digest=digest_of("other")), "other_bytes")


def test_a_minority_copy_is_named_and_not_averaged():
    places = {"a": "west", "b": "west", "c": "west", "d": "east"}
    driver = Driver(places, steps=1, every=1, fragments=2).begin().until_outer()
    for site in places:
        driver.send(driver.announcement(site, 1, digest=digest_of("astray") if site == "a" else digest_of("west")))
    assert driver.state.alarms == ("step 1: fragment 1 of a differs from region west's",)
    driver.work()
    (anchor,) = [header for header in driver.logs["west"] if header["kind"] == "anchor"]
    assert [part["digest"] for part in anchor["participants"]] == [digest_of("west")] * 2
    assert driver.finish().state.alarms == ("step 1: fragment 1 of a differs from region west's",)


def test_without_a_majority_all_copies_are_averaged_and_the_alarm_says_so():
    driver = Driver(THREE, steps=1, every=1).begin().until_outer()
    for site in THREE:
        driver.send(driver.announcement(site, 0, digest=digest_of(site), stored=site != "b"))
    (alarm,) = driver.state.alarms
    assert alarm.startswith("step 1: fragment 0 of region west differs between a, b, and no copy has a majority")
    assert pending(driver.state) == []
    driver.send(driver.announcement("b", 0, digest=digest_of("b")))
    driver.work()
    (anchor,) = [header for header in driver.logs["east"] if header["kind"] == "anchor"]
    assert anchor["participants"] == [
        {"region": "east", "digest": digest_of("c"), "weight": 7},
        {"region": "west", "digest": None, "copies": sorted([digest_of("a"), digest_of("b")]), "weight": 14},
    ]


def test_copies_that_are_not_finite_are_left_out_by_name():
    driver = Driver(THREE, steps=1, every=1).begin().until_outer()
    for site in THREE:
        driver.send(driver.announcement(site, 0, digest=digest_of(site)))
    copies = {"east": (digest_of("c"),), "west": tuple(sorted([digest_of("a"), digest_of("b")]))}
    rejected = frozenset({digest_of("c"), digest_of("b")})
    driver.send(Averaged(1, 0, copies, digest_of("anchor"), None, rejected))
    assert driver.state.alarms[1:] == ("step 1: fragment 0 of b, c is not finite and was left out",)
    (anchor,) = [header for header in driver.logs["east"] if header["kind"] == "anchor"]
    assert anchor["participants"] == [{"region": "west", "digest": digest_of("a"), "weight": 14}]


@pytest.mark.parametrize(("steps", "codec"), [(1, "fp32"), (3, "fp32"), (3, "int8")])
def test_a_region_whose_copies_are_not_finite_takes_the_anchor_as_it_is(steps, codec):
    driver = Driver(THREE, steps=steps, every=1, outer={"codec": codec}).begin().until_outer()
    for site in THREE:
        driver.send(driver.announcement(site, 0, digest=digest_of(driver.region_of(site))))
    job = driver.average(1, 0)
    upload = digest_of("upload", "east", digest_of("east")) if codec == "int8" else digest_of("east")
    driver.send(replace(job, rejected=frozenset({upload})))
    (anchor,) = [header for header in driver.logs["east"] if header["kind"] == "anchor"]
    assert anchor["before"] is None
    assert "before" not in driver.logs["west"][-1]
    assert driver.state.regions["east"].resume.position == driver.state.regions["east"].head
    assert not driver.state.regions["east"].apart


def test_announcements_of_closed_outer_rounds_change_nothing():
    driver = Driver(TWO, steps=2, every=1).begin().until_outer()
    while driver.state.outer_rounds == 0:
        driver.exchange()
    before = driver.state
    driver.send(driver.announcement("a", 0, number=1, digest=digest_of("other")))
    assert driver.state == before


# --- regions without rounds -------------------------------------------------------------------------------------------


def test_sites_without_rounds_meet_at_outer_rounds_only():
    driver = Driver(ALONE, steps=5, every=2, fragments=2, exchange="none").begin()
    assert all(region.round is None for region in driver.state.regions.values())
    driver.refused(driver.contribution("a"), "no_rounds")
    driver.refused(driver.announcement("a", 0), "outer_round_not_open")
    driver.send(driver.arrival("a", tokens=30))
    driver.send(driver.arrival("a", tokens=31))
    assert waiting_for(driver.state) == "outer round 1, after step 2: 2 of 3 sites on their way: b, c"
    driver.send(driver.arrival("c", tokens=5))
    driver.send(driver.arrival("b", number=2))
    driver.refused(driver.announcement("a", 0), "outer_round_not_open")
    driver.send(driver.arrival("b", tokens=0))
    assert (driver.state.outer.step, driver.state.outer.weights) == (2, {"east": 30, "north": 0, "west": 5})
    driver.finish()
    assert driver.status is RunStatus.SUCCEEDED
    assert [round_.step for round_ in driver.summaries] == [2, 4, 5]
    for region in ALONE.values():
        assert [header["kind"] for header in driver.logs[region]] == ["start", *["anchor"] * 6]


def test_nobody_arrives_behind_the_last_outer_round():
    driver = Driver(ALONE, steps=3, every=2, exchange="none").begin().until_done()
    before = driver.state
    for site in ALONE:
        driver.send(driver.arrival(site))
    assert driver.state == before
    assert driver.finish().status is RunStatus.SUCCEEDED


def test_lost_ranks_have_not_arrived_and_nobody_waits_for_them():
    driver = Driver(ALONE, steps=4, every=2, exchange="none").begin()
    driver.send(driver.arrival("a"))
    driver.send(driver.arrival("b"))
    driver.send(driver.gone("b"))
    driver.send(driver.arrival("c"))
    assert driver.state.outer.weights == {"east": 7, "west": 7}
    driver.catch_up("b")
    assert not driver.member("b").live
    driver.until_outer_round(1)
    assert driver.catch_up("b")
    assert driver.member("b").live
    assert [header["kind"] for header in driver.logs["north"]] == ["start", "anchor"]
    assert driver.finish().status is RunStatus.SUCCEEDED


def test_who_has_arrived_need_not_wait_for_a_site_that_comes_back():
    driver = Driver(ALONE, steps=4, every=2, exchange="none").begin()
    driver.send(driver.gone("b"))
    driver.send(driver.arrival("a"))
    driver.catch_up("b")
    assert not driver.member("b").live
    assert "wait for outer round 1, for which others have arrived already" in reason_of(
        driver.member("b"), driver.state
    )
    driver.send(driver.arrival("c"))
    assert driver.state.outer is not None


def test_a_site_that_comes_back_before_anybody_has_arrived_is_waited_for():
    driver = Driver(ALONE, steps=4, every=2, exchange="none").begin()
    driver.send(driver.gone("b"))
    driver.catch_up("b")
    driver.send(driver.arrival("a"))
    driver.send(driver.arrival("c"))
    assert waiting_for(driver.state) == "outer round 1, after step 2: 1 of 3 sites on their way: b"


def test_sites_without_rounds_arrive_while_the_run_is_paused_and_wait_then():
    driver = Driver(ALONE, steps=4, every=2, exchange="none").begin()
    driver.send(PauseRequested())
    for site in ALONE:
        driver.send(driver.arrival(site))
    assert driver.state.outer is None
    driver.send(ResumeRequested())
    assert driver.state.outer.number == 1


def test_a_region_without_rounds_may_lose_its_site():
    driver = Driver(ALONE, steps=2, every=2, exchange="none", restarts=0).begin()
    driver.send(driver.gone("a"))
    assert driver.status is RunStatus.RUNNING
    driver.refused(SiteAdded("d", "north"), "region_taken")
    driver.send(SiteAdded("d", "east"))
    driver.send(SiteRemoved("b", "removed"))
    driver.finish()
    assert driver.status is RunStatus.SUCCEEDED
    driver = Driver(ALONE, steps=2, every=2, exchange="none").begin()
    *others, last = ALONE
    for site in others:
        driver.send(SiteRemoved(site, "removed"))
    driver.refused(SiteRemoved(last, "removed"), "last_site")
    assert driver.status is RunStatus.RUNNING


# --- the end ----------------------------------------------------------------------------------------------------------


def test_final_digests_that_differ_fail_the_run_by_name():
    driver = Driver(THREE, steps=1, every=1).begin().until_done()
    driver.send(driver.final("a"))
    driver.send(driver.final("b"))
    driver.send(driver.final("c", digest="e" * 64))
    assert driver.status is RunStatus.FAILED
    for word in ("different parameters", "a ffff", "b ffff", "c eeee"):
        assert word in driver.state.ended_because


def test_regions_without_outer_rounds_may_end_apart():
    driver = Driver(THREE, steps=1).begin().until_done()
    for site, region in THREE.items():
        driver.send(driver.final(site, digest=digest_of(region)))
    assert driver.status is RunStatus.SUCCEEDED


def test_a_fast_region_may_report_its_end_before_the_others():
    """Without outer rounds nothing ties the regions together."""
    driver = Driver(THREE, steps=2).begin()
    for _ in range(2):
        driver.send(driver.contribution("c"))
        driver.work()
    driver.send(driver.final("c"))
    assert driver.finish().status is RunStatus.SUCCEEDED


def test_no_final_report_before_the_last_outer_round():
    driver = Driver(THREE, steps=1, every=1).begin()
    driver.send(driver.contribution("c"))
    driver.work()
    driver.refused(driver.final("c"), "not_at_the_end")
    driver.until_outer()
    driver.refused(driver.final("c"), "not_at_the_end")


def test_a_second_final_report_must_be_the_same():
    driver = Driver(TWO, steps=1).begin().until_done()
    driver.send(driver.final("a", stored=False))
    driver.refused(driver.final("a", digest="e" * 64), "other_bytes")
    driver.refused(FinalReported("b", 1, 0, FINAL, True), "not_at_the_end")
    driver.send(driver.final("b", stored=False))
    assert driver.status is RunStatus.RUNNING
    assert "a" in waiting_for(driver.state).split()
    driver.send(driver.final("a"))
    assert driver.status is RunStatus.SUCCEEDED
    assert driver.send(driver.final("a")).state == driver.state
    driver.refused(driver.final("a", digest="e" * 64), "run_ended")


# --- stopping and misfortune ------------------------------------------------------------------------------------------


def test_stop_before_the_start():
    driver = Driver(TWO)
    driver.send(StopRequested())
    assert driver.status is RunStatus.STOPPED
    driver.refused(StartRequested(TWO), "run_ended")
    assert driver.send(StopRequested()).state == driver.state


@pytest.mark.parametrize("status", [RunStatus.STARTING, RunStatus.RUNNING])
def test_stop_waits_for_the_processes(status):
    driver = Driver(TWO)
    driver.send(StartRequested(TWO))
    if status is RunStatus.RUNNING:
        driver.begin()
    driver.send(StopRequested())
    assert driver.status is RunStatus.STOPPING
    assert driver.send(StopRequested()).state == driver.state
    driver.refused(driver.contribution("a"), "run_ended")
    driver.refused(LayoutPresented("a", 1, LAYOUT), "run_ended")
    driver.send(ProcessesGone("a", 1, exit_code=-15))
    assert waiting_for(driver.state) == "waiting for the processes at b to end"
    driver.send(SiteLost("b", "no heartbeat"))
    assert driver.status is RunStatus.STOPPED
    assert driver.state.ended_because == "stopped by request at step 0 of 3"


def test_stop_in_the_middle_of_an_outer_round():
    driver = Driver(TWO, steps=1, every=1).begin().until_outer()
    driver.send(driver.announcement("a", 0))
    driver.send(driver.announcement("b", 0))
    driver.send(StopRequested())
    assert pending(driver.state) == []
    before = driver.state
    driver.send(Averaged(1, 0, {"west": digest_of("copy", 1, 0)}, digest_of("anchor"), digest_of("momentum")))
    assert driver.state == before


def test_ended_runs_cannot_be_stopped():
    driver = Driver(TWO, steps=1).finish()
    driver.refused(StopRequested(), "run_ended")
    assert driver.status is RunStatus.SUCCEEDED


def test_stop_does_not_wait_for_sites_that_are_away():
    driver = Driver(TWO).begin()
    driver.send(SiteLost("a", "no heartbeat"))
    driver.send(StopRequested())
    assert driver.words == "waiting for the processes at b to end"
    driver.send(SiteLost("b", "no heartbeat"))
    assert driver.status is RunStatus.STOPPED


def test_every_event_of_a_stranger_is_refused():
    driver = Driver(TWO).begin()
    position = driver.state.regions["west"].head
    for event in (
        LayoutPresented("stranger", 1, LAYOUT),
        StartUploaded("stranger", 1, START),
        Contributed("stranger", 1, "west", 1, position, sent("stranger", tokens=1)),
        Abstained("stranger", 1, "west", 1, position, "none"),
        Announced("stranger", 1, 1, 0, FINAL, True),
        FinalReported("stranger", 1, 0, FINAL, True),
        Refused("stranger", 1, "west", 1, position, "none"),
        CaughtUp("stranger", 1, position),
    ):
        driver.refused(event, "not_a_member")


def test_failed_work_is_an_alarm_once_or_the_end():
    driver = Driver(TWO).begin()
    driver.send(WorkFailed("the disk is full"))
    driver.send(WorkFailed("the disk is full"))
    assert driver.state.alarms == ("the disk is full",)
    assert driver.status is RunStatus.RUNNING
    driver.send(WorkFailed("a contribution is lost", final=True))
    assert (driver.status, driver.state.ended_because) == (RunStatus.FAILED, "a contribution is lost")


def test_every_event_has_its_transition():
    assert TRANSITIONS.keys() == set(get_args(Event))
