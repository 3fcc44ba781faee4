"""Drives the state machine of a run as sites and engine would, and keeps books of its own to compare with."""

import hashlib
import json
import math
from collections import defaultdict
from datetime import UTC, datetime

import pytest

from api.errors import ProblemError
from api.schemas import OuterSpec, Position, RunSpec, RunStatus
from coordinator.quorum import waiting_for
from coordinator.records import (
    Abstained,
    Aggregated,
    Announced,
    Averaged,
    Contributed,
    FinalReported,
    Layout,
    LayoutPresented,
    RunState,
    Sent,
    Start,
    StartRequested,
    StartUploaded,
)
from coordinator.state import AggregateRound, pending, transition

NOW = datetime(2026, 1, 1, tzinfo=UTC)
FINAL = "f" * 64


def digest_of(*words):
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()


LAYOUT = Layout(digest=digest_of("layout"), blob=digest_of("layout blob"), groups=("decay", "no_decay"))
START = Start(parameters=digest_of("parameters"))


def entry_hash(header):
    text = json.dumps(header, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


class Driver:
    """A run's state, every log line that its transitions asked for, and what was taken in.

    Args:
        sites: region by site.
        every: inner steps between outer rounds; None: no outer rounds.
    """

    def __init__(self, sites, steps=3, every=None, fragments=1):
        outer = OuterSpec(every=every, fragments=fragments) if every else None
        self.sites = sites
        self.spec = RunSpec(name="drill", task="drill", steps=steps, outer=outer)
        self.state = RunState(id="drill-1", spec=self.spec, created_at=NOW, since=NOW)
        self.logs = defaultdict(list)
        self.accepted = defaultdict(dict)
        self.abstained = defaultdict(dict)
        self.tokens = defaultdict(int)
        self.closed = set()
        self.summaries = []

    # --- events -------------------------------------------------------------------------------------------------------

    def send(self, event):
        """Applies an event and checks everything that holds after any event."""
        before = self.state
        text = before.model_dump_json()
        try:
            done = transition(before, event, NOW)
        except ProblemError:
            assert before.model_dump_json() == text
            raise
        assert before.model_dump_json() == text
        self.state = done.state
        self._book(event, before)
        self._check(before, done)
        return done

    def refused(self, event, code):
        """Sends an event that must be refused; returns the error."""
        with pytest.raises(ProblemError) as caught:
            self.send(event)
        assert caught.value.code == code
        return caught.value

    def _book(self, event, before):
        """Notes what was taken in; a second answer of a site to one step would show here."""
        if self.state == before or not isinstance(event, Contributed | Abstained):
            return
        place = event.region, event.step
        assert event.position == before.regions[event.region].head
        assert event.site not in self.accepted[place]
        assert event.site not in self.abstained[place]
        if isinstance(event, Contributed):
            self.accepted[place][event.site] = event.sent
        else:
            self.abstained[place][event.site] = event.reason

    def _check(self, before, done):
        state = self.state
        if before.status.terminal:
            assert state == before
            assert not done.entries
        for region, round_ in done.closed:
            assert (region, round_.step) not in self.closed
            self.closed.add((region, round_.step))
        for name, region in state.regions.items():
            assert 0 <= region.step - (before.regions[name].step if name in before.regions else 0) <= 1
            assert region.step <= self.spec.steps
        for region, header in done.entries:
            self._check_entry(region, header)
        if done.outer_round is not None:
            self.summaries.append(done.outer_round)
            for region in state.regions:
                self.tokens[region] = 0
        for name, region in state.regions.items():
            assert region.tokens == self.tokens[name]
            log = self.logs[name]
            assert region.head == (Position(seq=len(log) - 1, hash=entry_hash(log[-1])) if log else None)
            assert (region.step, name) in {(line["step"], name) for line in log} | {(0, name)}
        assert RunState.model_validate_json(state.model_dump_json()) == state
        self._check_words()

    def _check_entry(self, region, header):
        log = self.logs[region]
        assert header["seq"] == len(log)
        assert header["previous"] == (entry_hash(log[-1]) if log else "0" * 64)
        log.append(header)
        if header["kind"] == "step":
            self._check_step(region, header)
        if header["kind"] == "anchor":
            weights = {part["region"]: part["weight"] for part in header["participants"]}
            assert weights == {name: self.tokens[name] for name in self.state.regions}
            others = [[line for line in self.logs[name] if line["kind"] == "anchor"] for name in self.state.regions]
            seen = [(line["outer_round"], line["fragment"]) for line in log if line["kind"] == "anchor"]
            assert len(set(seen)) == len(seen)
            place = len(seen) - 1
            for own in others:
                if len(own) > place:
                    ignored = ("seq", "previous")
                    assert {key: value for key, value in own[place].items() if key not in ignored} == {
                        key: value for key, value in header.items() if key not in ignored
                    }

    def _check_step(self, region, header):
        place = region, header["step"]
        assert place in self.closed
        listed = {line["site"]: Sent(digest=line["digest"], tokens=line["tokens"]) for line in header["contributors"]}
        assert listed == self.accepted[place]
        assert list(listed) == sorted(listed)
        assert {line["site"]: line["reason"] for line in header["abstentions"]} == self.abstained[place]
        assert listed.keys() | self.abstained[place].keys() == set(self.members(region))
        assert bool(header["parts"]) == bool(listed)
        self.tokens[region] += sum(sent.tokens for sent in listed.values())

    def _check_words(self):
        """Nothing to do and nobody to wait for is a hang."""
        state, words = self.state, waiting_for(self.state)
        assert words
        assert words == words.strip()
        if state.status.terminal or state.status is RunStatus.PENDING or pending(state):
            return
        assert any(f" {site}" in words for site in state.members), words

    # --- what sites and the engine do ---------------------------------------------------------------------------------

    @property
    def status(self):
        return self.state.status

    def members(self, region):
        return [site for site in sorted(self.sites) if self.sites[site] == region]

    def begin(self):
        """Until the run is running."""
        if self.status is RunStatus.PENDING:
            self.send(StartRequested(self.sites))
        for site in sorted(self.sites):
            if not self.state.members[site].ready:
                self.send(LayoutPresented(site, 1, LAYOUT))
        if self.state.start is None:
            self.send(StartUploaded(min(self.sites), START))
        return self

    def contribution(self, site, *, step=None, tokens=7, variant="", position=None, region=None):
        own = self.state.regions.get(region or self.sites[site])
        step = step if step is not None else own.step + 1
        sent = Sent(digest=digest_of(site, step, tokens, variant), tokens=tokens)
        return Contributed(site, region or self.sites[site], step, position or self.position(own), sent)

    def abstention(self, site, *, step=None, reason="no data", position=None):
        region = self.state.regions[self.sites[site]]
        return Abstained(site, region.name, region.step + 1 if step is None else step, self.position(region), reason)

    @staticmethod
    def position(region):
        return Position(seq=0, hash="0" * 64) if region is None or region.head is None else region.head

    def work(self):
        """Does one pending job, as the engine would; False if there is none."""
        jobs = pending(self.state)
        if not jobs:
            return False
        job = jobs[0]
        if isinstance(job, AggregateRound):
            sites = self.state.regions[job.region].round.contributions
            self.send(Aggregated(job.region, job.step, (digest_of("parts"),), dict.fromkeys(sites, 0)))
        else:
            anchor, momentum = (digest_of(word, job.number, job.fragment) for word in ("anchor", "momentum"))
            self.send(Averaged(job.number, job.fragment, anchor, momentum))
        return True

    def announcement(self, site, fragment, *, digest=None, stored=True, number=None):
        number = self.state.outer_rounds + 1 if number is None else number
        return Announced(site, number, fragment, digest or digest_of("copy", number, fragment), stored)

    def exchange(self, *, announced=True):
        """One thing that is due now: work, a missing answer, a missing announcement. False if nothing is left."""
        if self.work():
            return True
        if self.state.outer is not None:
            return announced and self._announce_one()
        for region in self.state.regions.values():
            if region.round is not None:
                site = next(site for site in self.members(region.name) if site not in region.round.answered)
                self.send(self.contribution(site))
                return True
        return False

    def _announce_one(self):
        for index, fragment in enumerate(self.state.outer.fragments):
            if fragment.anchor is None:
                for site in sorted(self.sites):
                    copy = fragment.copies.get(site)
                    if copy is None or copy not in fragment.stored:
                        self.send(self.announcement(site, index, digest=copy))
                        return True
        return False

    def until_outer(self):
        """Until the next outer round is open."""
        while self.state.outer is None:
            assert self.exchange()
        return self

    def until_done(self):
        """All inner steps and outer rounds; what is left are the final reports."""
        while self.exchange():
            pass
        return self

    def final(self, site, digest=FINAL, stored=True):
        return FinalReported(site, self.state.regions[self.sites[site]].head.seq, digest, stored)

    def finish(self):
        self.begin().until_done()
        for site in sorted(self.sites):
            if self.state.members[site].final is None or site == min(self.sites):
                self.send(self.final(site))
        return self

    @property
    def due_outer_rounds(self):
        return math.ceil(self.spec.steps / self.spec.outer.every) if self.spec.outer else 0
