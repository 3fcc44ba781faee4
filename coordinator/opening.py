"""Pure: what opens next, in each region and between them."""

from coordinator.changes import changed
from coordinator.in_force import outer_schedule
from coordinator.records import FragmentRound, OuterRound, Region, Round, RunState
from coordinator.transitions import Transition, with_, with_region

__all__ = ["arrived_at", "left_behind", "opened", "outer_round_due"]


def opened(state: RunState) -> Transition:
    """Opens what comes next wherever nothing is open. Regions without a live member do not hold up an outer round.

    But what they have accepted comes into their logs before they are taken along (A1).
    """
    live, due = _live_regions(state), _due_regions(state)
    if state.outer is None and live and live <= due:
        rounds = [region.round for name, region in state.regions.items() if name not in live]
        if any(round_ is not None and round_.frozen for round_ in rounds):
            return Transition(state)
        state = _outer_opened(state, live)
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


def left_behind(state: RunState) -> list[str]:
    """Regions without a live member whose open rounds have answers, while no other one has anything to do before.

    All others are due for an outer round, or have the anchors of the one that is open.
    """
    live, outer = _live_regions(state), state.outer
    waiting = live - _due_regions(state) if outer is None else {name for name in live if not outer.held_in(name)}
    if not live or waiting:
        return []
    rounds = {name: region.round for name, region in state.regions.items() if name not in live}
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


def _outer_opened(state: RunState, live: set[str]) -> RunState:
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
        weights={name: _tokens(state, name) for name in sorted(live)},
        participants=frozenset(state.live()),
        following=_following(state, live, schedule.due(step)),
        fragments=_fragments(state, schedule.due(step)),
    )
    for name, region in state.regions.items():
        if name in live:
            state = with_region(state, name, tokens=region.ahead, ahead=0)
        else:
            state = with_region(state, name, round=None, ahead=0)
    return with_(state, outer=outer)


def _following(state: RunState, live: set[str], due: tuple[int, ...]) -> frozenset[str]:
    """Regions that are away and have not moved since the last anchors, or were away last time, too.

    So whoever comes back enters the log at the new anchors. What a region without rounds did is in no log.
    """
    if len(due) < len(state.anchors):
        return frozenset()
    absent = {name: region for name, region in state.regions.items() if name not in live}
    still = {name for name, region in absent.items() if state.has_rounds and _holds_the_anchors(region)}
    return frozenset(still | {name for name, region in absent.items() if region.apart})


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
