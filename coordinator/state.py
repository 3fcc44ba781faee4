"""The state machine of a run.

`transition(state, event, now)` is pure and total: no I/O, time is an argument. An event that makes no sense now raises
a `ProblemError` and changes nothing; one that was already taken in changes nothing. Every event is an occasion to do
what has become due since the last one; `due_at(state)` says when `Ticked` is the occasion at the latest.
`pending(state)` names the work that is left, so that any process at any time can do it; doing it twice is harmless:
the first commit wins (A4).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from api.schemas import RunStatus
from coordinator import changes, events, lifecycle, membership, outer_events, round_events, settling, snapshots
from coordinator.events import Event
from coordinator.quorum import all_announced, region_copies
from coordinator.records import RunState
from coordinator.settling import due_at
from coordinator.transitions import Transition, with_member

__all__ = [
    "TRANSITIONS",
    "AggregateRound",
    "AverageFragment",
    "Job",
    "MakeStart",
    "WriteManifest",
    "due_at",
    "pending",
    "transition",
]

TRANSITIONS: dict[type, Callable[[Any, RunState, datetime], Transition]] = {
    events.StartRequested: lifecycle.start_requested,
    events.StopRequested: lifecycle.stop_requested,
    events.PauseRequested: lifecycle.pause_requested,
    events.ResumeRequested: lifecycle.resume_requested,
    events.ChangeRequested: changes.change_requested,
    events.SnapshotRequested: snapshots.requested,
    events.SiteAdded: membership.site_added,
    events.SiteRemoved: membership.site_removed,
    events.SeatTaken: membership.seat_taken,
    events.ProcessesGone: membership.processes_gone,
    events.SiteLost: membership.site_lost,
    events.SiteBack: membership.site_back,
    events.LayoutPresented: membership.layout_presented,
    events.StartUploaded: lifecycle.start_uploaded,
    events.CaughtUp: membership.caught_up,
    events.Contributed: round_events.contributed,
    events.Abstained: round_events.abstained,
    events.Refused: round_events.refused,
    events.AnsweredLate: round_events.answered_late,
    events.Arrived: outer_events.arrived,
    events.Announced: outer_events.announced,
    events.FinalReported: lifecycle.final_reported,
    events.StartMade: lifecycle.start_made,
    events.SnapshotTaken: snapshots.taken,
    events.SnapshotAsked: snapshots.asked,
    events.SnapshotRegistered: snapshots.registered,
    events.Aggregated: round_events.aggregated,
    events.Averaged: outer_events.averaged,
    events.WorkFailed: lifecycle.work_failed,
    events.GuardTripped: lifecycle.guard_tripped,
    events.StorageFull: lifecycle.storage_full,
    events.HeldBack: lifecycle.held_back,
    events.Ticked: settling.ticked,
}


def transition(state: RunState, event: Event, now: datetime) -> Transition:
    """The state after `event`.

    Raises:
        ForbiddenError: the site is not a member, or is excluded.
        NotFoundError: there is no such site to remove.
        ConflictError: not possible now; the detail says what is.
        GoneError: the run has ended, or the round is closed.
    """
    done = settling.settled(TRANSITIONS[type(event)](event, state, now), now)
    return replace(done, state=_stamped(state, done.state, now))


def _stamped(before: RunState, after: RunState, now: datetime) -> RunState:
    """Members know since when they are in their condition."""
    for site, member in after.members.items():
        if site in before.members and before.members[site].condition is not member.condition:
            after = with_member(after, site, since=now)
    return after


@dataclass(frozen=True)
class AggregateRound:
    region: str
    step: int


@dataclass(frozen=True)
class AverageFragment:
    number: int
    fragment: int


@dataclass(frozen=True)
class WriteManifest:
    number: int


@dataclass(frozen=True)
class MakeStart:
    pass


Job = AggregateRound | AverageFragment | WriteManifest | MakeStart


def pending(state: RunState) -> list[Job]:
    """What any process may do now to move the run on."""
    if state.status is RunStatus.STARTING and state.layout is not None:
        return [MakeStart()] if state.origin is not None and state.start is None else []
    if not state.going_on or state.storage_full:
        return []
    jobs: list[Job] = [
        AggregateRound(region.name, region.round.step)
        for region in state.regions.values()
        if region.round is not None and region.round.frozen
    ]
    if state.outer is not None:
        for index, fragment in state.outer.fragments.items():
            if fragment.anchor is None and all_announced(fragment, state):
                needed = region_copies(state, fragment).items()
                if all(fragment.upload(region, copy) for region, copies in needed for copy in copies):
                    jobs.append(AverageFragment(state.outer.number, index))
    if state.wanted is not None and state.wanted.contents is not None:
        jobs.append(WriteManifest(state.wanted.number))
    return jobs
