"""The state machine of a run: random and hostile events, and one example of each rule."""

import contextlib
from typing import get_args

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from api.errors import ConflictError, ForbiddenError, GoneError
from api.schemas import Position, RunStatus
from coordinator.quorum import waiting_for
from coordinator.records import (
    Abstained,
    Aggregated,
    Announced,
    Averaged,
    Contributed,
    Event,
    FinalReported,
    Layout,
    LayoutPresented,
    ProcessesGone,
    SeatTaken,
    Sent,
    SiteLost,
    Start,
    StartRequested,
    StartUploaded,
    StopRequested,
    WorkFailed,
)
from coordinator.state import TRANSITIONS, AggregateRound, pending
from tests.unit.coordinator.runs import FINAL, LAYOUT, START, Driver, digest_of

NAMES = ("a", "b", "c", "d")
REGIONS = ("east", "north", "west")
OTHER_LAYOUT = Layout(digest=digest_of("other layout"), blob=digest_of("other blob"), groups=("decay",))
TWO = {"a": "west", "b": "west"}
THREE = {"a": "west", "b": "west", "c": "east"}

sites = st.sampled_from((*NAMES, "stranger"))
regions = st.sampled_from((*REGIONS, "nowhere"))
offsets = st.sampled_from((0, 0, 0, 0, 1, -1, 2))
variants = st.sampled_from(("", "", "", "other"))
fragments = st.integers(0, 3)


