"""Transitions of a run as a whole: start, entry 0, stop, the end, and what ends it early. Pure."""

from datetime import datetime

from api.errors import ConflictError, ForbiddenError
from api.schemas import RunStatus
from coordinator.entries import start_header
from coordinator.records import (
    FinalReported,
    LayoutPresented,
    Member,
    ProcessesGone,
    Region,
    RunState,
    SeatTaken,
    SiteLost,
    StartRequested,
    StartUploaded,
    StopRequested,
    WorkFailed,
)
from coordinator.transitions import (
    Transition,
    append,
    in_status,
    member_of,
    open_rounds,
    outer_round_due,
    require_status,
    with_,
    with_member,
)

__all__ = [
    "final_reported",
    "layout_presented",
    "processes_gone",
    "seat_taken",
    "site_lost",
    "start_requested",
    "start_uploaded",
    "stop_requested",
    "work_failed",
]


def start_requested(event: StartRequested, state: RunState, now: datetime) -> Transition:
    require_status(state, RunStatus.PENDING, to="start")
    members = {site: Member(site=site, region=region) for site, region in sorted(event.sites.items())}
    regions = {name: Region(name=name) for name in sorted(set(event.sites.values()))}
    state = with_(state, members=members, regions=regions)
    return Transition(in_status(state, RunStatus.STARTING, now))


def stop_requested(event: StopRequested, state: RunState, now: datetime) -> Transition:
    if state.status in (RunStatus.STOPPING, RunStatus.STOPPED):
        return Transition(state)
    require_status(state, RunStatus.PENDING, RunStatus.STARTING, RunStatus.RUNNING, to="stop")
    because = f"stopped by request at step {state.step} of {state.spec.steps}"
    status = RunStatus.STOPPED if state.status is RunStatus.PENDING else RunStatus.STOPPING
    return Transition(in_status(state, status, now, because))


def seat_taken(event: SeatTaken, state: RunState, now: datetime) -> Transition:
    """A second seat means that the agent has lost the ranks of the first one, and with them their momentum."""
    member = member_of(state, event.site)
    require_status(state, RunStatus.STARTING, RunStatus.RUNNING, to="start ranks")
    if event.attempt != member.attempt:
        raise ConflictError("stale_attempt", f"attempt {event.attempt} of {event.site} is over; now {member.attempt}")
    if member.ready and event.seat != member.seat:
        because = f"site {event.site} was lost: its agent was started again, without the ranks that it had"
        return Transition(in_status(state, RunStatus.FAILED, now, because))
    return Transition(with_member(state, event.site, seat=event.seat))


def layout_presented(event: LayoutPresented, state: RunState, now: datetime) -> Transition:
    member = member_of(state, event.site)
    require_status(state, RunStatus.STARTING, RunStatus.RUNNING, to="join")
    if event.attempt != member.attempt:
        raise ConflictError("stale_attempt", f"attempt {event.attempt} of {event.site} is over; now {member.attempt}")
    if state.layout is not None and state.layout.digest != event.layout.digest:
        raise ConflictError(
            "layout_differs",
            f"the model at site {event.site} has layout {event.layout.digest[:12]}, the run's has "
            f"{state.layout.digest[:12]}: names, shapes, groups and chunk must be the same at all sites; "
            "compare the versions of the task's code and its parameters",
        )
    state = with_member(state, event.site, ready=True)
    return _begin(with_(state, layout=event.layout), now)


def start_uploaded(event: StartUploaded, state: RunState, now: datetime) -> Transition:
    member_of(state, event.site)
    require_status(state, RunStatus.STARTING, RunStatus.RUNNING, to="upload entry 0")
    if event.site != state.donor:
        raise ForbiddenError("not_the_donor", f"entry 0 comes from {state.donor}, not from {event.site}")
    if state.layout is None:
        raise ConflictError("no_layout", f"site {event.site} must present its layout before it uploads entry 0")
    if state.start is not None:
        if state.start == event.start:
            return Transition(state)
        raise ConflictError("other_bytes", f"run {state.id} already has another entry 0")
    return _begin(with_(state, start=event.start), now)


def _begin(state: RunState, now: datetime) -> Transition:
    """Starting ends when every site has presented its layout and entry 0 is there; then every log begins with it."""
    ready = state.start is not None and all(member.ready for member in state.members.values())
    if state.status is not RunStatus.STARTING or not ready:
        return Transition(state)
    fragments = state.spec.outer.fragments if state.spec.outer else 0
    state = with_(state, anchors=(None,) * fragments, momenta=(None,) * fragments)
    entries = tuple((region.name, start_header(state, region)) for region in state.regions.values())
    for name, header in entries:
        state = append(state, state.regions[name], header)
    return Transition(open_rounds(in_status(state, RunStatus.RUNNING, now)), entries)


