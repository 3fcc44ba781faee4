"""Pure: what opens next, in each region and between them."""

from datetime import datetime, timedelta

from api.schemas import RunStatus
from coordinator.changes import changed
from coordinator.in_force import outer_schedule
from coordinator.records import FragmentRound, OuterRound, Region, Round, RunState
from coordinator.transitions import Transition, with_, with_region

__all__ = [
    "arrived_at",
    "goes_on_at",
    "late_regions",
    "left_behind",
    "met",
    "missing_regions",
    "opened",
    "outer_round_due",
]


def met(state: RunState, now: datetime) -> RunState:
    """Notes when a region has come to where it waits for others; not while the run is paused."""
    spec = state.spec.outer
    if spec is None or spec.deadline_s is None:
        return state
    waits = state.status is RunStatus.RUNNING and bool(_competing(state) - missing_regions(state))
    return with_(state, met_at=(state.met_at or now) if waits else None)


def missing_regions(state: RunState) -> set[str]:
    """With somebody there, but not at the next outer round; or not where the anchors of the open one are applied.

    None, while nobody else is there, either.
    """
    there = _due_regions(state)
    if state.outer is not None:
        there = {name for name in state.outer.weights if state.outer.held_in(name)}
    competing = _competing(state)
    return competing - there if competing & there else competing


def _competing(state: RunState) -> set[str]:
    """Regions that wait for each other: with a live member, and in the outer round that is open."""
    live = _live_regions(state)
    return live if state.outer is None else live & state.outer.weights.keys()


def goes_on_at(state: RunState) -> datetime | None:
    """When the regions that wait go on without those that are missing, if these are at most half.

    None, too, while what others have accepted is being aggregated.
    """
    spec, missing = state.spec.outer, missing_regions(state)
    if spec is None or spec.deadline_s is None or state.met_at is None or not missing:
        return None
    there = _competing(state) - missing
    rounds = [region.round for name, region in state.regions.items() if name not in there]
    if len(missing) > len(there) or any(round_ is not None and round_.frozen for round_ in rounds):
        return None
    return state.met_at + timedelta(seconds=spec.deadline_s)


def late_regions(state: RunState, now: datetime) -> set[str]:
    """Without which the others go on now."""
    deadline = goes_on_at(state)
    return missing_regions(state) if deadline is not None and now >= deadline else set()


def _taking_part(state: RunState, now: datetime) -> set[str]:
    """The regions of the outer round that opens now; none, if none does."""
    if state.outer is not None:
        return set()
    there = _live_regions(state) - late_regions(state, now)
    return there if there <= _due_regions(state) else set()


def opened(state: RunState, now: datetime) -> Transition:
    """Opens what comes next wherever nothing is open. Regions without a live member do not hold up an outer round.

    But what they have accepted comes into their logs before they are taken along (A1).
    """
    there = _taking_part(state, now)
    if there:
        rounds = [region.round for name, region in state.regions.items() if name not in there]
        if any(round_ is not None and round_.frozen for round_ in rounds):
            return Transition(state)
        state = _outer_opened(state, there)
    done = Transition(state)
    for name, region in state.regions.items() if state.has_rounds else ():
        if region.round is None and region.step < _limit(state, name):
            done = done.then(_round_opened(done.state, region))
    return done


def _limit(state: RunState, region: str) -> int:
    """The step after which the region goes on only when it has the anchors that are applied then."""
    schedule, outer = outer_schedule(state), state.outer
    if schedule is None:
        return state.spec.steps
    if outer is not None and region not in outer.weights:
        return 0
    if outer is not None and not outer.held_in(region):
        return outer.ends
    step = schedule.following(state.outer_step if outer is None else outer.step)
    return state.spec.steps if step is None else schedule.applied_after(step)


def _round_opened(state: RunState, region: Region) -> Transition:
    """What changes with its step comes into the log right before: so whoever contributes has taken note (A21)."""
    step = region.step + 1
    done = changed(state, region, step)
    return done.then(Transition(with_region(done.state, region.name, round=Round(step=step))))


