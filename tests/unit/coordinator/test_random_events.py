"""The state machine of a run under random and hostile events, at random times. `Driver.send` checks after each one."""

import contextlib
from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from algorithms.schedule import OuterSchedule
from api.errors import ProblemError
from api.schemas import Position, RunStatus
from api.specs import Change
from coordinator.events import (
    Abstained,
    Aggregated,
    AnsweredLate,
    Arrived,
    Averaged,
    CaughtUp,
    ChangeRequested,
    Contributed,
    FinalReported,
    GuardTripped,
    HeldBack,
    LayoutPresented,
    PauseRequested,
    ProcessesGone,
    Refused,
    ResumeRequested,
    SeatTaken,
    SiteAdded,
    SiteBack,
    SiteLost,
    SiteRemoved,
    SnapshotAsked,
    SnapshotRegistered,
    SnapshotRequested,
    StartRequested,
    StartUploaded,
    StopRequested,
    StorageFull,
    Ticked,
)
from coordinator.records import Start
from coordinator.state import AggregateRound, AverageFragment, due_at, pending
from site_agent.progress import Progress
from tests.unit.coordinator.runs import FINAL, LAYOUT, START, Driver, digest_of, sent

NAMES = ("a", "b", "c", "d")
REGIONS = ("east", "north", "west")

sites = st.sampled_from((*NAMES, *NAMES, "stranger"))
attempts = st.sampled_from((0, 0, 0, 0, 0, 1, -1))
offsets = st.sampled_from((0, 0, 0, 0, 1, -1, 2))
rarely = st.integers(0, 9).map(lambda number: number == 0)


