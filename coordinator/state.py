"""The state machine of a run: everything that affects transitions, and nothing else.

`transition(state, event, now)` is pure and total: no I/O, time is an argument. An event that makes no sense now raises
a `ProblemError` and changes nothing; one that was already taken in changes nothing. `pending(state)` names the work
that is left, so that any process at any time can do it; doing it twice is harmless: the first commit wins (A4).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from functools import singledispatch
from typing import Any, TypeVar

from algorithms.schedule import outer_due
from api import schemas
from api.errors import ConflictError, ForbiddenError, GoneError
from api.schemas import RunStatus
from coordinator.entries import Header, anchor_header, position_after, start_header, step_header
from coordinator.quorum import agreed_copy, all_announced, may_close
from coordinator.records import (
    Abstained,
    Aggregated,
    Announced,
    Averaged,
    Contributed,
    Event,
    FinalReported,
    FragmentRound,
    LayoutPresented,
    Member,
    OuterRound,
    ProcessesGone,
    Region,
    Round,
    RunState,
    SiteLost,
    StartRequested,
    StartUploaded,
    StopRequested,
)

__all__ = ["AggregateRound", "AverageFragment", "Job", "Transition", "pending", "transition"]


@dataclass(frozen=True)
class Transition:
    """The state after an event, and what must be committed with it.

    `entries`: (region, header) to append to the logs. `closed`: rounds, by region, that ended with this event.
    """

    state: RunState
    entries: tuple[tuple[str, Header], ...] = ()
    closed: tuple[tuple[str, Round], ...] = ()
    outer_round: schemas.OuterRound | None = None


@dataclass(frozen=True)
class AggregateRound:
    region: str
    step: int


@dataclass(frozen=True)
class AverageFragment:
    number: int
    fragment: int


Job = AggregateRound | AverageFragment
T = TypeVar("T")


# --- small steps that several events share ----------------------------------------------------------------------------


def _with(state: RunState, **changes: Any) -> RunState:
    return state.model_copy(update=changes)


def _with_region(state: RunState, region: Region) -> RunState:
    return _with(state, regions={**state.regions, region.name: region})


def _with_member(state: RunState, site: str, **changes: Any) -> RunState:
    member = state.members[site].model_copy(update=changes)
    return _with(state, members={**state.members, site: member})


def _in_status(state: RunState, status: RunStatus, since: datetime, because: str = "") -> RunState:
    return _with(state, status=status, since=since, ended_because=because)


def _append(state: RunState, region: Region, header: Header) -> RunState:
    return _with_region(state, region.model_copy(update={"head": position_after(header)}))


def _member(state: RunState, site: str) -> Member:
    member = state.members.get(site)
    if member is None:
        raise ForbiddenError("not_a_member", f"site {site!r} is not a member of run {state.id}")
    return member


def _require_status(state: RunState, *allowed: RunStatus, to: str) -> None:
    if state.status in allowed:
        return
    context = {"status": state.status}
    if state.status.terminal or state.status is RunStatus.STOPPING:
        ended = f"run {state.id} is {state.status}: {state.ended_because or 'it is being stopped'}"
        raise GoneError("run_ended", ended, context=context)
    names = " or ".join(allowed)
    raise ConflictError(
        "wrong_status", f"run {state.id} is {state.status}; to {to} it must be {names}", context=context
    )


def _open_rounds(state: RunState) -> RunState:
    """Opens what comes next, in each region and between them, wherever nothing is open."""
    if state.outer is not None:
        return state
    due = {region.name for region in state.regions.values() if _outer_due(state, region.step)}
    if due == state.regions.keys():
        return _open_outer(state)
    for region in list(state.regions.values()):
        if region.round is None and region.name not in due and region.step < state.spec.steps:
            state = _with_region(state, region.model_copy(update={"round": Round(step=region.step + 1)}))
    return state


def _outer_due(state: RunState, step: int) -> bool:
    """Whether the outer round after this step is due and has not been held."""
    if state.spec.outer is None:
        return False
    every, steps = state.spec.outer.every, state.spec.steps
    last = min(state.outer_rounds * every, steps)
    return step > last and outer_due(step, every, steps)


def _open_outer(state: RunState) -> RunState:
    assert state.spec.outer is not None
    outer = OuterRound(
        number=state.outer_rounds + 1,
        step=state.step,
        weights={region.name: region.tokens for region in state.regions.values()},
        fragments=tuple(FragmentRound() for _ in range(state.spec.outer.fragments)),
    )
    return _with(state, outer=outer)


# --- transitions ------------------------------------------------------------------------------------------------------


def transition(state: RunState, event: Event, now: datetime) -> Transition:
    """The state after `event`.

    Raises:
        ForbiddenError: the site is not a member.
        ConflictError: not possible now; the detail says what is.
        GoneError: the run has ended.
    """
    return _on(event, state, now)


@singledispatch
def _on(event: Any, state: RunState, now: datetime) -> Transition:
    raise TypeError(f"not an event: {event!r}")


def _handles(kind: type) -> Callable[[Any], Any]:
    return _on.register(kind)


@_handles(StartRequested)
def _start(event: StartRequested, state: RunState, now: datetime) -> Transition:
    _require_status(state, RunStatus.PENDING, to="start")
    members = {site: Member(site=site, region=region) for site, region in sorted(event.sites.items())}
    regions = {name: Region(name=name) for name in sorted(set(event.sites.values()))}
    state = _with(state, members=members, regions=regions)
    return Transition(_in_status(state, RunStatus.STARTING, now))


@_handles(StopRequested)
def _stop(event: StopRequested, state: RunState, now: datetime) -> Transition:
    if state.status in (RunStatus.STOPPING, RunStatus.STOPPED):
        return Transition(state)
    _require_status(state, RunStatus.PENDING, RunStatus.STARTING, RunStatus.RUNNING, to="stop")
    because = f"stopped by request at step {state.step} of {state.spec.steps}"
    status = RunStatus.STOPPED if state.status is RunStatus.PENDING else RunStatus.STOPPING
    return Transition(_in_status(state, status, now, because))


@_handles(LayoutPresented)
def _layout(event: LayoutPresented, state: RunState, now: datetime) -> Transition:
    member = _member(state, event.site)
    _require_status(state, RunStatus.STARTING, RunStatus.RUNNING, to="join")
    if event.attempt != member.attempt:
        raise ConflictError("stale_attempt", f"attempt {event.attempt} of {event.site} is over; now {member.attempt}")
    if state.layout is not None and state.layout.digest != event.layout.digest:
        raise ConflictError(
            "layout_differs",
            f"the model at site {event.site} has layout {event.layout.digest[:12]}, the run's has "
            f"{state.layout.digest[:12]}: names, shapes, groups and chunk must be the same at all sites; "
            "compare the versions of the task's code and its parameters",
        )
    state = _with_member(state, event.site, ready=True)
    return _begin(_with(state, layout=event.layout), now)


@_handles(StartUploaded)
def _start_uploaded(event: StartUploaded, state: RunState, now: datetime) -> Transition:
    _member(state, event.site)
    _require_status(state, RunStatus.STARTING, RunStatus.RUNNING, to="upload entry 0")
    if event.site != state.donor:
        raise ForbiddenError("not_the_donor", f"entry 0 comes from {state.donor}, not from {event.site}")
    if state.layout is None:
        raise ConflictError("no_layout", f"site {event.site} must present its layout before it uploads entry 0")
    if state.start is not None:
        if state.start == event.start:
            return Transition(state)
        raise ConflictError("other_bytes", f"run {state.id} already has another entry 0")
    return _begin(_with(state, start=event.start), now)


def _begin(state: RunState, now: datetime) -> Transition:
    """Starting ends when every site has presented its layout and entry 0 is there; then every log begins with it."""
    ready = state.start is not None and all(member.ready for member in state.members.values())
    if state.status is not RunStatus.STARTING or not ready:
        return Transition(state)
    fragments = state.spec.outer.fragments if state.spec.outer else 0
    state = _with(state, anchors=(None,) * fragments, momenta=(None,) * fragments)
    entries = tuple((region.name, start_header(state, region)) for region in state.regions.values())
    for name, header in entries:
        state = _append(state, state.regions[name], header)
    return Transition(_open_rounds(_in_status(state, RunStatus.RUNNING, now)), entries)


def _open_round(state: RunState, event: Contributed | Abstained) -> tuple[Region, Round]:
    """The region and its round, if the event's site, step and position belong to it."""
    member = _member(state, event.site)
    if member.region != event.region:
        raise ForbiddenError("wrong_region", f"site {event.site} is in region {member.region}, not in {event.region}")
    _require_status(state, RunStatus.RUNNING, to="contribute")
    region = state.regions[event.region]
    context = {"step": region.step, "round": region.round.step if region.round else None}
    if event.step <= region.step:
        raise GoneError("closed_without_you", f"the round of step {event.step} is closed", context=context)
    if region.round is None or event.step != region.round.step:
        raise ConflictError(
            "round_not_open", f"step {event.step} of region {region.name} is not open; see context", context=context
        )
    if region.head != event.position:
        raise ConflictError(
            "off_chain",
            f"site {event.site} is at entry {event.position.seq} ({event.position.hash[:12]}), region {region.name} at "
            f"another; load the log again from entry 0",
        )
    return region, region.round


