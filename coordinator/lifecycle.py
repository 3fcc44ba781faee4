"""Transitions of a run as a whole: start, entry 0, pause, stop, the end, and what ends it early. Pure."""

from datetime import datetime

from api.errors import ConflictError, ForbiddenError
from api.schemas import RunStatus
from coordinator.entries import start_header
from coordinator.events import (
    FinalReported,
    GuardTripped,
    HeldBack,
    PauseRequested,
    ResumeRequested,
    StartMade,
    StartRequested,
    StartUploaded,
    StopRequested,
    StorageFull,
    WorkFailed,
)
from coordinator.opening import outer_round_due
from coordinator.records import Member, Region, RunState
from coordinator.transitions import (
    Transition,
    append,
    asked_in,
    going_on,
    in_status,
    ranks_of,
    require_status,
    with_,
    with_member,
)

__all__ = [
    "begun",
    "final_reported",
    "guard_tripped",
    "held_back",
    "pause_requested",
    "resume_requested",
    "start_made",
    "start_requested",
    "start_uploaded",
    "stop_requested",
    "storage_full",
    "work_failed",
]


def start_requested(event: StartRequested, state: RunState, now: datetime) -> Transition:
    """Names the members, whose agents are asked for ranks from now on."""
    asked_in(state, RunStatus.PENDING, to="start")
    members = {site: Member(site=site, region=region, since=now) for site, region in sorted(event.sites.items())}
    regions = {name: Region(name=name) for name in sorted(set(event.sites.values()))}
    state = with_(state, members=members, regions=regions, started_at=now)
    return Transition(in_status(state, RunStatus.STARTING, now))


def stop_requested(event: StopRequested, state: RunState, now: datetime) -> Transition:
    """Agents are asked to end their ranks; a run that was not started ends at once."""
    if state.status in (RunStatus.STOPPING, RunStatus.STOPPED):
        return Transition(state)
    allowed = (RunStatus.PENDING, RunStatus.STARTING, RunStatus.RUNNING, RunStatus.PAUSED)
    require_status(state, *allowed, to="stop")
    because = f"stopped by request at step {state.steps_done} of {state.spec.steps}"
    status = RunStatus.STOPPED if state.status is RunStatus.PENDING else RunStatus.STOPPING
    return Transition(in_status(state, status, now, because))


def pause_requested(event: PauseRequested, state: RunState, now: datetime) -> Transition:
    """What is open ends as ever; nothing opens after it."""
    if state.status is RunStatus.PAUSED:
        return Transition(state)
    asked_in(state, RunStatus.RUNNING, to="pause")
    return Transition(in_status(state, RunStatus.PAUSED, now))


def resume_requested(event: ResumeRequested, state: RunState, now: datetime) -> Transition:
    """What is due opens again."""
    if state.status is RunStatus.RUNNING:
        return Transition(state)
    asked_in(state, RunStatus.PAUSED, to="resume")
    known = max(region.round.step if region.round else region.step for region in state.regions.values())
    state = with_(state, paused_because="", storage_full=False, unguarded_to=known)
    return Transition(in_status(state, RunStatus.RUNNING, now))


def guard_tripped(event: GuardTripped, state: RunState, now: datetime) -> Transition:
    """A pause with the reason; steps that were known when the run last went on trip nothing again."""
    if state.status is not RunStatus.RUNNING or event.step <= state.unguarded_to:
        return Transition(state)
    return Transition(in_status(with_(state, paused_because=event.because), RunStatus.PAUSED, now))


def storage_full(event: StorageFull, state: RunState, now: datetime) -> Transition:
    """A pause with the reason, in which no work is tried again; before the run goes on at all, an alarm."""
    if state.status is RunStatus.STARTING and event.because not in state.alarms:
        return Transition(with_(state, alarms=(*state.alarms, event.because)))
    if not state.going_on or state.storage_full:
        return Transition(state)
    state = with_(state, paused_because=event.because, storage_full=True)
    return Transition(state if state.status is RunStatus.PAUSED else in_status(state, RunStatus.PAUSED, now))


def held_back(event: HeldBack, state: RunState, now: datetime) -> Transition:
    """Said until a contribution is taken in; no pause, since the run goes on by itself once there is room."""
    if not state.going_on or state.held_back:
        return Transition(state)
    return Transition(with_(state, held_back=event.because))