class RunMachine(RuleBasedStateMachine):
    """Sites that answer, repeat themselves, come late and make things up; `Driver.send` checks after every event."""

    @initialize(
        places=st.lists(st.sampled_from(REGIONS), min_size=1, max_size=4),
        steps=st.integers(1, 5),
        every=st.one_of(st.none(), st.integers(1, 5)),
        fragments=st.integers(1, 3),
        misfortune=st.sampled_from((False, False, True)),
        begun=st.booleans(),
    )
    def new_run(self, places, steps, every, fragments, misfortune, begun):
        every = None if every is None else min(every, steps)
        self.driver = Driver(dict(zip(NAMES, places, strict=False)), steps, every, fragments)
        self.misfortune = misfortune
        if begun:
            self.driver.begin()

    def send(self, event):
        with contextlib.suppress(ForbiddenError, ConflictError, GoneError):
            self.driver.send(event)

    def region(self, site):
        return self.driver.state.regions.get(self.driver.sites.get(site, ""))

    def step(self, site, offset):
        region = self.region(site)
        return max(0, (region.step if region else 0) + 1 + offset)

    @rule()
    def start(self):
        self.send(StartRequested(self.driver.sites))

    @rule(site=sites, attempt=st.sampled_from((1, 1, 1, 2)), right=st.sampled_from((True, True, True, False)))
    def present_layout(self, site, attempt, right):
        self.send(LayoutPresented(site, attempt, LAYOUT if right or not self.misfortune else OTHER_LAYOUT))

    @rule(site=sites, other=st.booleans())
    def upload_start(self, site, other):
        self.send(StartUploaded(site, Start(parameters=digest_of("other")) if other and self.misfortune else START))

    @rule(steps=st.integers(1, 12))
    def advance(self, steps):
        """What honest sites would do next."""
        for _ in range(steps):
            if self.driver.status is not RunStatus.RUNNING or not self.driver.exchange():
                break

    @rule()
    def work(self):
        self.driver.work()

    @rule(
        site=sites, offset=offsets, tokens=st.sampled_from((0, 7, 2**40)), variant=variants, on_chain=st.integers(0, 5)
    )
    def contribute(self, site, offset, tokens, variant, on_chain):
        step = self.step(site, offset)
        position = Driver.position(self.region(site)) if on_chain else Position(seq=3, hash="1" * 64)
        sent = Sent(digest=digest_of(site, step, tokens, variant), tokens=tokens)
        self.send(Contributed(site, self.driver.sites.get(site, "west"), step, position, sent))

    @rule(site=sites, region=regions)
    def contribute_elsewhere(self, site, region):
        own = self.driver.state.regions.get(region)
        sent = Sent(digest=digest_of("elsewhere", site), tokens=1)
        if region != self.driver.sites.get(site):
            self.send(Contributed(site, region, own.step + 1 if own else 1, Driver.position(own), sent))

    @rule(site=sites, offset=offsets)
    def abstain(self, site, offset):
        position = Driver.position(self.region(site))
        self.send(Abstained(site, self.driver.sites.get(site, "west"), self.step(site, offset), position, "no data"))

    @precondition(lambda self: self.driver.state.regions)
    @rule(index=st.integers(0, 2), offset=st.sampled_from((0, 1, 2)))
    def aggregate_late_or_early(self, index, offset):
        """A second process that computed a round again, or for a state that is no more."""
        region = sorted(self.driver.state.regions.values(), key=lambda region: region.name)[
            index % len(self.driver.state.regions)
        ]
        step = max(1, region.step + 1 - offset)
        if AggregateRound(region.name, step) not in pending(self.driver.state):
            before = self.driver.state
            self.send(Aggregated(region.name, step, (digest_of("again"),), {}))
            assert self.driver.state == before

    @rule(
        site=sites,
        fragment=fragments,
        offset=st.sampled_from((0, 0, 0, 1, -1)),
        astray=st.integers(0, 4),
        stored=st.booleans(),
    )
    def announce(self, site, fragment, offset, astray, stored):
        number = max(0, self.driver.state.outer_rounds + 1 + offset)
        digest = digest_of("copy", number, fragment) if astray else digest_of("astray", site)
        self.send(Announced(site, number, fragment, digest, stored))

    @rule(fragment=fragments, offset=st.sampled_from((0, 1)))
    def average_late_or_early(self, fragment, offset):
        number, outer = self.driver.state.outer_rounds + 1 - offset, self.driver.state.outer
        ready = {
            (job.number, job.fragment) for job in pending(self.driver.state) if not isinstance(job, AggregateRound)
        }
        if (number, fragment) not in ready and (outer is None or fragment < len(outer.fragments)):
            before = self.driver.state
            self.send(Averaged(number, fragment, digest_of("again"), None))
            assert self.driver.state == before

    @rule(site=sites, seq=st.integers(0, 8), right=st.booleans(), stored=st.booleans())
    def report_final(self, site, seq, right, stored):
        region = self.region(site)
        seq = region.head.seq if right and region and region.head else seq
        self.send(FinalReported(site, seq, FINAL, stored))

    @rule(site=sites)
    def processes_unseen_or_done(self, site):
        member = self.driver.state.members.get(site)
        if member is None or member.final is not None or self.misfortune:
            self.send(ProcessesGone(site, 0 if self.misfortune else None))

    @precondition(lambda self: self.misfortune)
    @rule(site=sites, code=st.sampled_from((1, -9, None)), luck=st.integers(0, 3))
    def processes_fail(self, site, code, luck):
        if not luck:
            self.send(ProcessesGone(site, code, rank=0, detail="the end of the log"))

    @precondition(lambda self: self.misfortune)
    @rule(site=sites, luck=st.integers(0, 3))
    def lose(self, site, luck):
        if not luck:
            self.send(SiteLost(site, "no heartbeat"))

    @precondition(lambda self: self.misfortune)
    @rule(luck=st.integers(0, 3))
    def stop(self, luck):
        if not luck:
            self.send(StopRequested())

    def teardown(self):
        """From wherever they are: runs that were not stopped and lost nobody succeed."""
        driver = getattr(self, "driver", None)
        if driver is None:
            return
        if driver.status is RunStatus.STOPPING:
            for site in driver.sites:
                driver.send(ProcessesGone(site))
            assert driver.status is RunStatus.STOPPED
        elif not driver.status.terminal:
            self._end_well(driver)
        assert not pending(driver.state)

    @staticmethod
    def _end_well(driver):
        if driver.state.layout == OTHER_LAYOUT or driver.state.start not in (None, START):
            return
        driver.finish()
        assert driver.status is RunStatus.SUCCEEDED, driver.state.ended_because
        assert driver.state.step == driver.spec.steps
        assert driver.state.outer_rounds == driver.due_outer_rounds
        assert [summary.number for summary in driver.summaries] == list(range(1, driver.due_outer_rounds + 1))
        for region in driver.state.regions:
            kinds = [header["kind"] for header in driver.logs[region]]
            fragments = driver.spec.outer.fragments if driver.spec.outer else 0
            assert kinds.count("step") == driver.spec.steps
            assert kinds.count("anchor") == driver.due_outer_rounds * fragments


