"""Transitions of an outer round: announced copies, alarms, and the anchors that end it. Pure."""

from datetime import datetime
from math import lcm
from typing import TypeVar

from api import schemas
from api.errors import ConflictError
from coordinator.changes import changed
from coordinator.entrances import are_all_parameters, with_entrances
from coordinator.entries import anchor_header
from coordinator.events import Announced, Arrived, Averaged
from coordinator.opening import late_regions
from coordinator.quorum import all_announced, outer_closes_at, region_copies, remaining, timely
from coordinator.records import Arrival, FragmentRound, OuterRound, RunState, Share
from coordinator.snapshots import behind_outer_round
from coordinator.transitions import Transition, append, going_on, ranks_of, with_, with_member, with_region

__all__ = ["anchored", "announced", "arrived", "averaged", "buffer_copies", "closed", "with_alarms"]

T = TypeVar("T")


def arrived(event: Arrived, state: RunState, now: datetime) -> Transition:
    """The site of a region without rounds is ready for the next outer round; whatever was thought of it, it is there.

    It counts from the first time on: what it says of an outer round that is open, or over, changes nothing; nor does
    what it says of one after the last.
    """
    member = ranks_of(state, event.site, event.attempt)
    going_on(state, to="arrive at an outer round")
    goes_on = state.outer is None and state.outer_step < state.spec.steps
    next_one = goes_on and event.number == state.outer_rounds + 1
    if state.has_rounds or not next_one or (member.arrived is not None and member.arrived.number == event.number):
        return Transition(state)
    arrival = Arrival(number=event.number, tokens=event.tokens)
    return Transition(with_member(state, event.site, arrived=arrival, failures=0, away="", benched_until=None))


def announced(event: Announced, state: RunState, now: datetime) -> Transition:
    """A participant holds this copy of a fragment; announced again once the copy is stored."""
    ranks_of(state, event.site, event.attempt)
    going_on(state, to="announce a fragment")
    if event.number <= state.outer_rounds:
        return Transition(state)
    if state.spec.outer is None:
        raise ConflictError("outer_round_not_open", f"run {state.id} has no outer rounds; its spec has no `outer`")
    outer, deadline_s = state.outer, state.spec.outer.deadline_s
    if outer is None or outer.number != event.number:
        raise ConflictError(
            "outer_round_not_open",
            f"outer round {event.number} is not open yet: it opens when every region has reached its step",
            context={"outer_rounds": state.outer_rounds},
        )
    if event.site not in outer.participants:
        raise ConflictError(
            "not_a_participant",
            f"outer round {event.number} goes on without {event.site}, which was not there when it opened, was late "
            "or has lost its ranks since: take the anchors from the log",
        )
    if event.fragment not in outer.fragments:
        due = ", ".join(map(str, outer.fragments))
        raise ConflictError(
            "no_such_fragment", f"fragment {event.fragment} is not in outer round {outer.number}, which is of {due}"
        )
    fragment = outer.fragments[event.fragment]
    if fragment.copies.get(event.site, event.digest) != event.digest:
        raise ConflictError("other_bytes", f"site {event.site} has already announced another copy of the fragment")
    copies = {**fragment.copies, event.site: event.digest}
    fragment = _with_upload(fragment, event, state).model_copy(update={"copies": copies})
    state = with_member(state, event.site, away="", benched_until=None)
    if outer.announced_at is None and deadline_s is not None:
        state = with_(state, outer=outer.model_copy(update={"announced_at": now}))
    return Transition(_with_fragment(state, event.fragment, fragment))


def _with_upload(fragment: FragmentRound, event: Announced, state: RunState) -> FragmentRound:
    """The first encoding of a region's copy counts: at another site something else may have been left before."""
    if event.stored:
        return fragment.model_copy(update={"stored": fragment.stored | {event.digest}})
    region = state.members[event.site].region
    if event.upload is None or fragment.upload(region, event.digest) is not None:
        return fragment
    there = {**fragment.encoded.get(region, {}), event.digest: event.upload}
    return fragment.model_copy(update={"encoded": {**fragment.encoded, region: there}})


def _with_fragment(state: RunState, index: int, fragment: FragmentRound) -> RunState:
    assert state.outer is not None
    fragments = {**state.outer.fragments, index: fragment}
    return with_(state, outer=state.outer.model_copy(update={"fragments": fragments}))


