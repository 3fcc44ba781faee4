"""Pure: may a round close, when will it, and which copy of a fragment is a region's."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from statistics import median

from api.specs import RoundsSpec
from coordinator.records import FragmentRound, Region, RunState

__all__ = [
    "agreed_copies",
    "all_announced",
    "allowance_s",
    "closes_at",
    "lost_region",
    "may_close",
    "outer_closes_at",
    "region_copies",
    "remaining",
    "timely",
]

DELAYS_KEPT = 8
_DELAYS_NEEDED = 4
_UNTIL_THEN_S = 60.0
_LEAST_S, _MOST_S = 10.0, 600.0
_DEVIATIONS = 6
_MARGIN = 1.5

Copies = dict[str, tuple[str, ...]]


def allowance_s(delays: Sequence[float], rounds: RoundsSpec) -> float:
    """Seconds after a round's first answer for which a site is waited for: as told, or by its own earlier delays.

    A site whose usual delay is more than the most that anybody is waited for is waited for the least.
    """
    if rounds.deadline_s is not None:
        return rounds.deadline_s
    if len(delays) < _DELAYS_NEEDED:
        return _UNTIL_THEN_S
    middle = median(delays)
    if middle > _MOST_S:
        return _LEAST_S
    deviation = median(abs(delay - middle) for delay in delays)
    return min(max(_MARGIN * middle, middle + _DEVIATIONS * deviation, _LEAST_S), _MOST_S)


def may_close(state: RunState, region: Region, now: datetime) -> bool:
    """Every live member has answered, and enough of them; or it is the deadline, and half of them have."""
    assert region.round is not None
    live = set(state.live(region.name))
    if len(live) >= state.spec.rounds.min_sites and region.round.answered >= live:
        return True
    deadline = closes_at(state, region)
    return deadline is not None and now >= deadline


def closes_at(state: RunState, region: Region) -> datetime | None:
    """The round's deadline, if there are answers enough to close it then."""
    if region.round is None or region.round.frozen or region.round.first_answer is None:
        return None
    live = state.live(region.name)
    answers = len(region.round.answered.intersection(live))
    if answers < state.spec.rounds.min_sites or 2 * answers < len(live):
        return None
    missing = (state.members[site] for site in live if site not in region.round.answered)
    longest = max((allowance_s(member.delays, state.spec.rounds) for member in missing), default=0.0)
    return region.round.first_answer + timedelta(seconds=longest)


def remaining(state: RunState, region: str | None = None) -> list[str]:
    """Participants of the open outer round that are still waited for."""
    assert state.outer is not None
    return [site for site in state.live(region) if site in state.outer.participants]


def all_announced(fragment: FragmentRound, state: RunState) -> bool:
    """Every remaining participant holds a copy that is known; somebody does."""
    sites = remaining(state)
    return bool(sites) and fragment.copies.keys() >= set(sites)


def agreed_copies(copies: Mapping[str, str], members: Collection[str]) -> tuple[str, ...]:
    """The digest that more than half of the members hold; without one, all that they hold, sorted (A11)."""
    votes = Counter(copies[site] for site in members)
    (most, count), *_ = votes.most_common(1)
    return (most,) if 2 * count > len(members) else tuple(sorted(votes))


# --- outer rounds -----------------------------------------------------------------------------------------------------


def region_copies(state: RunState, fragment: FragmentRound, among: Collection[str] | None = None) -> Copies:
    """The digests of which each region's copy is made: one, if most of its participants hold that.

    Regions without participants have none. Buffers are not the same at all sites: there every copy counts. `among`:
    these participants only.
    """
    assert state.outer is not None
    sites = {name: remaining(state, name) for name in state.outer.weights}
    if among is not None:
        sites = {name: [site for site in there if site in among] for name, there in sites.items()}
    if fragment.buffers:
        return {name: tuple(fragment.copies[site] for site in there) for name, there in sites.items() if there}
    return {name: agreed_copies(fragment.copies, there) for name, there in sites.items() if there}


def timely(state: RunState) -> set[str]:
    """Participants that have announced every fragment that is open, in regions whose copies have been uploaded."""
    assert state.outer is not None
    open_ = [fragment for fragment in state.outer.fragments.values() if fragment.anchor is None]
    there = {site for site in remaining(state) if all(site in fragment.copies for fragment in open_)}
    for fragment in open_:
        for region, copies in region_copies(state, fragment, there).items():
            if not all(fragment.upload(region, copy) for copy in copies):
                there -= set(remaining(state, region))
    return there


def outer_closes_at(state: RunState) -> datetime | None:
    """When the outer round goes on without the participants that are late, if at least half of the regions are not."""
    outer, spec = state.outer, state.spec.outer
    if outer is None or spec is None or spec.deadline_s is None or outer.announced_at is None:
        return None
    waited_for, there = set(remaining(state)), timely(state)
    regions = ({state.members[site].region for site in sites} for sites in (there, waited_for))
    least, all_ = (len(names) for names in regions)
    if waited_for == there or not there or 2 * least < all_:
        return None
    return outer.announced_at + timedelta(seconds=spec.deadline_s)


def lost_region(state: RunState) -> str | None:
    """A region whose sites are all excluded, without which the run cannot go on: not one that has come later; without
    rounds only if all are such.
    """
    left = {member.region for member in state.members.values() if not member.excluded}
    lost = {name for name, region in state.regions.items() if not region.came_later} - left
    return None if not lost or (left and not state.has_rounds) else min(lost)
