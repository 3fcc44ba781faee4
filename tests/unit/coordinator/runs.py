"""Drives the state machine of a run as sites and engine would, and keeps books of its own to compare with."""

import contextlib
import hashlib
import json
import statistics
from collections import defaultdict
from datetime import UTC, datetime, timedelta

import pytest

from algorithms.schedule import learning_rate
from api.errors import ProblemError
from api.schemas import Position, RunStatus, SnapshotUpload
from api.specs import OuterSpec, RoundsSpec, RunSpec, SnapshotsSpec
from coordinator.events import (
    Abstained,
    Aggregated,
    Announced,
    Arrived,
    Averaged,
    CaughtUp,
    Contributed,
    FinalReported,
    LayoutPresented,
    Norm,
    ProcessesGone,
    Refused,
    SeatTaken,
    SiteAdded,
    SiteBack,
    SnapshotRegistered,
    SnapshotTaken,
    StartRequested,
    StartUploaded,
    Ticked,
)
from coordinator.quorum import region_copies
from coordinator.records import Layout, RunState, Sent, Start
from coordinator.state import AggregateRound, WriteManifest, due_at, pending, transition
from coordinator.waiting import waiting_for

NOW = datetime(2026, 1, 1, 10, tzinfo=UTC)
FINAL = "f" * 64


def digest_of(*words):
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()


def sent(*words, tokens):
    """A contribution of one part, whose bytes these words stand for."""
    return Sent(digest=digest_of(*words), parts=(digest_of("part", *words),), tokens=tokens, norm=1.0)


LAYOUT = Layout(digest=digest_of("layout"), blob=digest_of("layout blob"), groups=("decay", "no_decay"))
START = Start(parameters=digest_of("parameters"))