@_handles(Contributed)
def _contributed(event: Contributed, state: RunState, now: datetime) -> Transition:
    region, round_ = _open_round(state, event)
    before = round_.contributions.get(event.site)
    if before is not None and before.digest == event.sent.digest:
        return Transition(state)
    if before is not None or event.site in round_.abstentions:
        raise ConflictError(
            "other_bytes", f"site {event.site} has already answered step {event.step} with something else"
        )
    contributions = {**round_.contributions, event.site: event.sent}
    return _answered(state, region, round_.model_copy(update={"contributions": contributions}))


@_handles(Abstained)
def _abstained(event: Abstained, state: RunState, now: datetime) -> Transition:
    region, round_ = _open_round(state, event)
    if event.site in round_.abstentions:
        return Transition(state)
    if event.site in round_.contributions:
        raise ConflictError("other_bytes", f"site {event.site} has already contributed to step {event.step}")
    abstentions = {**round_.abstentions, event.site: event.reason}
    return _answered(state, region, round_.model_copy(update={"abstentions": abstentions}))


def _answered(state: RunState, region: Region, round_: Round) -> Transition:
    if may_close(round_, state.region_members(region.name)):
        round_ = round_.model_copy(update={"frozen": True})
    region = region.model_copy(update={"round": round_})
    state = _with_region(state, region)
    if round_.frozen and not round_.contributions:
        return _close(state, region, parts=(), halvings={})
    return Transition(state)


