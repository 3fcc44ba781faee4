"""Pure: what follows from a state by itself, whatever event has led to it, and at a given time.

`settled` twice at the same time is `settled` once.
"""

from datetime import datetime, timedelta

from api.schemas import RunStatus
from coordinator.events import Ticked
from coordinator.lifecycle import begun
from coordinator.membership import rejoining
from coordinator.opening import goes_on_at, left_behind, met, opened
from coordinator.outer_events import anchored, closed, with_alarms
from coordinator.quorum import closes_at, lost_region, may_close, outer_closes_at
from coordinator.records import Region, RunState
from coordinator.round_events import emptied, frozen
from coordinator.snapshots import with_due
from coordinator.transitions import Transition, in_status, with_, with_member, with_region

__all__ = ["due_at", "settled", "ticked"]


def ticked(event: Ticked, state: RunState, now: datetime) -> Transition:
    gap = timedelta(seconds=event.outage_s)
    if not gap or not state.going_on:
        return Transition(state)
    for name, region in state.regions.items():
        if region.round is not None and region.round.first_answer is not None:
            shifted = region.round.model_copy(update={"first_answer": region.round.first_answer + gap})
            state = with_region(state, name, round=shifted)
    if state.met_at is not None:
        state = with_(state, met_at=state.met_at + gap)
    if state.outer is not None and state.outer.announced_at is not None:
        outer = state.outer.model_copy(update={"announced_at": state.outer.announced_at + gap})
        state = with_(state, outer=outer)
    for member in state.members.values():
        if member.benched_until is not None:
            state = with_member(state, member.site, benched_until=member.benched_until + gap)
        if member.late is not None:
            late = member.late.model_copy(update={"first_answer": member.late.first_answer + gap})
            state = with_member(state, member.site, late=late)
    return Transition(state)


def due_at(state: RunState) -> datetime | None:
    """When time itself will next change the state."""
    if not state.going_on:
        return None
    deadlines = [closes_at(state, region) for region in state.regions.values()]
    deadlines += [goes_on_at(state), outer_closes_at(state)]
    for member in state.members.values():
        deadlines += [member.released_at, member.restart_at]
    return min((time for time in deadlines if time is not None), default=None)


def settled(done: Transition, now: datetime) -> Transition:
    state = done.state
    if state.status is RunStatus.STOPPING:
        return done.then(Transition(_stopped(state, now)))
    if state.status is RunStatus.STARTING or state.going_on:
        done = done.then(Transition(_without_region(state, now)))
    if done.state.status is RunStatus.STARTING:
        done = done.then(begun(done.state, now))
    if done.state.going_on:
        done = done.then(_moved_on(done.state, now))
    return done


def _stopped(state: RunState, now: datetime) -> RunState:
    """Once no site that could be heard has processes."""
    if any(member.present and not member.gone for member in state.members.values()):
        return state
    return in_status(state, RunStatus.STOPPED, now, state.ended_because)


def _without_region(state: RunState, now: datetime) -> RunState:
    """The end of the run, by what has become of its sites."""
    lost = lost_region(state)
    if lost is None:
        return state
    excluded = {member.site: member.excluded for member in state.members.values() if member.region == lost}
    listed = "; ".join(f"site {site}, {because}" for site, because in sorted(excluded.items()))
    return in_status(state, RunStatus.FAILED, now, f"no site is left in region {lost}: {listed}")


def _moved_on(state: RunState, now: datetime) -> Transition:
    state = _released(state, now)
    done = Transition(state)
    for name in state.regions:
        region = done.state.regions[name]
        if region.round is not None and not region.round.frozen and may_close(done.state, region, now):
            done = done.then(_round_ended(done.state, region, now))
    done = done.then(Transition(closed(done.state, now)))
    done = done.then(anchored(done.state, now))
    if done.state.status is RunStatus.RUNNING:
        for name in left_behind(done.state, now):
            done = done.then(_round_ended(done.state, done.state.regions[name], now))
        done = done.then(anchored(done.state, now))
        done = done.then(opened(done.state, now))
    return done.then(Transition(_ended(with_due(with_alarms(met(done.state, now))), now)))


def _round_ended(state: RunState, region: Region, now: datetime) -> Transition:
    """Frozen; without contributions there is nothing to aggregate, and it is closed."""
    assert region.round is not None
    done = Transition(frozen(state, region, now))
    if region.round.contributions:
        return done
    return done.then(emptied(done.state, done.state.regions[region.name]))


def _released(state: RunState, now: datetime) -> RunState:
    for member in state.members.values():
        if member.released_at is not None and member.released_at <= now:
            state = with_member(state, member.site, benched_until=None)
        if member.restart_at is not None and member.restart_at <= now:
            state = with_member(state, member.site, restart_at=None)
    return state


def _ended(state: RunState, now: datetime) -> RunState:
    """The end, once every live member has reported its final digest, and the trained parameters are stored.

    A snapshot that lacks its manifest only gets it before.
    """
    finals = {member.site: member.final for member in state.members.values() if member.final is not None}
    if state.wanted is not None and state.wanted.contents is not None:
        return state
    if not finals or any(state.members[site].final is None for site in state.live()):
        return state
    if state.spec.outer is None and not state.final_stored:
        return _asked_for_model(state)
    return _judged(state, finals, now)


def _asked_for_model(state: RunState) -> RunState:
    """If all ranks that hold the trained parameters have ended, those of one site start again."""
    joining = any(member.present and not member.caught_up for member in state.members.values())
    live = state.live()
    if joining or not live or state.model_site is not None:
        return state
    return rejoining(state, live[0], attempt=state.members[live[0]].attempt + 1)


def _judged(state: RunState, finals: dict[str, str], now: datetime) -> RunState:
    """Sites that share a log, or a last outer step, must end with the same bits."""
    shared: dict[str, dict[str, str]] = {}
    for site, digest in finals.items():
        shared.setdefault("" if state.spec.outer else state.members[site].region, {})[site] = digest
    for digests in shared.values():
        if len(set(digests.values())) > 1:
            listed = ", ".join(f"{site} {digest[:12]}" for site, digest in sorted(digests.items()))
            return in_status(state, RunStatus.FAILED, now, f"the sites ended with different parameters: {listed}")
    return in_status(state, RunStatus.SUCCEEDED, now, f"all {state.spec.steps} steps done, digests equal")
