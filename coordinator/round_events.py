"""Transitions of a round: answers of sites, freeze, and the entry that closes it. Pure."""

from datetime import datetime, timedelta
from typing import Any

from api.errors import ConflictError, ForbiddenError, GoneError
from api.schemas import Position
from coordinator.entries import step_header
from coordinator.events import Abstained, Aggregated, Answer, AnsweredLate, Contributed, Norm, PartSent, Refused
from coordinator.in_force import outer_schedule
from coordinator.quorum import DELAYS_KEPT
from coordinator.records import Member, Missed, Region, Round, RunState, Sent
from coordinator.transitions import Transition, append, going_on, ranks_of, with_, with_member, with_region

__all__ = [
    "abstained",
    "admitted",
    "aggregated",
    "answered_late",
    "contributed",
    "emptied",
    "frozen",
    "refused",
    "require_known_settings",
]


def _open_round(state: RunState, event: Answer | PartSent) -> tuple[Region, Round]:
    """The region and its round, if the event's site, step and position belong to it."""
    member = ranks_of(state, event.site, event.attempt)
    if member.region != event.region:
        raise ForbiddenError("wrong_region", f"site {event.site} is in region {member.region}, not in {event.region}")
    going_on(state, to="contribute")
    if not state.has_rounds:
        raise ConflictError("no_rounds", f"run {state.id} has exchange = none: its regions have no rounds")
    region = state.regions[event.region]
    context = {"step": region.step, "round": region.round.step if region.round else None}
    if event.step <= region.step:
        raise GoneError("closed_without_you", f"the round of step {event.step} is closed", context=context)
    require_known_settings(region, event.step, event.site, event.position)
    if event.step == region.step + 1 and region.head != event.position:
        raise ConflictError(
            "off_chain",
            f"site {event.site} is at entry {event.position.seq} ({event.position.hash[:12]}), region {region.name} at "
            f"another; load the log again from entry 0",
        )
    if region.round is None or event.step != region.round.step:
        now = f"step {region.round.step} is" if region.round else f"no step is, after {region.step}"
        raise ConflictError(
            "round_not_open", f"step {event.step} of region {region.name} is not open; {now}", context=context
        )
    return region, region.round


def require_known_settings(region: Region, step: int, site: str, position: Position) -> None:
    """Of a site whose last entry is this.

    Raises:
        GoneError: there are changes after it, which hold for this step.
    """
    seq = position.seq
    if step == region.step + 1 and region.head is not None and region.unchanged <= seq < region.head.seq:
        raise GoneError(
            "settings_changed",
            f"step {step} has other settings than the ones before: site {site} is to apply entry {seq + 1} and what "
            "follows, and to contribute by these",
            context={"seq": seq + 1},
        )


def admitted(part: PartSent, state: RunState) -> Sent | None:
    """The contribution that was taken in with this part, if it was.

    Raises what a contribution with this part would be refused with, as far as that is known now; not that its round is
    not open yet.
    """
    try:
        _, round_ = _open_round(state, part)
    except ConflictError as error:
        if error.code == "round_not_open" and part.step == state.regions[part.region].step + 1:
            return None
        raise
    before = round_.contributions.get(part.site)
    if part.site in round_.abstentions or (before is not None and before.parts[part.part] != part.digest):
        raise _other_bytes(part)
    if before is None and round_.frozen:
        raise _closing(part)
    return before


def _other_bytes(event: Answer | PartSent) -> ConflictError:
    return ConflictError("other_bytes", f"site {event.site} has already answered step {event.step} with something else")


def _closing(event: Answer | PartSent) -> GoneError:
    return GoneError(
        "closed_without_you",
        f"step {event.step} is being aggregated without {event.site}: take its entry instead",
        context={"seq": event.position.seq + 1},
    )


def contributed(event: Contributed, state: RunState, now: datetime) -> Transition:
    """Taken in once, and for good: the entry will list it (A1)."""
    region, round_ = _open_round(state, event)
    before = round_.contributions.get(event.site)
    if before is not None and before.digest == event.sent.digest:
        return Transition(state)
    if before is not None or event.site in round_.abstentions:
        raise _other_bytes(event)
    refusals = {site: reason for site, reason in round_.refusals.items() if site != event.site}
    contributions = {**round_.contributions, event.site: event.sent}
    state = with_(with_member(state, event.site, failures=0), held_back="")
    return _answered(state, event, region, now, contributions=contributions, refusals=refusals)


def abstained(event: Abstained, state: RunState, now: datetime) -> Transition:
    """Taken in once, like a contribution; the entry names the site and its reason (A7)."""
    region, round_ = _open_round(state, event)
    if event.site in round_.abstentions:
        return Transition(state)
    if event.site in round_.contributions:
        raise ConflictError("other_bytes", f"site {event.site} has already contributed to step {event.step}")
    refusals = {site: reason for site, reason in round_.refusals.items() if site != event.site}
    abstentions = {**round_.abstentions, event.site: event.reason}
    return _answered(state, event, region, now, abstentions=abstentions, refusals=refusals)