def left_behind(state: RunState, now: datetime) -> list[str]:
    """Regions without a live member whose open rounds have answers, while no other one has anything to do before.

    All others are due for an outer round, or have the anchors of the one that is open. At a deadline so are regions
    without which the others go on.
    """
    outer, there = state.outer, _taking_part(state, now)
    if outer is not None:
        there = _live_regions(state) - late_regions(state, now)
        there = there if all(outer.held_in(name) for name in there) else set()
    if not there:
        return []
    rounds = {name: region.round for name, region in state.regions.items() if name not in there}
    return [name for name, round_ in rounds.items() if round_ is not None and round_.answered and not round_.frozen]


def _live_regions(state: RunState) -> set[str]:
    return {name for name in state.regions if state.live(name)}


def _due_regions(state: RunState) -> set[str]:
    if not state.has_rounds:
        return {state.members[site].region for site in arrived_at(state, state.outer_rounds + 1)}
    return {name for name, region in state.regions.items() if outer_round_due(state, region.step)}


def arrived_at(state: RunState, number: int) -> list[str]:
    """Live sites that have trained up to this outer round, where regions have no rounds."""
    arrivals = {site: state.members[site].arrived for site in state.live()}
    return [site for site, arrival in arrivals.items() if arrival is not None and arrival.number == number]


def outer_round_due(state: RunState, step: int) -> bool:
    """Whether the outer round after this step is due and has not been held."""
    schedule = outer_schedule(state)
    following = None if schedule is None else schedule.following(state.outer_step)
    return following is not None and step >= following


def _outer_opened(state: RunState, there: set[str]) -> RunState:
    """Rounds of the other regions, which nobody has answered, end here: these regions go on from the anchors."""
    schedule = outer_schedule(state)
    assert schedule is not None
    step = schedule.following(state.outer_step)
    assert step is not None
    outer = OuterRound(
        number=state.outer_rounds + 1,
        step=step,
        ends=schedule.applied_after(step),
        every=schedule.every_at(step),
        weights={name: _tokens(state, name) for name in sorted(there)},
        participants=frozenset(site for name in there for site in state.live(name)),
        following=_following(state, schedule.due(step), there),
        late=frozenset(site for site in state.live() if state.members[site].region not in there),
        fragments=_fragments(state, schedule.due(step)),
    )
    for name, region in state.regions.items():
        if name in there:
            state = with_region(state, name, tokens=region.ahead, ahead=0)
        else:
            state = with_region(state, name, round=None, ahead=0)
    return with_(state, outer=outer, met_at=None)


def _following(state: RunState, due: tuple[int, ...], there: set[str]) -> frozenset[str]:
    """Regions that have not moved since the last anchors; or are away, and have not been in the last mean, either.

    So whoever comes back enters the log at the new anchors. What a region without rounds did is in no log.
    """
    if len(due) < len(state.anchors):
        return frozenset()
    absent = {name: region for name, region in state.regions.items() if name not in there}
    still = {name for name, region in absent.items() if state.has_rounds and _holds_the_anchors(region)}
    return frozenset(still | {name for name, region in absent.items() if region.apart and not state.live(name)})


def _holds_the_anchors(region: Region) -> bool:
    return region.unchanged <= (0 if region.resume is None else region.resume.position.seq)


def _fragments(state: RunState, due: tuple[int, ...]) -> dict[int, FragmentRound]:
    """Buffers, if there are any, are one more, due with the last of the others."""
    assert state.spec.outer is not None
    fragments = {fragment: FragmentRound() for fragment in due}
    if state.spec.outer.fragments - 1 in due and state.start is not None and state.start.buffers is not None:
        fragments[state.spec.outer.fragments] = FragmentRound(buffers=True)
    return fragments


def _tokens(state: RunState, region: str) -> int:
    """Trained on from the last copy to this one (A12)."""
    if state.has_rounds:
        return state.regions[region].tokens - state.regions[region].ahead
    arrivals = (state.members[site].arrived for site in state.live(region))
    return sum(arrival.tokens for arrival in arrivals if arrival is not None)
