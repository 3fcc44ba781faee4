"""Pure: how a run looks from outside."""

from collections import Counter
from datetime import datetime

from api import schemas
from coordinator.in_force import in_force_at
from coordinator.records import Member, RunState
from coordinator.waiting import reason_of, waiting_for

__all__ = ["run_view"]


def run_view(state: RunState, now: datetime) -> schemas.Run:
    return schemas.Run(
        id=state.id,
        spec=state.spec,
        status=state.status,
        reason=waiting_for(state),
        paused_because=state.paused_because,
        since=state.since,
        created_at=state.created_at,
        started_at=state.started_at,
        lasted_s=_lasted_s(state, now),
        step=state.steps_done,
        outer_rounds=state.outer_rounds,
        members=[_member_view(member, state) for member in state.members.values()],
        regions=[
            schemas.RegionView(
                name=region.name,
                step=region.step,
                head=region.head,
                tokens=region.tokens,
                came_later=region.came_later,
            )
            for region in state.regions.values()
        ],
        alarms=list(state.alarms),
        changes=list(state.changes),
        in_force=in_force_at(state, min(state.steps_done + 1, state.spec.steps)),
        warnings=_warnings(state),
    )


def _lasted_s(state: RunState, now: datetime) -> float:
    if state.started_at is None:
        return 0.0
    until = state.since if state.status.terminal else max(now, state.since)
    return round((until - state.started_at).total_seconds(), 3)


def _warnings(state: RunState) -> list[str]:
    """Regions of one site are rounds of one (A20)."""
    if not state.has_rounds:
        return []
    members = [member for member in state.members.values() if not member.excluded]
    alone = sorted(region for region, count in Counter(member.region for member in members).items() if count == 1)
    instead = "" if state.spec.outer is None else ", or `exchange: none` trains it by itself between outer rounds"
    return [
        f"region {region} has one site: it exchanges with nobody, and moves at every step by the few coefficients that "
        f"it sends itself; put more sites in it{instead}"
        for region in alone
    ]


def _member_view(member: Member, state: RunState) -> schemas.MemberView:
    return schemas.MemberView(
        site=member.site,
        region=member.region,
        attempt=member.attempt,
        ready=member.ready,
        condition=member.condition,
        since=member.since,
        reason=reason_of(member, state),
        digest=member.final,
        version=member.version or "",
    )
