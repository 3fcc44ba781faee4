"""Where logs may be entered behind outer rounds; and how the log of a region begins that comes to a run. Pure."""

from api.schemas import Resume
from coordinator.changes import changed
from coordinator.entries import anchor_taken_header, start_header
from coordinator.in_force import in_force_at, outer_schedule
from coordinator.records import Region, RunState
from coordinator.transitions import Transition, append, with_, with_region

__all__ = ["are_all_parameters", "region_added", "with_entrances"]


def are_all_parameters(state: RunState) -> bool:
    """Whether whoever has applied a log behind the last outer round holds its anchors and nothing else, unless apart.

    Where no log tells of steps the newest anchors are all that there is.
    """
    if not state.has_rounds:
        return None not in state.anchors
    schedule = outer_schedule(state)
    assert schedule is not None
    return len(schedule.due(state.outer_step)) == len(state.anchors) and _anchors_step(state) == state.outer_step


def with_entrances(state: RunState) -> RunState:
    """Behind the last outer round, whose anchors are all parameters, every log may be entered.

    A region apart keeps the entrance before: whoever enters it is to hold what its sites hold.
    """
    for name, region in state.regions.items():
        if not (state.has_rounds and region.apart):
            state = with_region(state, name, resume=_resume(state, region))
    return state


def _resume(state: RunState, region: Region) -> Resume:
    assert region.head is not None
    step = _anchors_step(state)
    return Resume(
        position=region.head,
        step=step,
        outer_round=state.outer_rounds,
        outer_step=state.outer_step,
        in_force=in_force_at(state, step),
        anchors=[anchor for anchor in state.anchors if anchor is not None],
        buffers=state.buffers,
    )


def _anchors_step(state: RunState) -> int:
    """After which the anchors of the last complete outer round are applied; 0 before the first one."""
    schedule = outer_schedule(state)
    assert schedule is not None
    return schedule.applied_after(state.outer_step) if state.outer_rounds else 0


# --- a region that comes ----------------------------------------------------------------------------------------------


def region_added(state: RunState, name: str) -> Transition:
    """Its log begins as if the last complete outer round had taken it along; the one that is open will.

    Before entry 0 is in any log it is one of the regions that the run begins with.
    """
    region = Region(name=name, came_later=state.going_on)
    state = with_(state, regions=dict(sorted({**state.regions, name: region}.items())))
    if not state.going_on:
        return Transition(state)
    done = append(state, region, start_header(state, region))
    for fragment, anchor in _anchors(state).items():
        region = done.state.regions[name].model_copy(update={"step": _anchors_step(state)})
        done = done.then(append(done.state, region, anchor_taken_header(state, region, fragment, anchor)))
    if state.outer is not None:
        outer = state.outer.model_copy(update={"following": state.outer.following | {name}})
        return done.then(Transition(with_(done.state, outer=outer)))
    return done.then(_behind_outer_round(done.state, name))


def _behind_outer_round(state: RunState, name: str) -> Transition:
    """What an outer round would have left in the region at its end."""
    if are_all_parameters(state):
        state = with_region(state, name, resume=_resume(state, state.regions[name]))
    if state.has_rounds:
        return Transition(state)
    return changed(state, state.regions[name], _anchors_step(state) + 1)


def _anchors(state: RunState) -> dict[int, str]:
    """Of all fragments that have one behind the last complete outer round; of buffers, if it is still known.

    Where the outer round that is open has replaced the first anchor of one of several, entry 0 was `before` it.
    """
    if not state.outer_rounds:
        return {}
    assert state.start is not None
    anchors: dict[int, str | None] = dict(enumerate((*state.anchors, state.buffers)))
    for number, fragment in state.outer.fragments.items() if state.outer is not None else ():
        if fragment.anchor is not None:
            first = len(state.anchors) > 1 and fragment.before == state.start.parameters
            anchors[number] = None if first else fragment.before
    return {number: anchor for number, anchor in anchors.items() if anchor is not None}