def closed(state: RunState, now: datetime) -> RunState:
    """At its deadline an outer round goes on with the sites of which all is there that it takes."""
    outer, deadline = state.outer, outer_closes_at(state)
    if outer is None or deadline is None or now < deadline:
        return state
    there = timely(state)
    late = outer.late | set(remaining(state)) - there
    return with_(state, outer=outer.model_copy(update={"participants": frozenset(there), "late": late}))


def buffer_copies(state: RunState, fragment: FragmentRound) -> list[tuple[str, int]]:
    """Copies of the buffers and their weights, in order of sites: those of a region have equal parts of its weight."""
    assert state.outer is not None
    sites = {name: remaining(state, name) for name in state.outer.weights}
    shares = lcm(*(len(there) for there in sites.values() if there))
    weights = {
        site: state.outer.weights[name] * (shares // len(there)) for name, there in sites.items() for site in there
    }
    return [(fragment.copies[site], weight) for site, weight in sorted(weights.items())]


def with_alarms(state: RunState) -> RunState:
    """Sites of one region hold the same parameters bit for bit; the ones that do not are named (A11).

    So is who was late, once.
    """
    if state.outer is None:
        return state
    alarms = list(state.alarms)
    for site in sorted(state.outer.late):
        start = f"site {site} was late for an outer round"
        if not any(alarm.startswith(start) for alarm in alarms):
            alarms.append(f"{start}, which went on without it: number {state.outer.number}")
    for index, fragment in state.outer.fragments.items():
        if fragment.buffers or fragment.anchor is not None or not all_announced(fragment, state):
            continue
        for region, copies in region_copies(state, fragment).items():
            alarm = f"step {state.outer.step}: fragment {index} of {_astray(state, fragment, region, copies)}"
            if any(fragment.copies[site] != copies[0] for site in remaining(state, region)) and alarm not in alarms:
                alarms.append(alarm)
    return with_(state, alarms=tuple(alarms))


def _astray(state: RunState, fragment: FragmentRound, region: str, copies: tuple[str, ...]) -> str:
    if len(copies) == 1:
        astray = [site for site in remaining(state, region) if fragment.copies[site] != copies[0]]
        return f"{', '.join(astray)} differs from region {region}'s"
    sites = ", ".join(remaining(state, region))
    return f"region {region} differs between {sites}, and no copy has a majority: those that are finite are averaged"


def averaged(event: Averaged, state: RunState, now: datetime) -> Transition:
    """Dropped, unless it is of the copies that count now: a participant may have gone meanwhile."""
    outer = state.outer
    if not state.going_on or outer is None or outer.number != event.number:
        return Transition(state)
    fragment = outer.fragments[event.fragment]
    if fragment.anchor is not None or not all_announced(fragment, state):
        return Transition(state)
    if region_copies(state, fragment) != event.copies:
        return Transition(state)
    state = _with_rejected(state, event, fragment)
    assert state.start is not None
    before = None if fragment.buffers else state.anchors[event.fragment] or state.start.parameters
    came = {"anchor": event.anchor, "shares": _shares(event, fragment, outer), "before": before}
    done = fragment.model_copy(update=came | {"kept": _kept(state, event, fragment, outer)})
    state = _with_fragment(state, event.fragment, done)
    if fragment.buffers:
        return Transition(with_(state, buffers=event.anchor))
    anchors = _replaced(state.anchors, event.fragment, event.anchor)
    return Transition(with_(state, anchors=anchors, momenta=_replaced(state.momenta, event.fragment, event.momentum)))


def _shares(event: Averaged, fragment: FragmentRound, outer: OuterRound) -> tuple[Share, ...]:
    """Of the regions that have copies which were not rejected."""
    shares = []
    for name, copies in sorted(event.copies.items()):
        uploads = {copy: fragment.upload(name, copy) or copy for copy in copies}
        good = {copy: upload for copy, upload in uploads.items() if upload not in event.rejected}
        if good:
            weight = outer.weights[name]
            shares.append(Share(region=name, copies=tuple(good), uploads=tuple(good.values()), weight=weight))
    return tuple(shares)


def _kept(state: RunState, event: Averaged, fragment: FragmentRound, outer: OuterRound) -> frozenset[str]:
    """Regions without copies keep what they have; those whose copies are not finite do not.

    Nobody does after the last step.
    """
    if fragment.buffers or outer.step == state.spec.steps:
        return frozenset()
    return frozenset(state.regions.keys() - event.copies.keys() - outer.following)


def anchored(state: RunState, now: datetime) -> Transition:
    """Anchors that are there go into the log of every region that has reached the step after which they are applied.

    Regions without a live member, or that were without one at the opening, are taken along at the end; and, at their
    deadline, those that are late.
    """
    done = Transition(state)
    if state.outer is None:
        return done
    late = late_regions(state, now)
    for name in state.regions:
        done = done.then(_region_anchored(done.state, name, late))
    return done.then(_outer_finished(done.state))


def _region_anchored(state: RunState, name: str, late: set[str]) -> Transition:
    outer, done = state.outer, Transition(state)
    assert outer is not None
    if not _is_at_the_end(state, outer, name):
        if not _is_taken_along(state, outer, name, late):
            return done
        if name in late:
            outer = outer.model_copy(update={"late": outer.late | set(state.live(name))})
            done = Transition(with_(state, outer=outer))
    for number, fragment in outer.fragments.items():
        if fragment.anchor is not None and name not in fragment.logged:
            region = done.state.regions[name].model_copy(update={"step": outer.ends, "round": None})
            done = done.then(append(done.state, region, anchor_header(region, outer, number)))
            logged = fragment.model_copy(update={"logged": fragment.logged | {name}})
            done = done.then(Transition(_with_fragment(done.state, number, logged)))
    return done


def _is_at_the_end(state: RunState, outer: OuterRound, name: str) -> bool:
    """Where regions have no rounds no log tells what their sites do meanwhile."""
    region = state.regions[name]
    return not state.has_rounds or (name in outer.weights and region.step == outer.ends and region.round is None)


def _is_taken_along(state: RunState, outer: OuterRound, name: str, late: set[str]) -> bool:
    """Whether nobody is there, what was accepted is in the log, and all others are at the end."""
    round_ = state.regions[name].round
    if (name in outer.weights and state.live(name) and name not in late) or (
        round_ is not None and (round_.frozen or round_.answered)
    ):
        return False
    others = [other for other in outer.weights if other != name and state.live(other) and other not in late]
    return bool(others) and all(outer.held_in(other) or state.regions[other].step == outer.ends for other in others)


def _with_rejected(state: RunState, event: Averaged, fragment: FragmentRound) -> RunState:
    assert state.outer is not None
    regions = {site: state.members[site].region for site in remaining(state)}
    sites = [site for site in regions if fragment.upload(regions[site], fragment.copies[site]) in event.rejected]
    if not sites:
        return state
    alarm = f"step {state.outer.step}: fragment {event.fragment} of {', '.join(sites)} is not finite and was left out"
    return with_(state, alarms=(*state.alarms, alarm))


def _replaced(values: tuple[T, ...], index: int, value: T) -> tuple[T, ...]:
    return (*values[:index], value, *values[index + 1 :])


def _outer_finished(state: RunState) -> Transition:
    """Once every log has all anchors. Where those of all fragments are all there is, the logs may be entered."""
    outer = state.outer
    assert outer is not None
    if not all(outer.held_in(name) for name in state.regions):
        return Transition(state)
    summary = schemas.OuterRound(
        number=outer.number,
        step=outer.step,
        fragments=list(state.anchors),
        weights=outer.weights,
        distinct=sum(fragment.distinct for fragment in outer.fragments.values() if not fragment.buffers),
        late=sorted(outer.late),
    )
    for name in state.regions:
        state = _kept_by(state, outer, name)
    state = with_(state, outer=None, outer_rounds=outer.number, outer_step=outer.step, met_at=None)
    if are_all_parameters(state):
        state = behind_outer_round(with_entrances(state), outer.ends)
    done = Transition(state, outer_round=summary)
    for name in () if state.has_rounds else state.regions:  # where these are the only places of changes (A21)
        done = done.then(changed(done.state, done.state.regions[name], outer.ends + 1))
    return done


def _kept_by(state: RunState, outer: OuterRound, name: str) -> RunState:
    """What a region did that was in no mean counts next time, if it has kept it."""
    region, fragments = state.regions[name], outer.fragments.values()
    apart = any(name in fragment.kept for fragment in fragments)
    if any(name in fragment.averaged for fragment in fragments):
        return with_region(state, name, apart=apart)
    if apart:
        counts = outer.weights.get(name, 0) if state.has_rounds else 0  # or else the site will say so itself
        return with_region(state, name, apart=True, tokens=region.tokens + counts)
    return with_region(state, name, apart=False, tokens=region.tokens if name in outer.weights else 0)