class RunMachine(RuleBasedStateMachine):
    """Sites that answer, repeat themselves, come late, fail, leave, come back and make things up."""

    @initialize(
        places=st.lists(st.sampled_from(REGIONS), min_size=1, max_size=4),
        steps=st.integers(1, 8),
        every=st.one_of(st.none(), st.integers(1, 5)),
        alone=st.sampled_from((False, False, True)),
        fragments=st.integers(1, 3),
        stagger=st.booleans(),
        delay=st.sampled_from((0, 0, 1, 2)),
        codec=st.sampled_from(("fp32", "int8")),
        buffers=st.booleans(),
        outer_deadline_s=st.sampled_from((None, None, 5.0, 90.0)),
        snapshots=st.one_of(st.none(), st.integers(1, 4)),
        deadline_s=st.sampled_from((None, None, 5.0)),
        late_rounds=st.integers(1, 3),
        restarts=st.integers(0, 2),
        demanding=rarely,
        pending=rarely,
    )
    def new_run(
        self,
        places,
        steps,
        every,
        alone,
        fragments,
        stagger,
        delay,
        codec,
        buffers,
        demanding,
        pending,
        outer_deadline_s,
        **rounds,
    ):
        every = None if every is None else min(every, steps)
        places = dict(zip(NAMES, places, strict=False))
        if every is None:
            places = dict.fromkeys(places, "west")  # regions without outer rounds never meet
        least = min(list(places.values()).count(region) for region in places.values()) if demanding else 1
        exchange = "none" if alone and every is not None else "demo"
        if exchange == "none":
            places, least = {name: f"at-{name}" for name in places}, 1
        longest = OuterSchedule(every=every or 1, fragments=fragments, steps=steps, stagger=stagger).distance - 1
        outer = {"stagger": stagger, "delay": min(delay, longest), "codec": codec, "deadline_s": outer_deadline_s}
        if exchange == "demo" and (min(delay, longest) or (stagger and fragments > 1)):
            rounds["snapshots"] = None
        start = Start(parameters=START.parameters, buffers=digest_of("buffers")) if buffers else START
        self.driver = Driver(places, steps, every, fragments, exchange, outer, start=start, min_sites=least, **rounds)
        if not pending:
            self.driver.begin()

    def send(self, event):
        with contextlib.suppress(ProblemError):
            self.driver.send(event)

    def region(self, site):
        return self.driver.state.regions.get(self.driver.region_of(site))

    # --- what honest sites would do next ------------------------------------------------------------------------------

    @rule(steps=st.integers(1, 20))
    def advance(self, steps):
        for _ in range(steps):
            if self.driver.status is RunStatus.STARTING:
                going = self.driver.prepare()
            else:
                going = self.driver.state.going_on and self.driver.exchange()
            if not going:
                break

    @rule(site=sites)
    def rejoin(self, site):
        with contextlib.suppress(ProblemError):
            self.driver.catch_up(site)

    @rule()
    def report_one(self):
        if self.driver.state.going_on:
            self.driver.report_one()

    # --- people, agents, and time -------------------------------------------------------------------------------------

    @rule(
        kind=st.sampled_from(
            ("start", "pause", "resume", "resume", "stop", "add", "remove", "guard", "full", "held", "snapshot")
        ),
        site=sites,
        region=st.sampled_from(REGIONS),
        right=st.booleans(),
        luck=rarely,
    )
    def ask(self, kind, site, region, right, luck):
        asked = {
            "start": StartRequested(self.driver.sites),
            "pause": PauseRequested(),
            "resume": ResumeRequested(),
            "stop": StopRequested(),
            "add": SiteAdded(site, self.driver.region_of(site) if right else region),
            "remove": SiteRemoved(site, "removed"),
            "guard": GuardTripped(self.driver.state.step, "the loss is not finite"),
            "full": StorageFull("the disk is full"),
            "snapshot": SnapshotRequested(),
            "held": HeldBack("Redis is to drain first"),
        }
        if kind not in ("stop", "remove", "guard", "full") or luck:
            self.send(asked[kind])

    @rule(
        ahead=st.integers(-1, 3),
        lr=st.sampled_from((None, 1e-3, 2e-3)),
        k=st.sampled_from((None, 16, 32)),
        every=st.sampled_from((None, 1, 2, 3, 5)),
    )
    def change(self, ahead, lr, k, every):
        newest = max((region.step for region in self.driver.state.regions.values()), default=0)
        self.send(ChangeRequested(Change(from_step=max(newest + 1 + ahead, 1), lr=lr, k=k, every=every)))

    @rule(
        kind=st.sampled_from(("seat", "fail", "raise", "end", "unseen", "lost", "lost", "back", "bare")),
        site=sites,
        attempt=attempts,
        words=st.sampled_from(("", "other")),
    )
    def agent(self, kind, site, attempt, words):
        attempt += self.driver.attempt(site)
        codes = {"fail": -9, "raise": 1, "end": 0, "unseen": None}
        if kind in codes:
            self.send(ProcessesGone(site, attempt, codes[kind], 0, "the end of the log"))
        elif kind == "seat":
            self.send(SeatTaken(site, attempt, digest_of("seat", site, attempt, words)))
        else:
            self.send(SiteLost(site, "no heartbeat") if kind == "lost" else SiteBack(site, ranks=kind == "back"))

    @precondition(lambda self: self.driver.state.going_on)
    @rule(region=st.sampled_from(REGIONS), back=st.booleans())
    def cut_off(self, region, back):
        """A region's link is cut, the others go on; some time it comes back."""
        here = [site for site, member in self.driver.state.members.items() if member.region == region]
        for site in here:
            self.send(SiteLost(site, "no heartbeat"))
        self.advance(30)
        for site in here if back else ():
            self.send(SiteBack(site))

    @precondition(lambda self: self.driver.state.going_on and getattr(self.driver.spec.outer, "deadline_s", None))
    @rule(region=st.integers(0, 2), passed=st.sampled_from((4.0, 6.0, 91.0)), steps=st.integers(1, 20))
    def fall_behind(self, region, passed, steps):
        """A region does nothing for a while, though it is there, and the others go on as far as they may."""
        regions = sorted(self.driver.state.regions)
        self.driver.silent = regions[region % len(regions)]
        for _ in range(2):
            self.advance(steps)
            self.driver.pass_time(passed)
        self.driver.silent = None

    @rule(
        passed=st.sampled_from((0.0, 0.2, 3.0, 11.0, 61.0, 700.0)),
        ticks=st.booleans(),
        outage_s=st.sampled_from((0.0, 0.0, 0.0, 30.0)),
    )
    def pass_time(self, passed, ticks, outage_s):
        self.driver.now += timedelta(seconds=passed)
        if ticks:
            self.driver.send(Ticked(min(outage_s, passed)))

    @rule(but=sites)
    def wait_for_the_deadline(self, but):
        """Everybody answers but one, until it is time."""
        for region in self.driver.state.regions.values() if self.driver.state.going_on else ():
            for site in self.driver.live(region.name):
                if site != but and region.round is not None:
                    self.send(self.driver.contribution(site))
        self.driver.send(Ticked())
        due = due_at(self.driver.state)
        if due is not None:
            self.driver.now = due
            self.driver.send(Ticked())

    # --- what ranks say -----------------------------------------------------------------------------------------------

    @rule(
        kind=st.sampled_from(("contribution", "contribution", "abstention", "refusal", "late")),
        site=sites,
        elsewhere=rarely,
        offset=offsets,
        attempt=attempts,
        tokens=st.sampled_from((0, 7, 2**40)),
        variant=st.sampled_from(("", "", "", "other")),
        off_chain=rarely,
    )
    def answer(self, kind, site, elsewhere, offset, attempt, tokens, variant, off_chain):
        name = "nowhere" if elsewhere else self.driver.region_of(site)
        region = self.driver.state.regions.get(name)
        step = max(0, (region.step if region else 0) + 1 + offset)
        position = Position(seq=3, hash="1" * 64) if off_chain else Driver.position(region)
        place = (site, self.driver.attempt(site) + attempt, name, step, position)
        if kind == "late":
            self.send(AnsweredLate(site, place[1], step))
        elif kind == "contribution":
            self.send(Contributed(*place, sent(site, step, tokens, variant, tokens=tokens)))
        else:
            self.send(Abstained(*place, "no data") if kind == "abstention" else Refused(*place, "rubbish"))

    @rule(
        kind=st.sampled_from(("layout", "start", "caught up", "final", "final")),
        site=sites,
        attempt=attempts,
        behind=st.sampled_from((0, 0, 0, 1, -1)),
        stored=st.booleans(),
    )
    def report(self, kind, site, attempt, behind, stored):
        attempt += self.driver.attempt(site)
        head = Driver.position(self.region(site))
        seq = max(0, head.seq - behind)
        said = {
            "layout": LayoutPresented(site, attempt, LAYOUT),
            "start": StartUploaded(site, attempt, self.driver.start),
            "caught up": CaughtUp(site, attempt, head if not behind else Position(seq=seq, hash="1" * 64)),
            "final": FinalReported(site, attempt, seq, FINAL, stored),
        }
        self.send(said[kind])

    @precondition(lambda self: self.driver.state.wanted is not None)
    @rule(kind=st.sampled_from(("asked", "taken", "registered")), site=sites, attempt=attempts, offset=offsets)
    def snapshot(self, kind, site, attempt, offset):
        number = max(1, self.driver.state.last_snapshot + offset)
        if kind == "registered":
            self.send(SnapshotRegistered(number, digest_of("manifest", number)))
        elif kind == "asked":
            self.send(SnapshotAsked(site, self.driver.attempt(site) + attempt))
        elif self.region(site) is not None:
            taken = self.driver.snapshot(site, number)
            self.send(replace(taken, attempt=taken.attempt + attempt))

    @rule(
        site=sites,
        attempt=attempts,
        fragment=st.integers(0, 3),
        offset=st.sampled_from((0, 0, 0, 0, 0, 1, -1)),
        astray=rarely,
        stored=st.booleans(),
    )
    def announce(self, site, attempt, fragment, offset, astray, stored):
        number = max(0, self.driver.state.outer_rounds + 1 + offset)
        digest = digest_of("astray", site) if astray else None
        said = self.driver.announcement(site, fragment, digest=digest, stored=stored, number=number)
        self.send(replace(said, attempt=said.attempt + attempt))

    @rule(site=sites, attempt=attempts, offset=st.sampled_from((0, 0, 0, 1, -1)), tokens=st.sampled_from((0, 7, 2**40)))
    def arrive(self, site, attempt, offset, tokens):
        number = max(0, self.driver.state.outer_rounds + 1 + offset)
        self.send(Arrived(site, self.driver.attempt(site) + attempt, number, tokens))

    # --- the coordinator ----------------------------------------------------------------------------------------------

    @rule()
    def work(self):
        self.driver.work()

    @precondition(lambda self: self.driver.state.regions)
    @rule(index=st.integers(0, 2), offset=st.sampled_from((0, 1, 2)))
    def aggregate_late_or_early(self, index, offset):
        """A second process that computed a round again, or for a state that is no more."""
        regions = sorted(self.driver.state.regions.values(), key=lambda region: region.name)
        region = regions[index % len(regions)]
        step = max(1, region.step + 1 - offset)
        self.driver.send(Ticked())
        state = self.driver.state
        if AggregateRound(region.name, step) not in pending(state) and not state.storage_full:
            before = self.driver.state
            self.send(Aggregated(region.name, step, (digest_of("again"),), {}))
            assert self.driver.state == before

    @rule(fragment=st.integers(0, 3), offset=st.sampled_from((0, 1)), other=st.booleans())
    def average_late_or_early(self, fragment, offset, other):
        """Of a fragment that is not ready, or of copies that count no more."""
        self.driver.send(Ticked())
        number, outer = self.driver.state.outer_rounds + 1 - offset, self.driver.state.outer
        jobs = {(job.number, job.fragment) for job in pending(self.driver.state) if isinstance(job, AverageFragment)}
        known = (number, fragment) in jobs or self.driver.state.storage_full
        if (not known or other) and (outer is None or fragment in outer.fragments):
            before = self.driver.state
            self.send(Averaged(number, fragment, {"west": (digest_of("other"),)}, digest_of("again"), None))
            assert self.driver.state == before

    # --- the end ------------------------------------------------------------------------------------------------------

    def teardown(self):
        """From wherever they are: runs that nobody stopped, and that have sites enough, succeed."""
        driver = getattr(self, "driver", None)
        if driver is None:
            return
        driver.pass_time(0)
        if driver.status is RunStatus.STOPPING:
            for site in list(driver.state.members):
                driver.send(ProcessesGone(site, driver.attempt(site)))
            assert driver.status is RunStatus.STOPPED
        elif not driver.status.terminal:
            self._end_well(driver)
        assert not pending(driver.state)
        assert due_at(driver.state) is None

    @staticmethod
    def _end_well(driver):
        """With those who are live, if they are enough, or else with everybody back."""
        if driver.status is RunStatus.PAUSED:
            driver.send(ResumeRequested())
        if not driver.has_enough():
            driver.bring_back()
            driver.pass_time(86_400)
        driver.finish()
        assert driver.status is RunStatus.SUCCEEDED, driver.state.ended_because or driver.words
        assert {region.step for region in driver.state.regions.values()} == {driver.spec.steps}
        assert driver.state.outer_rounds == driver.due_outer_rounds
        assert [summary.number for summary in driver.summaries] == list(range(1, driver.due_outer_rounds + 1))
        for region in driver.state.regions:
            kinds = [header["kind"] for header in driver.logs[region]]
            assert kinds.count("step") <= driver.spec.steps
            assert kinds.count("anchor") == sum(len(fragments) for _, fragments in driver.outer_turns())
            read(driver, driver.logs[region])
            if driver.spec.outer is not None:
                read(driver, driver.logs[region], driver.state.regions[region].resume)


