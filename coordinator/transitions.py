"""What the transitions of a run have in common: the result, small changes of the state, what opens next. Pure."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from algorithms.schedule import outer_due
from api import schemas
from api.errors import ConflictError, ForbiddenError, GoneError
from api.schemas import RunStatus
from coordinator.entries import Header, position_after
from coordinator.records import FragmentRound, Member, OuterRound, Region, Round, RunState

__all__ = [
    "Transition",
    "append",
    "in_status",
    "member_of",
    "open_rounds",
    "outer_round_due",
    "require_status",
    "with_",
    "with_member",
    "with_region",
]


@dataclass(frozen=True)
class Transition:
    """The state after an event, and what must be committed with it.

    `entries`: (region, header) to append to the logs. `closed`: rounds, by region, that ended with this event.
    """

    state: RunState
    entries: tuple[tuple[str, Header], ...] = ()
    closed: tuple[tuple[str, Round], ...] = ()
    outer_round: schemas.OuterRound | None = None


def with_(state: RunState, **changes: Any) -> RunState:
    return state.model_copy(update=changes)


def with_region(state: RunState, region: Region) -> RunState:
    return with_(state, regions={**state.regions, region.name: region})


def with_member(state: RunState, site: str, **changes: Any) -> RunState:
    member = state.members[site].model_copy(update=changes)
    return with_(state, members={**state.members, site: member})


def in_status(state: RunState, status: RunStatus, since: datetime, because: str = "") -> RunState:
    return with_(state, status=status, since=since, ended_because=because)


def append(state: RunState, region: Region, header: Header) -> RunState:
    return with_region(state, region.model_copy(update={"head": position_after(header)}))


def member_of(state: RunState, site: str) -> Member:
    member = state.members.get(site)
    if member is None:
        raise ForbiddenError("not_a_member", f"site {site!r} is not a member of run {state.id}")
    return member


def require_status(state: RunState, *allowed: RunStatus, to: str) -> None:
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


def open_rounds(state: RunState) -> RunState:
    """Opens what comes next, in each region and between them, wherever nothing is open."""
    if state.outer is not None:
        return state
    due = {region.name for region in state.regions.values() if outer_round_due(state, region.step)}
    if due == state.regions.keys():
        return _open_outer(state)
    for region in list(state.regions.values()):
        if region.round is None and region.name not in due and region.step < state.spec.steps:
            state = with_region(state, region.model_copy(update={"round": Round(step=region.step + 1)}))
    return state


def outer_round_due(state: RunState, step: int) -> bool:
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
    return with_(state, outer=outer)