@_handles(Aggregated)
def _aggregated(event: Aggregated, state: RunState, now: datetime) -> Transition:
    region = state.regions[event.region]
    round_ = region.round
    if state.status is not RunStatus.RUNNING or round_ is None or round_.step != event.step or not round_.frozen:
        return Transition(state)
    return _close(state, region, event.parts, event.halvings)


def _close(state: RunState, region: Region, parts: tuple[str, ...], halvings: dict[str, int]) -> Transition:
    assert region.round is not None
    round_ = region.round
    header = step_header(state, region, parts, halvings)
    tokens = region.tokens + sum(sent.tokens for sent in round_.contributions.values())
    closed = region.model_copy(update={"step": round_.step, "round": None, "tokens": tokens})
    state = _append(state, closed, header)
    return Transition(_open_rounds(state), ((region.name, header),), ((region.name, round_),))


# --- outer rounds -----------------------------------------------------------------------------------------------------


@_handles(Announced)
def _announced(event: Announced, state: RunState, now: datetime) -> Transition:
    _member(state, event.site)
    _require_status(state, RunStatus.RUNNING, to="announce a fragment")
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
    return _with(state, outer=state.outer.model_copy(update={"fragments": fragments}))


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
    return _with(state, alarms=tuple(alarms))


@_handles(Averaged)
def _averaged(event: Averaged, state: RunState, now: datetime) -> Transition:
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
        state = _append(state, region, header)
        entries.append((region.name, header))
    state = _with(
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
    state = _with(state, outer=None, outer_rounds=outer.number, regions=regions)
    return replace(done, state=_open_rounds(state), outer_round=summary)


# --- the end ----------------------------------------------------------------------------------------------------------


@_handles(FinalReported)
def _final(event: FinalReported, state: RunState, now: datetime) -> Transition:
    member = _member(state, event.site)
    if state.status is RunStatus.SUCCEEDED and member.final == event.digest:
        return Transition(state)
    _require_status(state, RunStatus.RUNNING, to="report its end")
    region = state.regions[member.region]
    at_the_end = region.step == state.spec.steps and not _outer_due(state, region.step)
    if not at_the_end or region.head is None or event.seq != region.head.seq:
        raise ConflictError(
            "not_at_the_end",
            f"site {event.site} reports its end at entry {event.seq}, but the log of {region.name} goes on",
        )
    if member.final not in (None, event.digest):
        raise ConflictError("other_bytes", f"site {event.site} has already reported another final digest")
    state = _with_member(state, event.site, final=event.digest)
    if event.site == state.donor and event.stored:
        state = _with(state, final_stored=True)
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
            return _in_status(state, RunStatus.FAILED, now, f"the sites ended with different parameters: {listed}")
    return _in_status(state, RunStatus.SUCCEEDED, now, f"all {state.spec.steps} steps done, digests equal")


@_handles(ProcessesGone)
def _processes_gone(event: ProcessesGone, state: RunState, now: datetime) -> Transition:
    member = state.members.get(event.site)
    if member is None or state.status.terminal:
        return Transition(state)
    if state.status is RunStatus.STOPPING:
        return Transition(_gone(state, event.site, now))
    if event.exit_code is None or (event.exit_code == 0 and _has_finished(state, member)):
        return Transition(state)
    return Transition(_in_status(state, RunStatus.FAILED, now, _failure(event, state)))


def _failure(event: ProcessesGone, state: RunState) -> str:
    who = f"site {event.site}" + (f", rank {event.rank}" if event.rank is not None else "")
    if event.exit_code == 0:
        how = f"its training script ended before the run did, at step {state.step} of {state.spec.steps}"
    elif event.exit_code in (-9, 137):
        how = "killed (out of memory?)"
    else:
        how = f"exit code {event.exit_code}"
    return f"{who}: {how}" + (f"\n{event.detail}" if event.detail else "")


@_handles(SiteLost)
def _site_lost(event: SiteLost, state: RunState, now: datetime) -> Transition:
    if event.site not in state.members or state.status.terminal or state.status is RunStatus.PENDING:
        return Transition(state)
    if state.status is RunStatus.STOPPING:
        return Transition(_gone(state, event.site, now))
    if _has_finished(state, state.members[event.site]):
        return Transition(state)
    return Transition(_in_status(state, RunStatus.FAILED, now, f"site {event.site} was lost: {event.because}"))


def _gone(state: RunState, site: str, now: datetime) -> RunState:
    state = _with_member(state, site, gone=True)
    if all(member.gone for member in state.members.values()):
        return _in_status(state, RunStatus.STOPPED, now, state.ended_because)
    return state


# --- work that is left ------------------------------------------------------------------------------------------------


def pending(state: RunState) -> list[Job]:
    """What any process may do now to move the run on."""
    if state.status is not RunStatus.RUNNING:
        return []
    jobs: list[Job] = [
        AggregateRound(region.name, region.round.step)
        for region in state.regions.values()
        if region.round is not None and region.round.frozen
    ]
    if state.outer is not None:
        for index, fragment in enumerate(state.outer.fragments):
            if fragment.anchor is None and all_announced(fragment, state):
                needed = set(region_copies(state, fragment).values())
                if needed <= fragment.stored:
                    jobs.append(AverageFragment(state.outer.number, index))
    return jobs
