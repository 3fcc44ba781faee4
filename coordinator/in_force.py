"""Pure: the settings that an operator may change in a run that goes on (rule A21), as they are at a step."""

from collections.abc import Iterable
from dataclasses import replace

from algorithms.schedule import OuterSchedule
from api.specs import Change, InForce, OptimizerSpec, RunSpec
from coordinator.records import RunState

__all__ = ["in_force_at", "optimizer_at", "outer_schedule", "with_changes"]


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
    if not told:
        return state.spec.optimizer
    settings = with_changes(state.spec, (change for change in told if change.from_step <= step))
    return state.spec.optimizer.model_copy(update={"lr": settings.lr, "k": settings.k})


def outer_schedule(state: RunState) -> OuterSchedule | None:
    """When which fragments outer-step, by the changes so far; None if they do not."""
    schedule = state.spec.outer_schedule
    if schedule is None:
        return None
    changes = ((change.from_step, change.every) for change in state.changes)
    return replace(schedule, changes=tuple((step, every) for step, every in changes if every is not None))
