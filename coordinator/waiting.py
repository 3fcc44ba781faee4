"""Pure: what a run waits for, in words: for whom, since when, and what ends it."""

from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
from statistics import median

from api.schemas import Condition, RunStatus
from coordinator.in_force import outer_schedule
from coordinator.opening import arrived_at, goes_on_at, missing_regions, outer_round_due
from coordinator.quorum import closes_at, outer_closes_at, remaining
from coordinator.records import FragmentRound, Member, Region, RunState

__all__ = ["reason_of", "waiting_for"]

_WITHOUT = "the run has ended without it"


def waiting_for(state: RunState) -> str:
    """A sentence: what this run is waiting for, or why it ended."""
    match state.status:
        case RunStatus.PENDING:
            return "not started yet: `isthmus run start` starts it"
        case RunStatus.STARTING:
            return _starting(state)
        case RunStatus.RUNNING:
            return _going_on(state)
        case RunStatus.PAUSED:
            return _paused(state)
        case RunStatus.STOPPING:
            there = [member.site for member in state.members.values() if member.present and not member.gone]
            return f"waiting for the processes at {_names(there)} to end"
    return state.ended_because


def reason_of(member: Member, state: RunState) -> str:
    """Why a member is not active, and what ends that; nothing for an active one."""
    match member.condition:
        case Condition.EXCLUDED:
            return member.excluded
        case Condition.AWAY:
            return f"{member.away}; {_WITHOUT if state.status.terminal else 'a heartbeat brings it back'}"
        case Condition.BENCHED:
            assert member.benched_until is not None
            usual = f", its answers come {median(member.delays):.0f} s after the first" if member.delays else ""
            until = f"back when it has caught up, but not before {_clock(member.benched_until)}"
            return f"missed {member.missed} rounds in a row{usual}; {_WITHOUT if state.status.terminal else until}"
        case Condition.JOINING:
            there = "replay the log" if state.going_on else "wait for the start"
            if state.status.terminal:
                there = f"had not caught up; {_WITHOUT}"
            if state.going_on and not state.has_rounds and arrived_at(state, state.outer_rounds + 1):
                there = f"wait for outer round {state.outer_rounds + 1}, for which others have arrived already"
            doing = f"its ranks {there if member.ready else 'have not joined'}"
            if state.going_on and member.restart_at is not None:
                doing = f"its ranks are started again at {_clock(member.restart_at)}"
            return f"{doing}; {_after_failure(member)}" if member.failure else doing
    return ""


def _after_failure(member: Member) -> str:
    return f"attempt {member.attempt} after {member.failure}"


def _names(sites: Iterable[str]) -> str:
    return ", ".join(sorted(sites))


def _clock(time: datetime) -> str:
    return f"{time:%H:%M:%S} UTC"


def _until(deadline: datetime | None) -> str:
    return f" until {_clock(deadline)}" if deadline else ""


def _absent(state: RunState, members: Collection[Member]) -> str:
    """Members that are not live, with their reasons: `b (away since 10:00:00 UTC: no heartbeat)`."""
    absent = (member for member in sorted(members, key=lambda member: member.site) if not member.live)
    return ", ".join(
        f"{member.site} ({member.condition} since {_clock(member.since)}: {_first_line(reason_of(member, state))})"
        for member in absent
        if not member.excluded
    )


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


# --- before it runs ---------------------------------------------------------------------------------------------------


def _starting(state: RunState) -> str:
    present = state.present()
    for region in state.needed_regions:
        there, least = len(state.present(region)), state.spec.rounds.min_sites
        if there < least:
            members = [member for member in state.members.values() if member.region == region and not member.present]
            return f"region {region}: {there} of at least {least} sites there: {_absent(state, members) or 'add sites'}"
    missing = [site for site in present if not state.members[site].ready]
    if missing:
        named = _names(_with_failure(state.members[site]) for site in missing)
        return f"waiting for {len(missing)} of {len(present)} sites to join: {named}"
    if state.origin is not None:
        return "making the initial parameters of what the run begins with"
    return f"waiting for {state.first_site} to upload the initial parameters"


def _with_failure(member: Member) -> str:
    return f"{member.site} ({_first_line(_after_failure(member))})" if member.failure else member.site


# --- while it runs ----------------------------------------------------------------------------------------------------


def _paused(state: RunState) -> str:
    """Of a run whose steps are done nothing is left to be resumed."""
    paused = f"paused: {state.paused_because}" if state.paused_because else "paused"
    words = "" if state.storage_full else _going_on(state)
    if words and _is_done(state):
        return f"{paused}; {words}"
    return f"{paused}, `isthmus run resume` goes on{words and '; '}{words}"


