"""Pure: what opens next, in each region and between them."""

from algorithms.schedule import outer_due
from coordinator.changes import changed
from coordinator.in_force import every_at, next_outer_step
from coordinator.records import FragmentRound, OuterRound, Region, Round, RunState
from coordinator.transitions import Transition, with_, with_region

__all__ = ["arrived_at", "left_behind", "opened", "outer_round_due"]


def opened(state: RunState) -> Transition:
    """Opens what comes next wherever nothing is open. Regions without a live member do not hold up an outer round.

    But what they have accepted comes into their logs before they are taken along (A1).
    """
    done = Transition(state)
    if state.outer is not None:
        return done
    live, due = _live_regions(state), _due_regions(state)
    if live and live <= due:
        aggregating = any(region.round is not None and region.round.frozen for region in state.regions.values())
        return done if aggregating else Transition(_outer_opened(state, live))
    for name, region in state.regions.items() if state.has_rounds else ():
        if region.round is None and name not in due and region.step < state.spec.steps:
            done = done.then(_round_opened(done.state, region))
    return done


def _round_opened(state: RunState, region: Region) -> Transition:
    """What changes with its step comes into the log right before: so whoever contributes has taken note (A21)."""
    step = region.step + 1
    done = changed(state, region, step)
    return done.then(Transition(with_region(done.state, region.name, round=Round(step=step))))


def left_behind(state: RunState) -> list[str]:
    """Regions without a live member whose open rounds have answers, while all others are due for an outer round."""
    live, due = _live_regions(state), _due_regions(state)
    if state.outer is not None or not live or not live <= due:
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
    return step > state.outer_step and outer_due(step, every_at(state, step), state.spec.steps)


def _outer_opened(state: RunState, live: set[str]) -> RunState:
    """Rounds of the other regions, which nobody has answered, end here: these regions go on from the anchors."""
    spec = state.spec.outer
    assert spec is not None
    number = state.outer_rounds + 1
    for name in state.regions.keys() - live:
        state = with_region(state, name, round=None)
    buffers = [FragmentRound(buffers=True)] if state.start is not None and state.start.buffers is not None else []
    outer = OuterRound(
        number=number,
        step=_step_of(state, live),
        weights={name: _tokens(state, name) for name in sorted(live)},
        participants=frozenset(state.live()),
        fragments=(*(FragmentRound() for _ in range(spec.fragments)), *buffers),
    )
    return with_(state, outer=outer)


def _step_of(state: RunState, live: set[str]) -> int:
    if state.has_rounds:
        return max(state.regions[name].step for name in live)
    return next_outer_step(state)


def _tokens(state: RunState, region: str) -> int:
    """Trained on since the last anchor (A12)."""
    if state.has_rounds:
        return state.regions[region].tokens
    arrivals = (state.members[site].arrived for site in state.live(region))
    return sum(arrival.tokens for arrival in arrivals if arrival is not None)
