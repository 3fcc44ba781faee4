"""Transitions of an outer round: announced copies, alarms, and the anchors that end it. Pure."""

from dataclasses import replace
from datetime import datetime
from typing import TypeVar

from api import schemas
from api.errors import ConflictError
from api.schemas import RunStatus
from coordinator.entries import anchor_header
from coordinator.quorum import agreed_copy, all_announced
from coordinator.records import Announced, Averaged, FragmentRound, RunState
from coordinator.transitions import Transition, append, member_of, open_rounds, require_status, with_

__all__ = ["announced", "averaged", "region_copies"]

T = TypeVar("T")


def announced(event: Announced, state: RunState, now: datetime) -> Transition:
    member_of(state, event.site)
    require_status(state, RunStatus.RUNNING, to="announce a fragment")
    if event.number <= state.outer_rounds:
        return Transition(state)
    outer = state.outer
    if outer is None or outer.number != event.number:
        raise ConflictError(
            "outer_round_not_open",
            f"outer round {event.number} is not open yet: it opens when every region has reached its step",
            context={"outer_rounds": state.outer_rounds},
        )
    if event.fragment >= len(outer.fragments):
        raise ConflictError("no_such_fragment", f"fragment {event.fragment}: the run has {len(outer.fragments)}")
    fragment = outer.fragments[event.fragment]
    if fragment.copies.get(event.site, event.digest) != event.digest:
        raise ConflictError("other_bytes", f"site {event.site} has already announced another copy of the fragment")
    stored = fragment.stored | {event.digest} if event.stored else fragment.stored
    fragment = fragment.model_copy(update={"copies": {**fragment.copies, event.site: event.digest}, "stored": stored})
    state = _with_fragment(state, event.fragment, fragment)
    return Transition(_with_alarm(state, event.fragment) if all_announced(fragment, state) else state)


def _with_fragment(state: RunState, index: int, fragment: FragmentRound) -> RunState:
    assert state.outer is not None
    fragments = _replaced(state.outer.fragments, index, fragment)
    return with_(state, outer=state.outer.model_copy(update={"fragments": fragments}))


def region_copies(state: RunState, fragment: FragmentRound) -> dict[str, str]:
    """The digest of each region's copy: what most of its sites hold."""
    return {name: agreed_copy(fragment.copies, state.region_members(name)) for name in state.regions}


def _with_alarm(state: RunState, index: int) -> RunState:
    """Sites of one region hold the same parameters bit for bit; the ones that do not are named (A11)."""
    assert state.outer is not None
    fragment = state.outer.fragments[index]
    alarms = list(state.alarms)
    for region, copy in region_copies(state, fragment).items():
        astray = [site for site in state.region_members(region) if fragment.copies[site] != copy]
        alarm = f"step {state.outer.step}: fragment {index} of {', '.join(astray)} differs from region {region}'s"
        if astray and alarm not in alarms:
            alarms.append(alarm)
    return with_(state, alarms=tuple(alarms))


def averaged(event: Averaged, state: RunState, now: datetime) -> Transition:
    outer = state.outer
    if state.status is not RunStatus.RUNNING or outer is None or outer.number != event.number:
        return Transition(state)
    fragment = outer.fragments[event.fragment]
    if fragment.anchor is not None or not all_announced(fragment, state):
        return Transition(state)
    copies = region_copies(state, fragment)
    participants = [(name, copies[name], outer.weights[name]) for name in copies]
    done = fragment.model_copy(update={"anchor": event.anchor, "distinct": len(set(copies.values()))})
    state = _with_fragment(state, event.fragment, done)
    entries = []
    for region in list(state.regions.values()):
        header = anchor_header(
            region, number=outer.number, fragment=event.fragment, digest=event.anchor, participants=participants
        )
        state = append(state, region, header)
        entries.append((region.name, header))
    state = with_(
        state,
        anchors=_replaced(state.anchors, event.fragment, event.anchor),
        momenta=_replaced(state.momenta, event.fragment, event.momentum),
    )
    return _finish_outer(Transition(state, tuple(entries)))


def _replaced(values: tuple[T, ...], index: int, value: T) -> tuple[T, ...]:
    return (*values[:index], value, *values[index + 1 :])


def _finish_outer(done: Transition) -> Transition:
    state, outer = done.state, done.state.outer
    assert outer is not None
    if any(fragment.anchor is None for fragment in outer.fragments):
        return done
    summary = schemas.OuterRound(
        number=outer.number,
        step=outer.step,
        fragments=[fragment.anchor for fragment in outer.fragments],
        weights=outer.weights,
        distinct=sum(fragment.distinct for fragment in outer.fragments),
    )
    regions = {name: region.model_copy(update={"tokens": 0}) for name, region in state.regions.items()}
    state = with_(state, outer=None, outer_rounds=outer.number, regions=regions)
    return replace(done, state=open_rounds(state), outer_round=summary)