def read(driver, log, resume=None):
    """The log alone tells its reader which outer rounds there are, from wherever it may be entered."""
    outer, step = Progress(driver.spec.outer_schedule), 0
    outer.has_buffers = driver.start.buffers is not None
    if resume is not None:
        outer.enter(resume.outer_round, resume.outer_step, resume.in_force.every)
        log, step = log[resume.position.seq + 1 :], resume.step
    for header in log:
        if outer.begins(step):
            outer.begin(step)
        if header["kind"] == "anchor":
            outer.take(header)
            assert (outer.number, outer.step) == (header["outer_round"], header["taken_after"])
        elif header["kind"] == "change":
            outer.change(header["from_step"], header["every"])
        else:
            assert not outer.is_held(step)
        step = header["step"]
    assert (outer.number, outer.missing) == (driver.due_outer_rounds, set())
    assert not outer.begins(step)


TestRunMachine = pytest.mark.timeout(3600)(RunMachine.TestCase)
TestRunMachine.settings = (
    settings()
    if settings.get_current_profile_name() == "deep"
    else settings(max_examples=40, stateful_step_count=50, deadline=None)
)


@pytest.mark.slow
class TestMoreRuns(RunMachine.TestCase):
    settings = settings(max_examples=400, stateful_step_count=50, deadline=None)
