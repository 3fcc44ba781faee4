"""What the transitions of a run have in common: the result, small changes of the state, who may speak. Pure."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from api import schemas
from api.errors import ConflictError, ForbiddenError, GoneError
from api.schemas import RunStatus
from coordinator.entries import Header, position_after
from coordinator.records import Member, Region, RunState

__all__ = [
    "Transition",
    "append",
    "asked_in",
    "going_on",
    "in_status",
    "member_of",
    "ranks_of",
    "require_status",
    "still_possible",
    "with_",
    "with_member",
    "with_region",
]


@dataclass(frozen=True)
class Transition:
    """The state after an event, and what must be committed with it.

    `entries`: (region, header) to append to the logs.
    """

    state: RunState
    entries: tuple[tuple[str, Header], ...] = ()
    outer_round: schemas.OuterRound | None = None

    def then(self, after: "Transition") -> "Transition":
        """Both, as one."""
        return Transition(after.state, self.entries + after.entries, after.outer_round or self.outer_round)


def with_(state: RunState, **changes: Any) -> RunState:
    return state.model_copy(update=changes)


def with_region(state: RunState, name: str, **changes: Any) -> RunState:
    region = state.regions[name].model_copy(update=changes)
    return with_(state, regions={**state.regions, name: region})


def with_member(state: RunState, site: str, **changes: Any) -> RunState:
    member = state.members[site].model_copy(update=changes)
    return with_(state, members={**state.members, site: member})


def in_status(state: RunState, status: RunStatus, since: datetime, because: str = "") -> RunState:
    return with_(state, status=status, since=since, ended_because=because)


def append(state: RunState, region: Region, header: Header) -> Transition:
    """`region`, whose log the header goes on."""
    unchanged = region.unchanged if header["kind"] == "change" else header["seq"]
    region = region.model_copy(update={"head": position_after(header), "unchanged": unchanged})
    return Transition(with_(state, regions={**state.regions, region.name: region}), ((region.name, header),))


def member_of(state: RunState, site: str) -> Member:
    member = state.members.get(site)
    if member is None:
        raise ForbiddenError("not_a_member", f"site {site!r} is not a member of run {state.id}")
    if member.excluded:
        raise ForbiddenError("excluded", f"site {site} is excluded from run {state.id}: {member.excluded}")
    return member


def ranks_of(state: RunState, site: str, attempt: int) -> Member:
    """The member, if these are its ranks and not those of another attempt."""
    member = member_of(state, site)
    if attempt != member.attempt:
        when = "is over" if attempt < member.attempt else "is not due"
        raise ConflictError("stale_attempt", f"attempt {attempt} of site {site} {when}; now it is {member.attempt}")
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


def going_on(state: RunState, *, to: str) -> None:
    require_status(state, RunStatus.RUNNING, RunStatus.PAUSED, to=to)


def asked_in(state: RunState, *allowed: RunStatus, to: str) -> None:
    """As `require_status`, for people: of a run that has ended it says what is still possible."""
    if state.status.terminal and state.status not in allowed:
        because = state.ended_because.partition("\n")[0]
        said = f"run {state.id} is {state.status}: {because}; {still_possible(state)}"
        raise GoneError("run_ended", said, context={"status": state.status})
    require_status(state, *allowed, to=to)


def still_possible(state: RunState) -> str:
    """With a run that has ended."""
    if state.status is RunStatus.SUCCEEDED:
        return f"`isthmus run export {state.id} --out FILE` writes its model"
    if not state.snapshots:
        return "it has no snapshot to go on from: start a new run"
    newest = state.snapshots[-1].number
    return (
        f"a new run can go on from its last snapshot, `isthmus run start FILE --from {state.id}/{newest}`, which "
        f"`isthmus run export {state.id} --snapshot {newest} --out FILE` writes"
    )
