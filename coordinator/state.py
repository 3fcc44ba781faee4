"""The state machine of a run.

`transition(state, event, now)` is pure and total: no I/O, time is an argument. An event that makes no sense now raises
a `ProblemError` and changes nothing; one that was already taken in changes nothing. `pending(state)` names the work
that is left, so that any process at any time can do it; doing it twice is harmless: the first commit wins (A4).
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from api.schemas import RunStatus
from coordinator import lifecycle, outer_events, records, round_events
from coordinator.outer_events import region_copies
from coordinator.quorum import all_announced
from coordinator.records import Event, RunState
from coordinator.transitions import Transition

__all__ = ["TRANSITIONS", "AggregateRound", "AverageFragment", "Job", "pending", "transition"]

TRANSITIONS: dict[type, Callable[[Any, RunState, datetime], Transition]] = {
    records.StartRequested: lifecycle.start_requested,
    records.StopRequested: lifecycle.stop_requested,
    records.SeatTaken: lifecycle.seat_taken,
    records.LayoutPresented: lifecycle.layout_presented,
    records.StartUploaded: lifecycle.start_uploaded,
    records.Contributed: round_events.contributed,
    records.Abstained: round_events.abstained,
    records.Aggregated: round_events.aggregated,
    records.Announced: outer_events.announced,
    records.Averaged: outer_events.averaged,
    records.FinalReported: lifecycle.final_reported,
    records.ProcessesGone: lifecycle.processes_gone,
    records.SiteLost: lifecycle.site_lost,
    records.WorkFailed: lifecycle.work_failed,
}


def transition(state: RunState, event: Event, now: datetime) -> Transition:
    """The state after `event`.

    Raises:
        ForbiddenError: the site is not a member.
        ConflictError: not possible now; the detail says what is.
        GoneError: the run has ended.
    """
    return TRANSITIONS[type(event)](event, state, now)


@dataclass(frozen=True)
class AggregateRound:
    region: str
    step: int


@dataclass(frozen=True)
class AverageFragment:
    number: int
    fragment: int


Job = AggregateRound | AverageFragment


def pending(state: RunState) -> list[Job]:
    """What any process may do now to move the run on."""
    if state.status is not RunStatus.RUNNING:
        return []
    jobs: list[Job] = [
        AggregateRound(region.name, region.round.step)
        for region in state.regions.values()
        if region.round is not None and region.round.frozen
    ]
    if state.outer is not None:
        for index, fragment in enumerate(state.outer.fragments):
            if fragment.anchor is None and all_announced(fragment, state):
                needed = set(region_copies(state, fragment).values())
                if needed <= fragment.stored:
                    jobs.append(AverageFragment(state.outer.number, index))
    return jobs
