"""Pure: what opens next, in each region and between them."""

from algorithms.schedule import outer_due
from coordinator.changes import changed
from coordinator.in_force import every_at
from coordinator.records import FragmentRound, OuterRound, Region, Round, RunState
from coordinator.transitions import Transition, with_, with_region

__all__ = ["left_behind", "opened", "outer_round_due"]


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
    for name, region in state.regions.items():
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
    return {name for name, region in state.regions.items() if outer_round_due(state, region.step)}


def outer_round_due(state: RunState, step: int) -> bool:
    """Whether the outer round after this step is due and has not been held."""
    return step > state.outer_step and outer_due(step, every_at(state, step), state.spec.steps)


def _outer_opened(state: RunState, live: set[str]) -> RunState:
    """Rounds of the other regions, which nobody has answered, end here: these regions go on from the anchors."""
    assert state.spec.outer is not None
    fragments = state.spec.outer.fragments
    for name in state.regions.keys() - live:
        state = with_region(state, name, round=None)
    outer = OuterRound(
        number=state.outer_rounds + 1,
        step=max(state.regions[name].step for name in live),
        weights={name: state.regions[name].tokens for name in sorted(live)},
        participants=frozenset(state.live()),
        fragments=tuple(FragmentRound() for _ in range(fragments)),
    )
    return with_(state, outer=outer)
