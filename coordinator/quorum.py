"""Pure: may this round close, which copy is a region's, and what a run waits for, in words."""

from collections import Counter
from collections.abc import Collection, Mapping

from api.schemas import RunStatus
from coordinator.records import FragmentRound, Round, RunState

__all__ = ["agreed_copy", "all_announced", "may_close", "waiting_for"]


def may_close(round_: Round, members: Collection[str]) -> bool:
    """Every member has contributed or abstained."""
    return round_.answered >= set(members)


def all_announced(fragment: FragmentRound, state: RunState) -> bool:
    return fragment.copies.keys() >= state.members.keys()


def agreed_copy(copies: Mapping[str, str], members: Collection[str]) -> str:
    """The digest that most members hold; a tie goes to the lowest-named site's."""
    votes = Counter(copies[site] for site in members)
    most = max(votes.values())
    return next(copies[site] for site in sorted(members) if votes[copies[site]] == most)


def _names(sites: Collection[str]) -> str:
    return ", ".join(sorted(sites))


def _regions_wait(state: RunState) -> list[str]:
    sentences = []
    for region in state.regions.values():
        if region.round is None:
            continue
        members = state.region_members(region.name)
        missing = set(members) - region.round.answered
        step = region.round.step
        sentences.append(
            f"region {region.name}: step {step}, waiting for {len(missing)} of {len(members)} sites: {_names(missing)}"
            if missing
            else f"region {region.name}: step {step}, aggregating"
        )
    return sentences


def _outer_waits(state: RunState) -> str:
    assert state.outer is not None
    outer = state.outer
    open_ = [(number, fragment) for number, fragment in enumerate(outer.fragments) if fragment.anchor is None]
    number, fragment = open_[0]
    done, total = len(outer.fragments) - len(open_), len(outer.fragments)
    where = f"outer round {outer.number}, fragment {number} ({done} of {total} done)"
    missing = state.members.keys() - fragment.copies.keys()
    if missing:
        return f"{where}: waiting for the digests of {_names(missing)}"
    return f"{where}: waiting for uploads, or averaging"


def waiting_for(state: RunState) -> str:
    """A sentence: what this run is waiting for, or why it ended."""
    match state.status:
        case RunStatus.PENDING:
            return "not started yet: `isthmus run start` starts it"
        case RunStatus.STARTING:
            missing = [member.site for member in state.members.values() if not member.ready]
            if missing:
                return f"waiting for {len(missing)} of {len(state.members)} sites to join: {_names(missing)}"
            return f"waiting for {state.donor} to upload the initial parameters"
        case RunStatus.STOPPING:
            there = [member.site for member in state.members.values() if not member.gone]
            return f"waiting for the processes at {_names(there)} to end"
        case RunStatus.RUNNING:
            if state.outer is not None:
                return _outer_waits(state)
            if state.step == state.spec.steps:
                missing = [member.site for member in state.members.values() if member.final is None]
                if not missing:
                    return f"all {state.step} steps done, waiting for {state.donor} to upload the parameters"
                return f"all {state.step} steps done, waiting for the final digests of {_names(missing)}"
            return "; ".join(_regions_wait(state))
    return state.ended_because
