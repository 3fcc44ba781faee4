"""Transitions of settings: an operator changes them from a step on, and every log says so before that step. Pure."""

from datetime import datetime

from pydantic import ValidationError

from api.errors import ConflictError, InvalidError, faults_of
from api.schemas import Change, RunSpec
from coordinator.entries import change_header
from coordinator.events import ChangeRequested
from coordinator.in_force import in_force_at, with_changes
from coordinator.records import Region, RunState
from coordinator.transitions import Transition, append, going_on, with_, with_region

__all__ = ["MOST_CHANGES", "change_requested", "changed"]

MOST_CHANGES = 200
"""Of one run: all of them are in its state, which is written at every step."""


def change_requested(event: ChangeRequested, state: RunState, now: datetime) -> Transition:
    """Noted, once, for a step that is not open yet in any region."""
    change = event.change
    going_on(state, to="change its settings")
    if not state.has_rounds:
        raise ConflictError(
            "no_rounds",
            f"run {state.id} has exchange = none: its sites train by themselves and cannot be told of a change; begin "
            "another run where this one is: `isthmus run snapshot`, then `isthmus run start SPEC --from RUN/N`",
        )
    _require_sense(change, state.spec)
    before = in_force_at(state, change.from_step).model_dump()
    if change.settings().items() <= before.items():
        if change in state.changes:
            return Transition(state)
        known = ", ".join(f"{name} is {before[name]}" for name in change.settings())
        raise InvalidError("nothing_to_change", f"from step {change.from_step} on {known} anyway")
    newest = max(region.round.step if region.round else region.step for region in state.regions.values())
    if change.from_step <= newest:
        raise ConflictError(
            "step_open",
            f"step {change.from_step} of run {state.id} is open or done: from_step must be at least {newest + 1}",
            context={"from_step": newest + 1},
        )
    if len(state.changes) >= MOST_CHANGES:
        raise ConflictError(
            "too_many_changes",
            f"run {state.id} has {MOST_CHANGES} changes of settings, and no run can have more: begin another run where "
            "this one is: `isthmus run snapshot`, then `isthmus run start SPEC --from RUN/N`",
        )
    changes = sorted((*state.changes, change), key=lambda one: one.from_step)
    return Transition(with_(state, changes=tuple(changes)))


def _require_sense(change: Change, spec: RunSpec) -> None:
    if not change.settings():
        raise InvalidError("nothing_to_change", "a change names at least one of lr, k and every")
    if change.from_step > spec.steps:
        raise InvalidError("no_such_step", f"from_step = {change.from_step}: the run has {spec.steps} steps")
    if change.every is not None and spec.outer is None:
        raise InvalidError("no_outer_steps", f"every = {change.every}: the run's spec has no `outer`")
    changed = spec.model_dump()
    changed["optimizer"] |= {name: value for name, value in change.settings().items() if name != "every"}
    if change.every is not None:
        changed["outer"] |= {"every": change.every}
    try:
        RunSpec.model_validate(changed)
    except ValidationError as error:
        faults = faults_of(error.errors())
        raise InvalidError("bad_change", "; ".join(faults), errors=faults) from None


def changed(state: RunState, region: Region, step: int) -> Transition:
    """The entries of all changes up to this step that the region's log does not have yet."""
    done = Transition(state)
    for count, change in enumerate(state.changes[: _due(state, step)][region.changes :], region.changes + 1):
        region = done.state.regions[region.name]
        header = change_header(region, change.from_step, with_changes(state.spec, state.changes[:count]))
        done = done.then(append(done.state, region, header))
        done = done.then(Transition(with_region(done.state, region.name, changes=count)))
    return done


def _due(state: RunState, step: int) -> int:
    return sum(change.from_step <= step for change in state.changes)
