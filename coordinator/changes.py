"""Transitions of settings: an operator changes them from a step on, and every log says so before that step. Pure."""

from datetime import datetime

from pydantic import ValidationError

from api.errors import ConflictError, InvalidError, faults_of
from api.schemas import RunStatus
from api.specs import Change, RunSpec
from coordinator.entries import change_header
from coordinator.events import ChangeRequested
from coordinator.in_force import in_force_at, outer_schedule, with_changes
from coordinator.records import Region, RunState
from coordinator.transitions import Transition, append, asked_in, with_, with_region

__all__ = ["MOST_CHANGES", "change_requested", "changed"]

MOST_CHANGES = 200
"""Of one run: all of them are in its state, which is written at every step."""


def change_requested(event: ChangeRequested, state: RunState, now: datetime) -> Transition:
    """Noted, once, for a step that is not open yet in any region."""
    change = event.change
    asked_in(state, RunStatus.RUNNING, RunStatus.PAUSED, to="change its settings")
    _require_sense(change, state.spec)
    before = in_force_at(state, change.from_step).model_dump()
    if change.settings().items() <= before.items():
        if change in state.changes:
            return Transition(state)
        known = ", ".join(f"{name} is {before[name]}" for name in change.settings())
        raise InvalidError("nothing_to_change", f"from step {change.from_step} on {known} anyway")
    first = _first_step(state)
    if change.from_step < first:
        raise ConflictError(
            "step_open",
            f"step {change.from_step} of run {state.id} is open or done: from_step must be at least {first}",
            context={"from_step": first},
        )
    if len(state.changes) >= MOST_CHANGES:
        raise ConflictError(
            "too_many_changes",
            f"run {state.id} has {MOST_CHANGES} changes of settings, and no run can have more: begin another run where "
            "this one is: `isthmus run snapshot`, then `isthmus run start SPEC --from RUN/N`",
        )
    changes = sorted((*state.changes, change), key=lambda one: one.from_step)
    after = with_(state, changes=tuple(changes))
    if not state.has_rounds:
        _require_outer_steps(after, first)
    return Transition(after)


def _first_step(state: RunState) -> int:
    """The first one that can have other settings; where sites train by themselves, behind the next anchors."""
    if state.has_rounds:
        return max(region.round.step if region.round else region.step for region in state.regions.values()) + 1
    schedule = outer_schedule(state)
    assert schedule is not None
    step = state.outer.step if state.outer is not None else schedule.following(state.outer_step)
    return schedule.applied_after(state.spec.steps if step is None else step) + 1


def _require_outer_steps(state: RunState, first: int) -> None:
    """Sites that train by themselves learn of changes from the log, with the anchors of an outer round."""
    schedule = outer_schedule(state)
    assert schedule is not None
    behind = schedule.delay + 1
    for change in state.changes:
        copied = change.from_step - behind
        if change.from_step > first and not schedule.has_turn(copied):
            before, after = schedule.turn_before(copied) + behind, schedule.turn_after(copied) + behind
            where = "an outer step" if schedule.delay == 0 else f"an outer step and its delay of {schedule.delay}"
            raise InvalidError(
                "not_behind_an_outer_step",
                f"settings change from step {change.from_step} on, but with exchange = none only right behind {where}: "
                f"with H = {schedule.every_at(copied)} before it make that {max(before, first)} or {after}",
            )


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
