"""Transitions of a round: contributions and abstentions, freeze, and the entry that closes it. Pure."""

from datetime import datetime

from api.errors import ConflictError, ForbiddenError, GoneError
from api.schemas import RunStatus
from coordinator.entries import step_header
from coordinator.quorum import may_close
from coordinator.records import Abstained, Aggregated, Contributed, Region, Round, RunState
from coordinator.transitions import Transition, append, member_of, open_rounds, require_status, with_region

__all__ = ["abstained", "aggregated", "contributed"]


def _open_round(state: RunState, event: Contributed | Abstained) -> tuple[Region, Round]:
    """The region and its round, if the event's site, step and position belong to it."""
    member = member_of(state, event.site)
    if member.region != event.region:
        raise ForbiddenError("wrong_region", f"site {event.site} is in region {member.region}, not in {event.region}")
    require_status(state, RunStatus.RUNNING, to="contribute")
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


def contributed(event: Contributed, state: RunState, now: datetime) -> Transition:
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


def abstained(event: Abstained, state: RunState, now: datetime) -> Transition:
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
    state = with_region(state, region)
    if round_.frozen and not round_.contributions:
        return _close(state, region, parts=(), halvings={})
    return Transition(state)


def aggregated(event: Aggregated, state: RunState, now: datetime) -> Transition:
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
    state = append(state, closed, header)
    return Transition(open_rounds(state), ((region.name, header),), ((region.name, round_),))