RunMachine.TestCase.settings = (
    settings()
    if settings.get_current_profile_name() == "deep"
    else settings(max_examples=80, stateful_step_count=50, deadline=None)
)
TestRunMachine = pytest.mark.timeout(3600)(RunMachine.TestCase)


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
    driver.send(StartUploaded("a", START))
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
    driver.refused(StartUploaded("a", START), "no_layout")
    driver.send(LayoutPresented("b", 1, LAYOUT))
    error = driver.refused(StartUploaded("b", START), "not_the_donor")
    assert "comes from a" in str(error)
    assert not driver.send(StartUploaded("a", START)).entries
    assert not driver.send(StartUploaded("a", START)).entries
    driver.send(LayoutPresented("c", 1, LAYOUT))
    assert driver.status is RunStatus.STARTING
    driver.send(LayoutPresented("a", 1, LAYOUT))
    assert driver.status is RunStatus.RUNNING
    assert driver.logs["west"][0]["parameters"] == driver.logs["east"][0]["parameters"] == START.parameters
    assert not driver.send(StartUploaded("a", START)).entries
    driver.refused(StartUploaded("a", Start(parameters=digest_of("other"))), "other_bytes")
    driver.refused(StartUploaded("stranger", START), "not_a_member")


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
        driver.send(Contributed("stranger", "west", 1, driver.state.regions["west"].head, Sent(digest="0", tokens=1)))
    driver.refused(driver.contribution("c", region="west"), "wrong_region")


def test_all_abstaining_gives_an_empty_entry():
    driver = Driver(TWO, steps=2).begin()
    driver.send(driver.abstention("a", reason="overflow"))
    done = driver.send(driver.abstention("b"))
    assert [region for region, _ in done.closed] == ["west"]
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
    assert not driver.send(Aggregated("west", 1, (digest_of("other"),), {"a": 0})).entries
    assert driver.state == before


def test_no_round_opens_past_the_last_step():
    driver = Driver(THREE, steps=1).begin().until_done()
    assert all(region.round is None for region in driver.state.regions.values())
    driver.refused(driver.contribution("a"), "round_not_open")
    assert waiting_for(driver.state) == "all 1 steps done, waiting for the final digests of a, b, c"


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
    driver.send(Averaged(1, 1, digest_of("other"), None))
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


def test_a_tie_of_copies_goes_to_the_lowest_name():
    driver = Driver(TWO, steps=1, every=1).begin().until_outer()
    driver.send(driver.announcement("b", 0, digest=digest_of("b's")))
    driver.send(driver.announcement("a", 0, digest=digest_of("a's")))
    assert driver.state.alarms == ("step 1: fragment 0 of b differs from region west's",)


def test_announcements_of_closed_outer_rounds_change_nothing():
    driver = Driver(TWO, steps=2, every=1).begin().until_outer()
    while driver.state.outer_rounds == 0:
        driver.exchange()
    before = driver.state
    driver.send(driver.announcement("a", 0, number=1, digest=digest_of("other")))
    assert driver.state == before


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
    driver.refused(FinalReported("b", 0, FINAL, True), "not_at_the_end")
    driver.send(driver.final("b"))
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
    driver.send(ProcessesGone("a", exit_code=-15))
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
    driver.send(Averaged(1, 0, digest_of("anchor"), digest_of("momentum")))
    assert driver.state == before


