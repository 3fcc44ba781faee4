"""Transitions of an outer round: announced copies, alarms, and the anchors that end it. Pure."""

from datetime import datetime
from math import lcm
from typing import TypeVar

from api import schemas
from api.errors import ConflictError
from api.schemas import Resume
from coordinator.entries import anchor_header
from coordinator.events import Announced, Arrived, Averaged
from coordinator.in_force import in_force_at
from coordinator.quorum import agreed_copies, all_announced, remaining
from coordinator.records import Arrival, FragmentRound, RunState
from coordinator.snapshots import behind_outer_round
from coordinator.transitions import Transition, append, going_on, ranks_of, with_, with_member

__all__ = ["announced", "arrived", "averaged", "buffer_copies", "region_copies", "with_alarms"]

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
    outer = state.outer
    if outer is None or outer.number != event.number:
        raise ConflictError(
            "outer_round_not_open",
            f"outer round {event.number} is not open yet: it opens when every region has reached its step",
            context={"outer_rounds": state.outer_rounds},
        )
    if event.site not in outer.participants:
        raise ConflictError(
            "not_a_participant",
            f"outer round {event.number} goes on without {event.site}, which was not there when it opened, or has lost "
            "its ranks since: take the anchors from the log",
        )
    if event.fragment >= len(outer.fragments):
        raise ConflictError("no_such_fragment", f"fragment {event.fragment}: the run has {len(outer.fragments)}")
    fragment = outer.fragments[event.fragment]
    if fragment.copies.get(event.site, event.digest) != event.digest:
        raise ConflictError("other_bytes", f"site {event.site} has already announced another copy of the fragment")
    stored = fragment.stored | {event.digest} if event.stored else fragment.stored
    fragment = fragment.model_copy(update={"copies": {**fragment.copies, event.site: event.digest}, "stored": stored})
    state = with_member(state, event.site, away="", benched_until=None)
    return Transition(_with_fragment(state, event.fragment, fragment))


def _with_fragment(state: RunState, index: int, fragment: FragmentRound) -> RunState:
    assert state.outer is not None
    fragments = _replaced(state.outer.fragments, index, fragment)
    return with_(state, outer=state.outer.model_copy(update={"fragments": fragments}))


def region_copies(state: RunState, fragment: FragmentRound) -> dict[str, tuple[str, ...]]:
    """The digests of which each region's copy is made: one, if most of its participants hold that.

    Regions without participants have none. Buffers are not the same at all sites: there every copy counts.
    """
    assert state.outer is not None
    sites = {name: remaining(state, name) for name in state.outer.weights}
    if fragment.buffers:
        return {name: tuple(fragment.copies[site] for site in there) for name, there in sites.items() if there}
    return {name: agreed_copies(fragment.copies, there) for name, there in sites.items() if there}


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
    """Sites of one region hold the same parameters bit for bit; the ones that do not are named (A11)."""
    if state.outer is None:
        return state
    alarms = list(state.alarms)
    for index, fragment in enumerate(state.outer.fragments):
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
    good = {name: tuple(copy for copy in copies if copy not in event.rejected) for name, copies in event.copies.items()}
    participants = [(name, copies, outer.weights[name]) for name, copies in good.items() if copies]
    state = _with_rejected(state, event, fragment)
    done = fragment.model_copy(
        update={"anchor": event.anchor, "distinct": len({copy for copies in good.values() for copy in copies})}
    )
    state = _with_fragment(state, event.fragment, done)
    if fragment.buffers:
        state = with_(state, buffers=event.anchor)
    else:
        anchors = _replaced(state.anchors, event.fragment, event.anchor)
        state = with_(state, anchors=anchors, momenta=_replaced(state.momenta, event.fragment, event.momentum))
    after = Transition(state)
    for region in state.regions.values():
        there = region if region.step == outer.step else region.model_copy(update={"step": outer.step, "round": None})
        header = anchor_header(
            there, number=outer.number, fragment=event.fragment, digest=event.anchor, participants=participants
        )
        after = after.then(append(after.state, there, header))
    return after.then(_outer_finished(after.state))


def _with_rejected(state: RunState, event: Averaged, fragment: FragmentRound) -> RunState:
    assert state.outer is not None
    sites = [site for site in remaining(state) if fragment.copies[site] in event.rejected]
    if not sites:
        return state
    alarm = f"step {state.outer.step}: fragment {event.fragment} of {', '.join(sites)} is not finite and was left out"
    return with_(state, alarms=(*state.alarms, alarm))


def _replaced(values: tuple[T, ...], index: int, value: T) -> tuple[T, ...]:
    return (*values[:index], value, *values[index + 1 :])


def _outer_finished(state: RunState) -> Transition:
    """Once every fragment has its anchor; the logs may be entered here from now on."""
    outer = state.outer
    assert outer is not None
    if any(fragment.anchor is None for fragment in outer.fragments):
        return Transition(state)
    anchors = [anchor for anchor in state.anchors if anchor is not None]
    summary = schemas.OuterRound(
        number=outer.number,
        step=outer.step,
        fragments=list(anchors),
        weights=outer.weights,
        distinct=sum(fragment.distinct for fragment in outer.fragments if not fragment.buffers),
    )
    regions = {}
    for name, region in state.regions.items():
        assert region.head is not None
        resume = Resume(
            position=region.head,
            step=outer.step,
            outer_round=outer.number,
            in_force=in_force_at(state, outer.step),
            anchors=anchors,
            buffers=state.buffers,
        )
        regions[name] = region.model_copy(update={"tokens": 0, "resume": resume})
    state = with_(state, outer=None, outer_rounds=outer.number, outer_step=outer.step, regions=regions)
    return Transition(behind_outer_round(state, outer.step), outer_round=summary)
