"""Pure: what opens next, in each region and between them."""

from algorithms.schedule import outer_due
from coordinator.records import FragmentRound, OuterRound, Round, RunState
from coordinator.transitions import with_, with_region

__all__ = ["opened", "outer_round_due"]


def opened(state: RunState) -> RunState:
    """Opens what comes next wherever nothing is open. Regions without a live member do not hold up an outer round."""
    if state.outer is not None:
        return state
    live = {name for name in state.regions if state.live(name)}
    due = {name for name, region in state.regions.items() if outer_round_due(state, region.step)}
    if live and live <= due:
        return _outer_opened(state, live)
    for name, region in state.regions.items():
        if region.round is None and name not in due and region.step < state.spec.steps:
            state = with_region(state, name, round=Round(step=region.step + 1))
    return state


def outer_round_due(state: RunState, step: int) -> bool:
    """Whether the outer round after this step is due and has not been held."""
    if state.spec.outer is None:
        return False
    every, steps = state.spec.outer.every, state.spec.steps
    last = min(state.outer_rounds * every, steps)
    return step > last and outer_due(step, every, steps)


def _outer_opened(state: RunState, live: set[str]) -> RunState:
    """Rounds of the other regions end here, without an entry: these regions go on from the anchors."""
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