@pytest.mark.parametrize("end", ["succeeded", "failed"])
def test_ended_runs_cannot_be_stopped(end):
    driver = Driver(TWO, steps=1).begin()
    if end == "failed":
        driver.send(SiteLost("a", "no heartbeat"))
    else:
        driver.finish()
    driver.refused(StopRequested(), "run_ended")
    assert driver.status == end


def test_a_lost_site_fails_the_run_by_name():
    driver = Driver(TWO).begin()
    driver.send(SiteLost("stranger", "no heartbeat"))
    assert driver.status is RunStatus.RUNNING
    driver.send(SiteLost("b", "no heartbeat for more than 15 s"))
    assert driver.status is RunStatus.FAILED
    assert driver.state.ended_because == "site b was lost: no heartbeat for more than 15 s"
    assert driver.send(SiteLost("a", "again")).state == driver.state


@pytest.mark.parametrize(
    ("gone", "because"),
    [
        (ProcessesGone("b", 3, rank=1, detail="boom"), "site b, rank 1: exit code 3: boom\nboom"),
        (ProcessesGone("b", 1), "site b: exit code 1"),
        (ProcessesGone("b", -9, rank=0), "site b, rank 0: killed (out of memory?)"),
        (ProcessesGone("b", 137), "site b: killed (out of memory?)"),
        (ProcessesGone("b", 0), "site b: its training script ended before the run did, at step 0 of 3"),
    ],
)
def test_a_failed_process_fails_the_run_by_name(gone, because):
    driver = Driver(TWO).begin()
    driver.send(gone)
    assert driver.status is RunStatus.FAILED
    assert driver.state.ended_because == because


def test_processes_that_nobody_saw_end_change_nothing():
    driver = Driver(TWO).begin()
    assert driver.send(ProcessesGone("b")).state == driver.state
    assert driver.status is RunStatus.RUNNING


def test_a_site_that_has_done_its_part_may_go():
    """A19: the run has succeeded when each live member reported its final digest."""
    driver = Driver(TWO, steps=1).begin().until_done()
    driver.send(driver.final("b"))
    driver.send(ProcessesGone("b", 0))
    driver.send(SiteLost("b", "its agent was stopped"))
    assert driver.status is RunStatus.RUNNING
    driver.send(driver.final("a"))
    assert driver.status is RunStatus.SUCCEEDED


def test_the_donor_may_not_go_before_its_upload():
    driver = Driver(TWO, steps=1).begin().until_done()
    driver.send(driver.final("a", stored=False))
    driver.send(ProcessesGone("a", 0))
    assert driver.status is RunStatus.FAILED


def test_every_event_of_a_stranger_is_refused():
    driver = Driver(TWO).begin()
    position = driver.state.regions["west"].head
    for event in (
        LayoutPresented("stranger", 1, LAYOUT),
        StartUploaded("stranger", START),
        Contributed("stranger", "west", 1, position, Sent(digest=FINAL, tokens=1)),
        Abstained("stranger", "west", 1, position, "none"),
        Announced("stranger", 1, 0, FINAL, True),
        FinalReported("stranger", 0, FINAL, True),
    ):
        driver.refused(event, "not_a_member")


def test_a_second_seat_for_ranks_that_had_joined_fails_the_run():
    driver = Driver(TWO)
    driver.send(StartRequested(TWO))
    driver.send(SeatTaken("a", 1, digest_of("first")))
    driver.send(SeatTaken("a", 1, digest_of("second")))  # nothing had joined yet
    assert driver.state.members["a"].seat == digest_of("second")
    driver.refused(SeatTaken("a", 2, digest_of("second")), "stale_attempt")
    driver.refused(SeatTaken("stranger", 1, digest_of("second")), "not_a_member")
    driver.send(LayoutPresented("a", 1, LAYOUT))
    driver.send(SeatTaken("a", 1, digest_of("second")))  # the answer to the first request was lost
    assert driver.status is RunStatus.STARTING
    driver.send(SeatTaken("a", 1, digest_of("third")))
    assert driver.status is RunStatus.FAILED
    assert "site a was lost: its agent was started again" in driver.state.ended_because


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