def _is_done(state: RunState) -> bool:
    return state.outer is None and state.step == state.spec.steps and not outer_round_due(state, state.step)


def _going_on(state: RunState) -> str:
    open_ = [_round(state, region) for region in state.regions.values() if region.round is not None]
    if open_ and state.held_back:
        open_.append(f"contributions wait: {state.held_back}")
    if state.outer is not None:
        open_.insert(0, _outer(state))
    if state.has_rounds and (deadline := goes_on_at(state)) is not None:
        which = f"outer round {state.outer_rounds + 1} goes on"
        open_.insert(0, f"{which} without {_names(missing_regions(state))} at {_clock(deadline)}")
    if open_:
        return "; ".join(open_)
    if not state.has_rounds and outer_round_due(state, state.spec.steps):
        return _on_their_way(state)
    if outer_round_due(state, state.step):
        if state.live():
            return ""
        absent = _absent(state, state.members.values())
        return f"outer round {state.outer_rounds + 1} is due, no site is there: {absent}"
    return _end(state) if _is_done(state) else ""


def _on_their_way(state: RunState) -> str:
    """Regions without rounds."""
    schedule = outer_schedule(state)
    assert schedule is not None
    number, live = state.outer_rounds + 1, state.live()
    where = f"outer round {number}, after step {schedule.following(state.outer_step)}"
    if not live:
        return f"{where}: no site is there: {_absent(state, state.members.values()) or 'add sites'}"
    missing = set(live) - set(arrived_at(state, number))
    return (
        f"{where}: {len(missing)} of {len(live)} sites on their way: {_names(missing)}{_until(goes_on_at(state))}"
        if missing
        else ""
    )


def _round(state: RunState, region: Region) -> str:
    assert region.round is not None
    where = f"region {region.name}: step {region.round.step}"
    if region.round.frozen:
        return f"{where}, aggregating"
    live, least = state.live(region.name), state.spec.rounds.min_sites
    if len(live) < least:
        members = [member for member in state.members.values() if member.region == region.name]
        return f"{where}, {len(live)} of at least {least} sites there: {_absent(state, members) or 'add sites'}"
    missing = set(live) - region.round.answered
    words = f"{where}, waiting for {len(missing)} of {len(live)} sites: {_names(missing)}"
    if region.round.first_answer is not None:
        words += f", since {_clock(region.round.first_answer)}"
        deadline = closes_at(state, region)
        least = max(least, (len(live) + 1) // 2)
        words += f" and until {_clock(deadline)}" if deadline else f" and until {least} have answered"
    return words


def _outer(state: RunState) -> str:
    assert state.outer is not None
    outer = state.outer
    open_ = [(number, fragment) for number, fragment in outer.fragments.items() if fragment.anchor is None]
    if not open_:
        return f"outer round {outer.number}: its anchors are applied after step {outer.ends}"
    number, fragment = open_[0]
    done, total = len(outer.fragments) - len(open_), len(outer.fragments)
    where = f"outer round {outer.number}, fragment {number} ({done} of {total} done)"
    sites = remaining(state)
    if not sites:
        regions = [member for member in state.members.values() if member.region in outer.weights]
        return f"{where}: none of its participants is there: {_absent(state, regions) or 'add sites'}"
    missing, until = set(sites) - fragment.copies.keys(), _until(outer_closes_at(state))
    if missing:
        return f"{where}: waiting for the digests of {_names(missing)}{until}"
    uploaders = _uploaders(fragment, {site: state.members[site].region for site in sites})
    return f"{where}: waiting for the copies of {_names(uploaders)}{until}" if uploaders else f"{where}: averaging"


def _uploaders(fragment: FragmentRound, regions: Mapping[str, str]) -> set[str]:
    """Among those sites, whose regions these are."""
    first: dict[str, str] = {}
    for site, copy in fragment.copies.items():
        if site in regions and fragment.upload(regions[site], copy) is None:
            first.setdefault(copy, site)
    return set(first.values())


def _end(state: RunState) -> str:
    done = f"all {state.step} steps done"
    if state.wanted is not None and state.wanted.contents is not None:
        return f"{done}, writing the manifest of snapshot {state.wanted.number}"
    live = state.live()
    missing = [site for site in live if state.members[site].final is None]
    if missing:
        return f"{done}, waiting for the final digests of {_names(missing)}"
    if state.model_site is not None:
        return f"{done}, waiting for {state.model_site} to upload the parameters"
    return f"{done}, no site is there to report the parameters: {_absent(state, state.members.values())}"