def refused(event: Refused, state: RunState, now: datetime) -> Transition:
    """Noted as an answer, so that nobody waits for this site; what it has answered well stays."""
    region, round_ = _open_round(state, event)
    if event.site in round_.answered:
        return Transition(state)
    return _answered(state, event, region, now, refusals={**round_.refusals, event.site: event.reason})


def _answered(state: RunState, event: Answer, region: Region, now: datetime, **answers: Any) -> Transition:
    """Whoever answers at the head of the log is there: not away, not benched, not behind."""
    round_ = region.round
    assert round_ is not None
    if round_.frozen:
        raise _closing(event)
    first_answer = round_.first_answer or now
    if event.site not in round_.answered:
        state = _with_delay(state, event.site, first_answer, now)
    state = with_region(state, region.name, round=round_.model_copy(update={**answers, "first_answer": first_answer}))
    changes = {"caught_up": True, "away": "", "benched_until": None, "missed": 0, "late": None}
    return Transition(with_member(state, event.site, **changes))


def _with_delay(state: RunState, site: str, first_answer: datetime, now: datetime) -> RunState:
    delay = round(max((now - first_answer).total_seconds(), 0.0), 3)
    return with_member(state, site, delays=(*state.members[site].delays, delay)[-DELAYS_KEPT:])


def answered_late(event: AnsweredLate, state: RunState, now: datetime) -> Transition:
    """How late it was is remembered: so the deadline learns of sites that are slower than it, too."""
    member = ranks_of(state, event.site, event.attempt)
    if not state.going_on or member.late is None or event.step < member.late.step:
        return Transition(state)
    return Transition(with_member(_with_delay(state, event.site, member.late.first_answer, now), event.site, late=None))


def frozen(state: RunState, region: Region, now: datetime) -> RunState:
    """The round's contributors are final; whoever was waited for in vain has missed it."""
    round_ = region.round
    assert round_ is not None
    for member in state.members.values():
        if member.region != region.name or member.site in round_.answered:
            continue
        if member.late is None and member.caught_up and member.present and round_.first_answer is not None:
            late = Missed(step=round_.step, first_answer=round_.first_answer)
            state = with_member(state, member.site, late=late)
        if member.live:
            state = _with_miss(state, member, now)
    return with_region(state, region.name, round=round_.model_copy(update={"frozen": True}))


def _with_miss(state: RunState, member: Member, now: datetime) -> RunState:
    rounds = state.spec.rounds
    missed = member.missed + 1
    if missed < rounds.late_rounds:
        return with_member(state, member.site, missed=missed)
    return with_member(state, member.site, missed=missed, benched_until=now + timedelta(seconds=rounds.bench_s))


def aggregated(event: Aggregated, state: RunState, now: datetime) -> Transition:
    region = state.regions[event.region]
    round_ = region.round
    if not state.going_on or round_ is None or round_.step != event.step or not round_.frozen:
        return Transition(state)
    return _closed(_with_alarms(state, event), region, event.parts, event.norms)


def _with_alarms(state: RunState, event: Aggregated) -> RunState:
    """Outliers are named (C6), each site once."""
    for site, norm in sorted(event.norms.items()):
        start = f"site {site} sends outliers: "
        if norm.halvings and not any(alarm.startswith(start) for alarm in state.alarms):
            why = f"the norm {norm.value:.3g} of its contribution to step {event.step} is more than twice the median"
            state = with_(state, alarms=(*state.alarms, start + why))
    return state


def emptied(state: RunState, region: Region) -> Transition:
    """A frozen round without contributions has an empty entry (A7)."""
    return _closed(state, region, parts=(), norms={})


def _closed(state: RunState, region: Region, parts: tuple[str, ...], norms: dict[str, Norm]) -> Transition:
    round_ = region.round
    assert round_ is not None
    header = step_header(state, region, parts, norms)
    for site in round_.contributions:
        state = with_member(state, site, listed=round_.step)
    tokens = sum(sent.tokens for sent in round_.contributions.values())
    counted = {"tokens": region.tokens + tokens}
    if _is_ahead(state, round_.step):
        counted["ahead"] = region.ahead + tokens
    return append(state, region.model_copy(update={"step": round_.step, "round": None, **counted}), header)


def _is_ahead(state: RunState, step: int) -> bool:
    """Whether the step comes after the one of the outer round that opens next."""
    schedule = outer_schedule(state)
    if schedule is None:
        return False
    following = schedule.following(state.outer_step if state.outer is None else state.outer.step)
    return following is not None and step > following
