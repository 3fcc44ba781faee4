"""Pure: the settings that an operator may change in a run that goes on (rule A21), as they are at a step."""

from collections.abc import Iterable

from api.schemas import Change, InForce, OptimizerSpec, RunSpec
from coordinator.records import RunState

__all__ = ["every_at", "in_force_at", "next_outer_step", "optimizer_at", "with_changes"]


def in_force_at(state: RunState, step: int) -> InForce:
    """With all changes from this step or an earlier one on; of two from the same step the later one counts."""
    return with_changes(state.spec, (change for change in state.changes if change.from_step <= step))


def with_changes(spec: RunSpec, changes: Iterable[Change]) -> InForce:
    settings = InForce(lr=spec.optimizer.lr, k=spec.optimizer.k, every=spec.outer.every if spec.outer else None)
    for change in changes:
        settings = settings.model_copy(update=change.settings())
    return settings


def optimizer_at(state: RunState, region: str, step: int) -> OptimizerSpec:
    """As far as the region's log says so: what is not in it yet its sites cannot follow."""
    told = state.changes[: state.regions[region].changes]
    settings = with_changes(state.spec, (change for change in told if change.from_step <= step))
    return state.spec.optimizer.model_copy(update={"lr": settings.lr, "k": settings.k})


def every_at(state: RunState, step: int) -> int | None:
    """Inner steps between outer steps; None without these."""
    return in_force_at(state, step).every


def next_outer_step(state: RunState) -> int:
    """The step that the next outer round to be opened follows, where settings change right behind outer rounds only."""
    every = every_at(state, state.outer_step + 1)
    assert every is not None
    return min((state.outer_step // every + 1) * every, state.spec.steps)