def entry_hash(header):
    text = json.dumps(header, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def allowance(delays, deadline_s):
    """Seconds for which a site is waited for, by section 2 of docs/decisions/0003-absence.md."""
    if deadline_s is not None:
        return deadline_s
    if len(delays) < 4:
        return 60
    middle = statistics.median(delays)
    spread = 6 * statistics.median([abs(delay - middle) for delay in delays])
    return 10 if middle > 600 else max(10, min(600, max(middle * 3 / 2, middle + spread)))


class Driver:
    """A run's state, every log line that its transitions asked for, and what was taken in.

    Args:
        sites: region by site.
        every: inner steps between outer rounds; None: no outer rounds.
        exchange: none: regions without rounds.
        outer: more of the spec's outer steps.
        start: entry 0.
        snapshots: steps between snapshots; None: only those that are asked for. Two are kept.
        rounds: of the spec.
    """

    def __init__(
        self, sites, steps=3, every=None, fragments=1, exchange="demo", outer=(), snapshots=None, start=START, **rounds
    ):
        outer = OuterSpec(every=every, fragments=fragments, **dict(outer)) if every else None
        self.sites = sites
        self.start = start
        self.spec = RunSpec(
            name="drill",
            task="drill",
            steps=steps,
            outer=outer,
            exchange=exchange,
            rounds=RoundsSpec(**rounds),
            snapshots=SnapshotsSpec(every=snapshots, keep=2),
        )
        self.state = RunState(id="drill-1", spec=self.spec, created_at=NOW, since=NOW)
        self.now = NOW
        self.logs = defaultdict(list)
        self.accepted = defaultdict(dict)
        self.abstained = defaultdict(dict)
        self.refusals = defaultdict(dict)
        self.tokens = defaultdict(list)
        """Of each region: steps, and the tokens that their entries list."""
        self.arrivals = {}
        """Of sites of regions without rounds: attempt, seat, number of the outer round, tokens."""
        self.silent = None
        """A region whose sites do nothing in `exchange`, though they are there."""
        self.closed = set()
        self.summaries = []
        self.had_copies = {}
        """The regions with copies that counted, by outer round and fragment."""
        self.counted = defaultdict(int)
        """Of each region: the step up to which its tokens have come into a mean, or are lost."""
        self.met_at = None
        """When a region came to the next outer round; outages and pauses do not count."""
        self.opened_with = set()
        """The regions that were in time when the last outer round opened."""
        self.opened_away = set()
        """Those of which nobody was there."""
        self.came = {}
        """Regions that the run did not begin with: how many outer rounds were over, and whether one was open."""

    # --- events -------------------------------------------------------------------------------------------------------

    def send(self, event):
        """Applies an event and checks everything that holds after any event."""
        before = self.state
        text = before.model_dump_json()
        try:
            done = transition(before, event, self.now)
        except ProblemError:
            assert before.model_dump_json() == text
            raise
        assert before.model_dump_json() == text
        self.state = done.state
        self._book(event, before)
        self._check(before, done)
        self._check_kept()
        self._check_again(event)
        return done

    def refused(self, event, code):
        """Sends an event that must be refused; returns the error."""
        with pytest.raises(ProblemError) as caught:
            self.send(event)
        assert caught.value.code == code
        return caught.value

    def pass_time(self, seconds):
        self.now += timedelta(seconds=seconds)
        return self.send(Ticked())

    def _book(self, event, before):
        """Notes what was taken in; a second answer of a site to one step would show here."""
        if isinstance(event, Arrived):
            self._book_arrival(event, before)
        if isinstance(event, Ticked) and self.met_at is not None:
            self.met_at += timedelta(seconds=event.outage_s)
        if isinstance(event, Averaged):
            self._book_mean(event, before)
        if not isinstance(event, Contributed | Abstained | Refused):
            return
        place = event.region, event.step
        round_ = before.regions[event.region].round
        if round_ is not None and event.site in {**round_.contributions, **round_.abstentions}:
            return
        if isinstance(event, Refused) and event.site in round_.refusals:
            return
        assert not round_.frozen
        assert event.position == before.regions[event.region].head
        assert event.attempt == before.members[event.site].attempt
        assert event.site not in self.accepted[place]
        assert event.site not in self.abstained[place]
        if isinstance(event, Refused):
            self.refusals[place][event.site] = event.reason
            return
        self.refusals[place].pop(event.site, None)
        if isinstance(event, Contributed):
            self.accepted[place][event.site] = event.sent
        else:
            self.abstained[place][event.site] = event.reason
        member = self.state.members[event.site]
        assert member.live or self.state.status.terminal

    def _book_arrival(self, event, before):
        """The first that its ranks report of the next outer round, as long as that is not open."""
        ranks = event.attempt, before.members[event.site].seat
        next_one = before.outer is None and event.number == before.outer_rounds + 1
        if next_one and self.arrivals.get(event.site, ())[:3] != (*ranks, event.number):
            self.arrivals[event.site] = (*ranks, event.number, event.tokens)

    def _book_mean(self, event, before):
        if before.outer is None or before.outer.number != event.number or before.outer.fragments[event.fragment].anchor:
            return
        after = self.state.outer
        if after is None or after.number != event.number or after.fragments[event.fragment].anchor is not None:
            self.had_copies[event.number, event.fragment] = set(event.copies)

    # --- what holds after any event -----------------------------------------------------------------------------------

    def _check(self, before, done):
        state = self.state
        if before.status.terminal:
            assert state == before
            assert not done.entries
        for name, region in state.regions.items():
            if name in before.regions:
                self._check_freeze(before, before.regions[name], region)
        for name in state.regions.keys() - before.regions.keys() if before.going_on else ():
            self.came[name] = len(self.summaries), before.outer is not None
        for region, header in done.entries:
            self._check_entry(region, header)
        for name in state.regions.keys() - before.regions.keys() if before.going_on else ():
            self._check_beginning(name)
        if state.status is RunStatus.FAILED and "is left in region" in state.ended_because:
            assert state.ended_because.split("region ")[1].split(":")[0] not in self.came
        self._check_late(before)
        if state.outer is not None and before.outer is None:
            self._check_opening()
        if done.outer_round is not None:
            self.summaries.append(done.outer_round)
            for name in state.regions:
                self._book_tokens(name)
        for name, region in state.regions.items():
            self._check_region(before.regions.get(name), name, region)
        for site, member in state.members.items():
            assert member.attempt >= (before.members[site].attempt if site in before.members else 1)
            assert NOW <= member.since <= self.now
        assert RunState.model_validate_json(state.model_dump_json()) == state
        self._book_meeting(before)
        self._check_words()

    def _check_opening(self):
        """Everybody who is live is there, or late; without rounds they have said so, and on how many tokens."""
        state = self.state
        self.opened_with = set(state.outer.weights)
        self.opened_away = {name for name in state.regions if not self.live(name)}
        regions = {self.region_of(site) for site in self.live()}
        late = {self.region_of(site) for site in state.outer.late}
        assert set(state.outer.weights) == regions - late
        assert state.outer.late == {site for name in late for site in self.live(name)}
        assert state.outer.participants == set(self.live()) - state.outer.late
        if late:
            assert self.met_at is not None
            assert self.now >= self.met_at + timedelta(seconds=self.spec.outer.deadline_s)
            assert 2 * len(late) <= len(regions)
        for site in sorted(state.outer.participants) if self.spec.exchange == "none" else ():
            attempt, seat, number, tokens = self.arrivals[site]
            assert (attempt, seat, number) == (self.attempt(site), self.member(site).seat, state.outer.number)
            assert state.outer.weights[self.region_of(site)] == tokens

    def _check_late(self, before):
        """Who was a participant and is there stays one until the deadline, which half of the regions have kept."""
        outer, after = before.outer, self.state.outer
        if outer is None or after is None or after.number != outer.number:
            return
        assert outer.late <= after.late
        dropped = after.late - outer.late
        if dropped:
            first = outer.announced_at or self.now
            assert self.now >= first + timedelta(seconds=self.spec.outer.deadline_s)
            kept = {self.region_of(site) for site in after.participants}
            assert 2 * len(kept) >= len(kept | {self.region_of(site) for site in dropped})
            for fragment in after.fragments.values():
                assert fragment.anchor is not None or fragment.copies.keys() >= after.participants

    def _book_meeting(self, before):
        """Whether some region waits for others, before an outer round, or with its anchors."""
        state, number, waits = self.state, self.state.outer_rounds + 1, False
        goes_on = self.spec.outer is not None and self.spec.outer.deadline_s is not None
        if not goes_on or state.status is not RunStatus.RUNNING or number > len(self.outer_turns()):
            self.met_at = None
            return
        step, fragments = self.outer_turns()[number - 1]
        for site in self.live():
            region = self.region_of(site)
            there = state.regions[region].step >= step
            if state.outer is not None:
                held = [line for line in self.logs[region] if line.get("outer_round") == number]
                there = region in self.opened_with and len(held) == len(fragments)
            elif self.spec.exchange == "none":
                there = self.arrivals.get(site, ())[:3] == (self.attempt(site), self.member(site).seat, number)
            waits = waits or there
        if before.outer_rounds != state.outer_rounds or (state.outer is None) != (before.outer is None):
            self.met_at = None
        self.met_at = (self.met_at or self.now) if waits else None

    def _book_tokens(self, name):
        """At the end of an outer round: what was in no mean counts next time, if the region has kept it."""
        number = len(self.summaries)
        ours = [line for line in self.logs[name] if line["kind"] == "anchor" and line["outer_round"] == number]
        ours = [line for line in ours if line["fragment"] < self.spec.outer.fragments]
        in_mean = any(name in {part["region"] for part in line["participants"]} for line in ours)
        if not in_mean and any(line["before"] is not None for line in ours):
            return
        there = in_mean or name in self.opened_with
        self.counted[name] = ours[0]["taken_after"] if there else ours[0]["step"]

    def _check_kept(self):
        """What was accepted is in the entry of its step, or in the round that is open (A1)."""
        for (name, step), sent in self.accepted.items():
            if (name, step) in self.closed or self.state.status.terminal or not sent:
                continue
            round_ = self.state.regions[name].round
            assert round_ is not None
            assert (round_.step, round_.contributions) == (step, sent)
            assert round_.abstentions == self.abstained[name, step]

    def _check_again(self, event):
        """What was taken in changes nothing when it is sent again; nor does time that stands still."""
        state = self.state
        assert transition(state, Ticked(), self.now).state == state
        due = due_at(state)
        if due is not None:
            assert due > self.now
            assert transition(state, Ticked(), due - timedelta(milliseconds=1)).state == state
            assert transition(state, Ticked(), due).state != state
        if not isinstance(event, Ticked):
            with contextlib.suppress(ProblemError):
                assert transition(state, event, self.now).state == state

    def _check_region(self, before, name, region):
        step = before.step if before else 0
        log = self.logs[name]
        last = next((line for line in reversed(log) if line["kind"] != "change"), None)
        jumped = region.step > step and last["kind"] == "anchor"
        assert 0 <= region.step - step <= 1 or jumped
        assert region.step <= self.spec.steps
        copied = self.state.outer is not None and name in self.state.outer.weights
        since = self.outer_turns()[self.state.outer_rounds][0] if copied else self.counted[name]
        assert region.tokens == self.tokens_between(name, since, self.spec.steps)
        assert region.unchanged == max((line["seq"] for line in log if line["kind"] != "change"), default=0)
        assert region.changes == sum(line["kind"] == "change" for line in log)
        assert region.head == (Position(seq=len(log) - 1, hash=entry_hash(log[-1])) if log else None)
        assert (region.step, name) in {(line["step"], name) for line in log} | {(0, name)}
        self._check_snapshots(name)
        if region.resume is not None and self.spec.outer is not None:
            entry = log[region.resume.position.seq]
            assert (entry["kind"], entry_hash(entry)) == ("anchor", region.resume.position.hash)
            ours = {line["fragment"]: line for line in log[: entry["seq"] + 1] if line["kind"] == "anchor"}
            buffers = [region.resume.buffers] if self.start.buffers is not None else []
            by_fragment = sorted((fragment, line["digest"]) for fragment, line in ours.items())
            assert by_fragment == list(enumerate([*region.resume.anchors, *buffers]))
            if self.spec.exchange == "demo":
                assert {line["taken_after"] for line in ours.values()} == {entry["step"]}
                assert {line.get("before") for line in ours.values()} == {None}, "its sites hold something else"
            assert (region.resume.step, region.resume.outer_step) == (entry["step"], entry["taken_after"])
            assert region.resume.in_force.model_dump() == self.settings_at(region.resume.step)
            assert region.resume.outer_round == entry["outer_round"]

    def _check_snapshots(self, name):
        """They are of places of the log, in order; the log may be entered at the newest, or later."""
        state, log = self.state, self.logs[name]
        numbers = [snapshot.number for snapshot in state.snapshots]
        assert numbers == sorted(set(numbers))
        assert len(numbers) <= self.spec.snapshots.keep
        for snapshot in state.snapshots:
            position = snapshot.contents.positions.get(name)
            if position is None and snapshot.contents.rounds <= self.came.get(name, (0, False))[0]:
                continue
            if position is None:
                missed = [line for line in log if line.get("outer_round") == snapshot.contents.rounds]
                assert any(line.get("before") is not None for line in missed)
                continue
            assert entry_hash(log[position.seq]) == position.hash
            assert log[position.seq]["step"] == snapshot.contents.step
            assert position.seq <= state.regions[name].resume.position.seq
            if self.spec.outer is not None:
                taken_after = self.summaries[snapshot.contents.rounds - 1].step
                assert snapshot.contents.step == min(taken_after + self.spec.outer.delay, self.spec.steps)
                assert len(snapshot.contents.parameters) == len(snapshot.contents.momenta) == self.spec.outer.fragments
        if state.wanted is not None:
            assert state.wanted.number == state.last_snapshot > max(numbers, default=0)

    def _check_freeze(self, run_before, before, after):
        """Who was waited for when the round was frozen, by the rules of section 2."""
        round_ = before.round
        if round_ is None or round_.frozen or self.state.status.terminal:
            return
        if after.round is not None and after.round.step == round_.step and not after.round.frozen:
            return
        if not self.live(after.name) and (self._left_behind(after.name) or not round_.answered):
            return  # an outer round goes on without this region
        if self._is_late(run_before, before):
            return
        rounds = self.spec.rounds
        waited_for = {
            member.site
            for member in self.state.members.values()
            if member.region == after.name
            if member.live or self._benched_just_now(member, run_before.members.get(member.site))
            if not member.excluded and not member.away and member.caught_up
        }
        place = after.name, round_.step
        answered = {*self.accepted[place], *self.abstained[place], *self.refusals[place]}
        answers = len(answered & waited_for)
        assert answers >= rounds.min_sites
        if answered >= waited_for:
            return
        missing = waited_for - answered
        delay = max(allowance(self.state.members[site].delays, rounds.deadline_s) for site in missing)
        first = after.round.first_answer if after.round and after.round.frozen else round_.first_answer
        assert first + timedelta(seconds=delay) <= self.now
        assert 2 * answers >= len(waited_for)
        for site in waited_for - answered:
            assert self.state.members[site].missed > 0
            assert self.state.members[site].live == (self.state.members[site].missed < rounds.late_rounds)

    def _is_late(self, run_before, region):
        """Whether others go on, now, before this region has come to an outer round, or to where its anchors are."""
        if self.met_at is None or self.now < self.met_at + timedelta(seconds=self.spec.outer.deadline_s):
            return False
        step, _ = self.outer_turns()[run_before.outer_rounds]
        return region.step < min(step + (self.spec.outer.delay if run_before.outer else 0), self.spec.steps)

    def _benched_just_now(self, member, before):
        benched_until = self.now + timedelta(seconds=self.spec.rounds.bench_s)
        return member.benched_until == benched_until and before is not None and member.missed > before.missed

    def settings_at(self, step):
        """Learning rate, k and H, by the changes that were taken in."""
        values = {"lr": self.spec.optimizer.lr, "k": self.spec.optimizer.k, "every": None}
        values["every"] = self.spec.outer.every if self.spec.outer else None
        for change in self.state.changes:
            if change.from_step <= step:
                values |= {name: value for name, value in vars(change).items() if name in values and value is not None}
        return values

    def outer_turns(self):
        """The steps that outer rounds follow and the fragments of each, by the changes that were taken in."""
        outer, turns = self.spec.outer, []
        for step in range(1, self.spec.steps + 1) if outer else ():
            every, last = self.settings_at(step)["every"], step == self.spec.steps
            offsets = [(f + 1) * every // outer.fragments if outer.stagger else 0 for f in range(outer.fragments)]
            due = [fragment for fragment, offset in enumerate(offsets) if last or (step - offset) % every == 0]
            if due and (last or not turns or step > turns[-1][0] + outer.delay):
                buffers = [outer.fragments] if self.start.buffers and due[-1] == outer.fragments - 1 else []
                turns.append((step, due + buffers))
        return turns

    def _left_behind(self, name):
        """Whether every region with a live member has reached the next outer step, but this one.

        Or, while anchors are on their way, the step at which they are applied.
        """
        turns, held = self.outer_turns(), self.state.outer_rounds
        live = [region for region in self.state.regions if self.live(region)]
        if held == len(turns) or not live or name in live:
            return False
        step = turns[held][0] + (self.spec.outer.delay if self.state.outer else 0)
        return all(self.state.regions[there].step >= min(step, self.spec.steps) for there in live)

    def _check_entry(self, region, header):
        log = self.logs[region]
        assert header["seq"] == len(log)
        assert header["previous"] == (entry_hash(log[-1]) if log else "0" * 64)
        assert header["step"] >= (log[-1]["step"] if log else 0)
        log.append(header)
        if header["kind"] == "step":
            self._check_step(region, header)
        if header["kind"] == "change":
            self._check_change(region, header)
        if header["kind"] == "anchor":
            seen = [(line["outer_round"], line["fragment"]) for line in log if line["kind"] == "anchor"]
            assert len(set(seen)) == len(seen)
            if header["outer_round"] <= self.came.get(region, (0, False))[0]:
                assert header["participants"] == []
                return
            weights = {part["region"]: part["weight"] for part in header["participants"]}
            assert weights
            self._check_anchor(header, weights)
            self._check_left_out(region, header)
            for name in self.state.regions:
                first = max(self.came.get(name, (0, False))[0], self.came.get(region, (0, False))[0])
                ours, own = self._anchors(region, first), self._anchors(name, first)
                place = len(ours) - 1
                if len(own) > place >= 0:
                    ignored = ("seq", "previous", "before")
                    assert {key: value for key, value in own[place].items() if key not in ignored} == {
                        key: value for key, value in ours[place].items() if key not in ignored
                    }

    def _anchors(self, region, behind=0):
        """Those of outer rounds after that one."""
        lines = [line for line in self.logs[region] if line["kind"] == "anchor"]
        return [line for line in lines if line["outer_round"] > max(behind, self.came.get(region, (0, False))[0])]

    def _check_beginning(self, region):
        """A region that comes has entry 0, and the anchors that all others have behind the last outer round."""
        held, opened = self.came[region]
        log = self.logs[region]
        first = next(name for name in self.state.regions if name not in self.came)
        assert log[0] == self.logs[first][0]
        newest = {}
        for line in self.logs[first]:
            if line["kind"] == "anchor" and line["outer_round"] <= held:
                newest[line["fragment"]] = line["digest"]
        ours = {line["fragment"]: line for line in log if line["kind"] == "anchor" and line["outer_round"] <= held}
        unknown = {self.spec.outer.fragments} if opened else set()
        assert newest.keys() - unknown <= ours.keys() <= newest.keys()
        for fragment, line in ours.items():
            assert line["digest"] == newest[fragment]
            self._check_anchor(line, {})
            assert line.get("before") is None
            assert ("before" in line) == (fragment < self.spec.outer.fragments)
        assert [line["seq"] for line in ours.values()] == list(range(1, len(ours) + 1))
        if not opened:
            turn = self.summaries[-1].step if held else 0
            assert self.state.regions[region].step == (
                min(turn + self.spec.outer.delay, self.spec.steps) if held else 0
            )

    def _check_anchor(self, header, weights):
        number = header["outer_round"]
        step, fragments = self.outer_turns()[number - 1]
        assert header["taken_after"] == step
        assert header["step"] == min(step + self.spec.outer.delay, self.spec.steps)
        assert header["every"] == self.settings_at(step)["every"]
        assert header["fragment"] in fragments or not weights
        if self.spec.exchange != "none":
            since = {name: self.tokens_between(name, self.counted[name], step) for name in weights}
            assert weights == since

    def _check_left_out(self, region, header):
        """A region that was not in the mean moves with the anchor.

        It takes it as it is after the last step, or if its own copies were refused, or if it was away and holds the
        anchors, or was left out before, too.
        """
        number, fragment = header["outer_round"], header["fragment"]
        if fragment == self.spec.outer.fragments or region in {part["region"] for part in header["participants"]}:
            assert "before" not in header
            return
        anchors = [line for line in self.logs[region][:-1] if line["kind"] == "anchor"]
        last = [line for line in anchors if line["outer_round"] == number - 1]
        together = set(self.outer_turns()[number - 1][1]) >= set(range(self.spec.outer.fragments))
        again = any(line.get("before") is not None for line in last) and region in self.opened_away
        again = again or (region not in self.opened_with and self._holds_the_anchors(region, number))
        again = again or self.came.get(region) == (number - 1, True)
        together = together or self.came.get(region) == (number - 1, True)
        refused = region in self.had_copies[number, fragment]
        if refused or header["taken_after"] == self.spec.steps or (again and together):
            assert header["before"] is None
            return
        earlier = [line["digest"] for line in anchors if line["fragment"] == fragment]
        assert header["before"] == (earlier[-1] if earlier else self.start.parameters)

    def _holds_the_anchors(self, region, number):
        """Whether its log ended, before this outer round, with anchors that are all parameters."""
        log = [line for line in self.logs[region] if line["kind"] != "change" and line.get("outer_round") != number]
        if self.spec.exchange == "none" or log[-1]["kind"] != "anchor":
            return self.spec.exchange != "none" and log[-1]["kind"] == "start"
        last = [line for line in log if line.get("outer_round") == log[-1]["outer_round"]]
        delayed = log[-1]["taken_after"] < log[-1]["step"]
        return (
            not delayed
            and all(line.get("before") is None for line in last)
            and {line["fragment"] for line in last} >= set(range(self.spec.outer.fragments))
        )

    def tokens_between(self, region, after, until):
        """That a region was trained on in these steps."""
        return sum(tokens for step, tokens in self.tokens[region] if after < step <= until)

    def _check_change(self, region, header):
        """It comes right before the step is opened, or a later one if the region was taken along; or, without rounds,
        right behind an outer round.
        """
        assert header["from_step"] <= header["step"] + 1
        if self.spec.exchange == "none":
            taken, _ = self.outer_turns()[self.state.outer_rounds - 1]
            assert header["step"] == min(taken + self.spec.outer.delay, self.spec.steps)
            assert header["from_step"] - 1 == header["step"] or region in self.came
            assert self.logs[region][-2]["kind"] in ("anchor", "change")
        else:
            assert self.state.regions[region].round.step == header["step"] + 1
        changes = [line for line in self.logs[region] if line["kind"] == "change"]
        told = [change.from_step for change in self.state.changes[: len(changes)]]
        assert [line["from_step"] for line in changes] == told

    def _check_step(self, region, header):
        place = region, header["step"]
        settings = self.settings_at(header["step"])
        assert header["k"] == settings["k"]
        optimizer = self.spec.optimizer
        schedule = {"steps": self.spec.steps, "warmup": optimizer.warmup, "schedule": optimizer.schedule}
        assert header["lr"] == [learning_rate(header["step"], lr=settings["lr"], **schedule)] * 2
        changes = [line for line in self.logs[region] if line["kind"] == "change"]
        if changes:
            assert {name: changes[-1][name] for name in settings} == settings
        assert place not in self.closed
        self.closed.add(place)
        listed = {line["site"]: line for line in header["contributors"]}
        accepted = self.accepted[place].items()
        assert {site: (line["digest"], line["tokens"]) for site, line in listed.items()} == {
            site: (body.digest, body.tokens) for site, body in accepted
        }
        assert list(listed) == sorted(listed)
        assert {line["site"]: line["reason"] for line in header["abstentions"]} == self.abstained[place]
        assert {line["site"]: line["reason"] for line in header["refusals"]} == self.refusals[place]
        assert len(listed) + len(self.abstained[place]) + len(self.refusals[place]) >= 1
        assert bool(header["parts"]) == bool(listed)
        self.tokens[region].append((header["step"], sum(line["tokens"] for line in listed.values())))

    def _check_words(self):
        """Nothing to do and nobody to wait for is a hang."""
        state, words = self.state, waiting_for(self.state)
        assert words
        assert words == words.strip()
        if state.status.terminal or state.status in (RunStatus.PENDING, RunStatus.PAUSED) or pending(state):
            return
        assert any(f" {site}" in words or f" {site}," in words for site in state.members) or "add sites" in words, words

    # --- what sites and the engine do ---------------------------------------------------------------------------------

    @property
    def status(self):
        return self.state.status

    @property
    def words(self):
        return waiting_for(self.state)

    def member(self, site):
        return self.state.members[site]

    def attempt(self, site):
        return self.state.members[site].attempt if site in self.state.members else 1

    def region_of(self, site):
        member = self.state.members.get(site)
        return member.region if member else self.sites.get(site, "west")

    def live(self, region=None):
        """As section 1 of docs/decisions/0003-absence.md says."""
        return [
            site
            for site, member in sorted(self.state.members.items())
            if region in (None, member.region)
            if not (member.excluded or member.away or member.benched_until or not member.caught_up)
        ]

    def begin(self):
        """Until the run is running."""
        if self.status is RunStatus.PENDING:
            self.send(StartRequested(self.sites))
        while self.status is RunStatus.STARTING:
            assert self.prepare()
        return self

    def prepare(self):
        """One thing that is due before the start. False if nothing is left."""
        for site in self.state.present():
            if not self.member(site).ready:
                self.take_seat(site)
                self.send(self.layout(site))
                return True
        site = self.state.first_site
        if site is not None and self.state.start is None:
            self.send(StartUploaded(site, self.attempt(site), self.start))
            return True
        return False

    def take_seat(self, site, words=""):
        self.send(SeatTaken(site, self.attempt(site), digest_of("seat", site, self.attempt(site), words)))

    def layout(self, site, layout=LAYOUT):
        return LayoutPresented(site, self.attempt(site), layout)

    def contribution(self, site, *, step=None, tokens=7, variant="", position=None, region=None):
        name = region or self.region_of(site)
        own = self.state.regions.get(name)
        step = step if step is not None else own.step + 1
        body = sent(site, step, tokens, variant, tokens=tokens)
        return Contributed(site, self.attempt(site), name, step, position or self.position(own), body)

    def abstention(self, site, *, step=None, reason="no data"):
        region = self.state.regions[self.region_of(site)]
        step = region.step + 1 if step is None else step
        return Abstained(site, self.attempt(site), region.name, step, self.position(region), reason)

    def refusal(self, site, reason="tensor w: not finite"):
        region = self.state.regions[self.region_of(site)]
        return Refused(site, self.attempt(site), region.name, region.step + 1, self.position(region), reason)

    @staticmethod
    def position(region):
        return Position(seq=0, hash="0" * 64) if region is None or region.head is None else region.head

    def caught_up(self, site, position=None):
        position = position or self.position(self.state.regions[self.region_of(site)])
        return CaughtUp(site, self.attempt(site), position)

    def catch_up(self, site):
        """As new ranks do: they present their layout and replay the log."""
        self.take_seat(site)
        self.send(self.layout(site))
        return self.send(self.caught_up(site))

    def gone(self, site, code=1, **how):
        return ProcessesGone(site, self.attempt(site), code, **how)

    def work(self):
        """Does one pending job, as the engine would; False if there is none."""
        jobs = pending(self.state)
        if not jobs:
            return False
        job = jobs[0]
        if isinstance(job, AggregateRound):
            sites = self.state.regions[job.region].round.contributions
            self.send(Aggregated(job.region, job.step, (digest_of("parts"),), dict.fromkeys(sites, Norm(1.0))))
        elif isinstance(job, WriteManifest):
            self.send(SnapshotRegistered(job.number, digest_of("manifest", job.number)))
        else:
            self.send(self.average(job.number, job.fragment))
        return True

    def snapshot(self, site, number=None):
        """What the site has stored for the snapshot that is wanted, at the head of its log."""
        region = self.state.regions[self.region_of(site)]
        upload = SnapshotUpload(position=self.position(region), step=region.step, parameters=digest_of(region.step))
        return SnapshotTaken(site, self.attempt(site), number or self.state.last_snapshot, upload)

    def average(self, number, fragment):
        copies = region_copies(self.state, self.state.outer.fragments[fragment])
        anchor, momentum = (digest_of(word, number, fragment) for word in ("anchor", "momentum"))
        return Averaged(number, fragment, copies, anchor, momentum)

    def announcement(self, site, fragment, *, digest=None, stored=True, number=None):
        """With codecs other than fp32 it is not the copy that is stored, but what the site's region encodes it as."""
        number = self.state.outer_rounds + 1 if number is None else number
        digest = digest or digest_of("copy", number, fragment)
        place = site, self.attempt(site), number, fragment, digest
        if self.spec.outer is None or self.spec.outer.codec == "fp32" or fragment == self.spec.outer.fragments:
            return Announced(*place, stored)
        upload = digest_of("upload", self.region_of(site), digest) if stored else None
        return Announced(*place, stored=False, upload=upload)

    def arrival(self, site, *, number=None, tokens=7):
        number = self.state.outer_rounds + 1 if number is None else number
        return Arrived(site, self.attempt(site), number, tokens)

    def exchange(self):
        """One thing that is due now: work, a missing answer, a missing announcement. False if nothing is left."""
        if self.work():
            return True
        if self.state.outer is not None and self._announce_one():
            return True
        if self.spec.exchange == "none":
            return self._arrive_one()
        for region in self.state.regions.values():
            if region.round is not None and not region.round.frozen:
                for site in self._acting(region.name):
                    if site not in region.round.answered:
                        self.send(self.contribution(site))
                        return True
        return False

    def _acting(self, region=None):
        return [site for site in self.live(region) if self.region_of(site) != self.silent]

    def _arrive_one(self):
        number = self.state.outer_rounds + 1
        for site in self._acting() if number <= self.due_outer_rounds and self.state.outer is None else ():
            arrived = self.member(site).arrived
            if arrived is None or arrived.number != number:
                self.send(self.arrival(site))
                return True
        return False

    def _announce_one(self):
        outer = self.state.outer
        for index, fragment in outer.fragments.items():
            if fragment.anchor is None:
                for site in self._acting():
                    copy = fragment.copies.get(site)
                    known = copy is not None and fragment.upload(self.region_of(site), copy) is not None
                    if site in outer.participants and not known:
                        self.send(self.announcement(site, index, digest=copy))
                        return True
        return False

    def until_outer(self):
        """Until the next outer round is open."""
        while self.state.outer is None:
            assert self.exchange()
        return self

    def until_outer_round(self, number):
        """Until it has been held."""
        while self.state.outer_rounds < number:
            assert self.exchange()
        return self

    def until_step(self, step):
        while self.state.step < step:
            assert self.exchange()
        return self

    def until_done(self):
        """All inner steps and outer rounds; what is left are the final reports."""
        while self.exchange():
            pass
        return self

    def final(self, site, digest=FINAL, stored=True):
        seq = self.state.regions[self.region_of(site)].head.seq
        buffers = digest_of("last buffers") if self.start.buffers is not None else None
        return FinalReported(site, self.attempt(site), seq, digest, stored, buffers)

    def report_one(self):
        """A final report that is due. False if nothing is left, or it is not the end yet."""
        if any(region.round is not None for region in self.state.regions.values()) or self.state.outer is not None:
            return False
        for site in self.live():
            if self.state.regions[self.region_of(site)].step < self.spec.steps:
                return False
        if self.state.outer_rounds < self.due_outer_rounds:
            return False
        for site in self.live():
            wanted = self.spec.outer is None and not self.state.final_stored and site == self.state.model_site
            if self.member(site).final is None or wanted:
                self.send(self.final(site, self.member(site).final or FINAL))
                return True
        return False

    def catch_up_one(self):
        """A site that is there and behind catches up. False if there is none, or none can."""
        for site in self.state.present():
            if not self.member(site).caught_up and self.state.going_on:
                self.catch_up(site)
                if self.member(site).caught_up:
                    return True
        return False

    def do_duty(self):
        """One thing that the sites that are there would do next. False if nothing is left."""
        if self.status is RunStatus.STARTING:
            return self.prepare()
        return self.exchange() or self.report_one() or self.catch_up_one()

    def has_enough(self):
        """Whether the run can go on with the sites that are live; or, before it begins, that are there."""
        left = {member.region for member in self.state.members.values() if not member.excluded}
        if self.status is RunStatus.STARTING:
            needed = self.state.regions if self.spec.exchange == "demo" else left
            return all(len(self.state.present(name)) >= self.spec.rounds.min_sites for name in needed)
        if self.state.outer is not None and not set(self.live()) & self.state.outer.participants:
            return False
        if self.spec.exchange == "none":
            return bool(self.live())
        return all(len(self.live(name)) >= self.spec.rounds.min_sites for name in self.state.regions)

    def bring_back(self):
        """Every site is heard again; regions that have lost too many get them back."""
        for site, member in self.state.members.items():
            if member.away:
                self.send(SiteBack(site))
        for region in self.state.regions:
            for site, member in sorted(self.state.members.items()):
                if member.excluded and len(self.state.present(region)) < self.spec.rounds.min_sites:
                    self.send(SiteAdded(site, member.region))
            for number in range(len(self.state.present(region)), self.spec.rounds.min_sites):
                self.send(SiteAdded(f"{region}-{number}", region))

    def finish(self):
        self.begin()
        while not self.status.terminal and self.do_duty():
            pass
        return self

    @property
    def due_outer_rounds(self):
        return len(self.outer_turns())