def final_reported(event: FinalReported, state: RunState, now: datetime) -> Transition:
    member = member_of(state, event.site)
    if state.status is RunStatus.SUCCEEDED and member.final == event.digest:
        return Transition(state)
    require_status(state, RunStatus.RUNNING, to="report its end")
    region = state.regions[member.region]
    at_the_end = region.step == state.spec.steps and not outer_round_due(state, region.step)
    if not at_the_end or region.head is None or event.seq != region.head.seq:
        raise ConflictError(
            "not_at_the_end",
            f"site {event.site} reports its end at entry {event.seq}, but the log of {region.name} goes on",
        )
    if member.final not in (None, event.digest):
        raise ConflictError("other_bytes", f"site {event.site} has already reported another final digest")
    state = with_member(state, event.site, final=event.digest)
    if event.site == state.donor and event.stored:
        state = with_(state, final_stored=True)
    if not all(_has_finished(state, other) for other in state.members.values()):
        return Transition(state)
    return Transition(_judged(state, now))


def _has_finished(state: RunState, member: Member) -> bool:
    """Nothing more is asked of this site: its final digest is known and, if it is to give the model, that is stored."""
    gives_model = state.spec.outer is None and member.site == state.donor
    return member.final is not None and (state.final_stored or not gives_model)


def _judged(state: RunState, now: datetime) -> RunState:
    """Sites that share a log, or a last outer step, must end with the same bits."""
    groups = [state.members] if state.spec.outer else [state.region_members(name) for name in state.regions]
    for group in groups:
        digests = {site: state.members[site].final for site in group}
        if len(set(digests.values())) > 1:
            listed = ", ".join(f"{site} {str(digest)[:12]}" for site, digest in sorted(digests.items()))
            return in_status(state, RunStatus.FAILED, now, f"the sites ended with different parameters: {listed}")
    return in_status(state, RunStatus.SUCCEEDED, now, f"all {state.spec.steps} steps done, digests equal")


def processes_gone(event: ProcessesGone, state: RunState, now: datetime) -> Transition:
    member = state.members.get(event.site)
    if member is None or state.status.terminal:
        return Transition(state)
    if state.status is RunStatus.STOPPING:
        return Transition(_gone(state, event.site, now))
    if event.exit_code is None or (event.exit_code == 0 and _has_finished(state, member)):
        return Transition(state)
    return Transition(in_status(state, RunStatus.FAILED, now, _failure(event, state)))


def _failure(event: ProcessesGone, state: RunState) -> str:
    who = f"site {event.site}" + (f", rank {event.rank}" if event.rank is not None else "")
    if event.exit_code == 0:
        how = f"its training script ended before the run did, at step {state.step} of {state.spec.steps}"
    elif event.exit_code in (-9, 137):
        how = "killed (out of memory?)"
    else:
        how = f"exit code {event.exit_code}"
    log = event.detail.strip()
    return f"{who}: {how}: {log.splitlines()[-1]}\n{log}" if log else f"{who}: {how}"


def site_lost(event: SiteLost, state: RunState, now: datetime) -> Transition:
    if event.site not in state.members or state.status.terminal or state.status is RunStatus.PENDING:
        return Transition(state)
    if state.status is RunStatus.STOPPING:
        return Transition(_gone(state, event.site, now))
    if _has_finished(state, state.members[event.site]):
        return Transition(state)
    return Transition(in_status(state, RunStatus.FAILED, now, f"site {event.site} was lost: {event.because}"))


def _gone(state: RunState, site: str, now: datetime) -> RunState:
    state = with_member(state, site, gone=True)
    if all(member.gone for member in state.members.values()):
        return in_status(state, RunStatus.STOPPED, now, state.ended_because)
    return state


def work_failed(event: WorkFailed, state: RunState, now: datetime) -> Transition:
    """An alarm, once; or the end of the run."""
    if state.status is not RunStatus.RUNNING:
        return Transition(state)
    if event.final:
        return Transition(in_status(state, RunStatus.FAILED, now, event.because))
    if event.because in state.alarms:
        return Transition(state)
    return Transition(with_(state, alarms=(*state.alarms, event.because)))