# --- the start --------------------------------------------------------------------------------------------------------


def start_uploaded(event: StartUploaded, state: RunState, now: datetime) -> Transition:
    """Entry 0, from the lowest-named site that is there (A3)."""
    ranks_of(state, event.site, event.attempt)
    require_status(state, RunStatus.STARTING, RunStatus.RUNNING, RunStatus.PAUSED, to="upload entry 0")
    if state.start == event.start:
        return Transition(state)
    if state.origin is not None:
        raise ForbiddenError("not_the_donor", f"entry 0 comes from what run {state.id} begins with")
    if state.start is not None:
        raise ConflictError("other_bytes", f"run {state.id} already has another entry 0")
    if event.site != state.first_site:
        raise ForbiddenError("not_the_donor", f"entry 0 comes from {state.first_site}, not from {event.site}")
    if state.layout is None:
        raise ConflictError("no_layout", f"site {event.site} must present its layout before it uploads entry 0")
    return Transition(with_(state, start=event.start))


def start_made(event: StartMade, state: RunState, now: datetime) -> Transition:
    """Entry 0, of a run that begins with a snapshot or a file."""
    if state.status is not RunStatus.STARTING or state.origin is None or state.start is not None:
        return Transition(state)
    return Transition(with_(state, start=event.start))


def begun(state: RunState, now: datetime) -> Transition:
    """Starting ends when every site that is there has presented its layout, and entry 0 has come from one of them.

    Then every log begins with it, and whoever is there is active. The momentum of another run's outer steps goes on if
    the fragments are as many.
    """
    present = state.present()
    enough = all(len(state.present(region)) >= state.spec.rounds.min_sites for region in state.needed_regions)
    if state.start is None or not enough or not all(state.members[site].ready for site in present):
        return Transition(state)
    for site in present:
        state = with_member(state, site, caught_up=True)
    fragments = state.spec.outer.fragments if state.spec.outer else 0
    momenta = state.origin.momenta if state.origin else ()
    momenta = momenta if len(momenta) == fragments else (None,) * fragments
    state = with_(state, anchors=(None,) * fragments, momenta=momenta, origin=None)
    done = Transition(in_status(state, RunStatus.RUNNING, now))
    for region in state.regions.values():
        done = done.then(append(done.state, region, start_header(state, region)))
    return done


# --- the end ----------------------------------------------------------------------------------------------------------


def final_reported(event: FinalReported, state: RunState, now: datetime) -> Transition:
    """The digest of a site that has applied the last entry; the site is there, whatever was thought of it."""
    member = ranks_of(state, event.site, event.attempt)
    if state.status is RunStatus.SUCCEEDED and member.final == event.digest:
        return Transition(state)
    going_on(state, to="report its end")
    region = state.regions[member.region]
    at_the_end = region.step == state.spec.steps and not outer_round_due(state, region.step)
    if not at_the_end or region.head is None or event.seq != region.head.seq:
        raise ConflictError(
            "not_at_the_end",
            f"site {event.site} reports its end at entry {event.seq}, but the log of {region.name} goes on",
        )
    if member.final not in (None, event.digest):
        raise ConflictError("other_bytes", f"site {event.site} has already reported another final digest")
    state = with_member(state, event.site, final=event.digest, caught_up=True, away="", benched_until=None)
    lacks_buffers = state.start is not None and state.start.buffers is not None and event.buffers is None
    if state.final_stored or not event.stored or (lacks_buffers and state.spec.outer is None):
        return Transition(state)
    buffers = event.buffers if state.spec.outer is None else state.buffers
    return Transition(with_(state, final_stored=True, buffers=buffers))


def work_failed(event: WorkFailed, state: RunState, now: datetime) -> Transition:
    """An alarm, once; or the end of the run."""
    if not state.going_on and state.status is not RunStatus.STARTING:
        return Transition(state)
    if event.final:
        return Transition(in_status(state, RunStatus.FAILED, now, event.because))
    if event.because in state.alarms:
        return Transition(state)
    return Transition(with_(state, alarms=(*state.alarms, event.because)))
