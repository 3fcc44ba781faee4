"""Transitions of members: seats, ranks that end or catch up, agents that are lost and come back, sites that are added
and removed. Pure.
"""

from datetime import datetime

from api.errors import ConflictError, NotFoundError
from api.schemas import RunStatus
from coordinator.entrances import region_added
from coordinator.events import (
    CaughtUp,
    LayoutPresented,
    ProcessesGone,
    SeatTaken,
    SiteAdded,
    SiteBack,
    SiteLost,
    SiteRemoved,
)
from coordinator.failures import failed, repeated, slowed
from coordinator.opening import arrived_at
from coordinator.quorum import lost_region, remaining
from coordinator.records import Member, OuterRound, RunState
from coordinator.transitions import (
    Transition,
    asked_in,
    going_on,
    ranks_of,
    require_status,
    with_,
    with_member,
)
from coordinator.versions import with_version

__all__ = [
    "caught_up",
    "layout_presented",
    "processes_gone",
    "rejoining",
    "seat_taken",
    "site_added",
    "site_back",
    "site_lost",
    "site_removed",
]

NEAR = 4
"""Entries by which a site may be behind when it becomes active."""

_ALIVE = (RunStatus.STARTING, RunStatus.RUNNING, RunStatus.PAUSED)


def rejoining(state: RunState, site: str, *, attempt: int, seat: str | None = None) -> RunState:
    """The site's ranks are lost, and with them their copies in an open outer round: others will catch up.

    What they have answered to an open round stays: it was accepted, so it is listed (A1).
    """
    if state.outer is not None:
        state = with_(state, outer=_without(state.outer, site))
    member = state.members[site]
    again = Member(
        site=site,
        region=member.region,
        since=member.since,
        attempt=attempt,
        seat=seat,
        failures=member.failures,
        failure=member.failure,
        alike=member.alike,
        listed=member.listed,
        away=member.away,
        excluded=member.excluded,
    )
    return with_(state, members={**state.members, site: again})


def _without(outer: OuterRound, site: str) -> OuterRound:
    fragments = {
        number: fragment.model_copy(
            update={"copies": {who: fragment.copies[who] for who in fragment.copies if who != site}}
        )
        for number, fragment in outer.fragments.items()
    }
    return outer.model_copy(update={"participants": outer.participants - {site}, "fragments": fragments})


def _excluded(state: RunState, site: str, because: str) -> RunState:
    return with_member(rejoining(state, site, attempt=state.members[site].attempt), site, excluded=because)


# --- ranks ------------------------------------------------------------------------------------------------------------


def seat_taken(event: SeatTaken, state: RunState, now: datetime) -> Transition:
    """A second seat of an attempt means that the agent has lost the ranks of the first one."""
    member = ranks_of(state, event.site, event.attempt)
    require_status(state, *_ALIVE, to="start ranks")
    if event.seat == member.seat:
        return Transition(state)
    state = rejoining(state, event.site, attempt=event.attempt, seat=event.seat)
    return Transition(with_version(state, event.site, event.version))


def layout_presented(event: LayoutPresented, state: RunState, now: datetime) -> Transition:
    """The site's ranks are ready; the first layout is the run's."""
    ranks_of(state, event.site, event.attempt)
    require_status(state, *_ALIVE, to="join")
    if state.layout is not None and state.layout.digest != event.layout.digest:
        raise ConflictError(
            "layout_differs",
            f"the model at site {event.site} has layout {event.layout.digest[:12]}, the run's has "
            f"{state.layout.digest[:12]}: names, shapes, groups and chunk must be the same at all sites; "
            "compare the versions of the task's code and its parameters",
        )
    return Transition(with_(with_member(state, event.site, ready=True), layout=event.layout))


def caught_up(event: CaughtUp, state: RunState, now: datetime) -> Transition:
    """Near the head of the log a site becomes active; in an outer round only at it, if nobody else holds the copies.

    Near suffices because the open round waits for it from now on; to meet the head exactly it would have to be faster
    than the others are. Where regions have no rounds, the head is the last outer round; and nobody who waits for the
    next one already is made to wait for another site's way to it.
    """
    member = ranks_of(state, event.site, event.attempt)
    going_on(state, to="catch up")
    if not member.ready:
        raise ConflictError("no_layout", f"site {event.site} must present its layout before it reports an entry")
    head = state.regions[member.region].head
    assert head is not None
    if event.position.seq > head.seq or (event.position.seq == head.seq and event.position != head):
        raise ConflictError(
            "off_chain", f"entry {event.position.seq} of site {event.site} is not in the log of {member.region}"
        )
    outer = state.outer
    if head.seq - event.position.seq > (NEAR if state.open_to(member.region) and state.has_rounds else 0):
        return Transition(state)
    if outer is None and not state.has_rounds and arrived_at(state, state.outer_rounds + 1):
        return Transition(state)
    if outer is not None and event.site not in outer.participants:
        needed = not remaining(state) and member.region in outer.weights and event.position == head
        if not needed and not state.open_to(member.region):
            return Transition(state)
        if needed:
            outer = outer.model_copy(update={"participants": outer.participants | {event.site}})
            state = with_(state, outer=outer)
    return Transition(with_member(state, event.site, caught_up=True, late=None))


def processes_gone(event: ProcessesGone, state: RunState, now: datetime) -> Transition:
    """Ranks that fail are asked for again, as another attempt, but not more often than the spec allows."""
    member = state.members.get(event.site)
    if member is None or member.excluded or event.attempt != member.attempt:
        return Transition(state)
    if state.status is RunStatus.STOPPING:
        return Transition(with_member(state, event.site, gone=True))
    if state.status not in _ALIVE or event.exit_code is None or member.gone:
        return Transition(state)
    if event.exit_code == 0 and member.final is not None:
        return Transition(with_member(state, event.site, gone=True))
    fallen = failed(member, event, state)
    state = with_(state, members={**state.members, event.site: fallen})
    if fallen.failures > state.spec.rounds.restarts:
        return Transition(_excluded(state, event.site, fallen.failure))
    new = fallen.listed == 0 and (state.has_rounds or state.outer_rounds == 0)
    if new and fallen.failures > 1 and repeated(member, fallen):
        return Transition(_excluded(state, event.site, f"the same twice before its first step, {fallen.failure}"))
    return Transition(slowed(rejoining(state, event.site, attempt=member.attempt + 1), event.site, now))


# --- agents -----------------------------------------------------------------------------------------------------------


def site_lost(event: SiteLost, state: RunState, now: datetime) -> Transition:
    """Nobody waits for the site until it is heard again; what its ranks have, they keep.

    One of which nothing is wanted any more is not missed.
    """
    member = state.members.get(event.site)
    if member is None or member.away or state.status.terminal:
        return Transition(state)
    if member.final is not None and (state.spec.outer is not None or state.final_stored):
        return Transition(state)
    return Transition(with_member(state, event.site, away=event.because))


def site_back(event: SiteBack, state: RunState, now: datetime) -> Transition:
    """Waited for again if it has kept its ranks; or else others are about to take a seat, and to catch up."""
    member = state.members.get(event.site)
    if member is None or (not member.away and event.ranks) or state.status.terminal:
        return Transition(state)
    state = with_member(state, event.site, away="")
    if event.ranks or member.gone or member.final is not None:
        return Transition(state)
    if state.outer is not None:
        state = with_(state, outer=_without(state.outer, event.site))
    return Transition(with_member(state, event.site, caught_up=False, version=None, restart_at=None))


# --- administrators ---------------------------------------------------------------------------------------------------


def site_added(event: SiteAdded, state: RunState, now: datetime) -> Transition:
    """A new member, or one that was excluded, which gets its restarts anew; the first one of a region brings that."""
    asked_in(state, *_ALIVE, to="add a site")
    others = [one.site for one in state.members.values() if one.region == event.region and not one.excluded]
    if not state.has_rounds and set(others) - {event.site}:
        raise ConflictError(
            "region_taken",
            f"region {event.region} of run {state.id} is site {others[0]}: with exchange = none a region is one site",
        )
    known = state.members.get(event.site)
    if known is not None and not known.excluded:
        return Transition(state)
    done = Transition(state) if event.region in state.regions else _with_region(event, state)
    attempt = 1 if known is None else known.attempt + 1
    member = Member(site=event.site, region=event.region, since=now, attempt=attempt)
    return done.then(Transition(with_(done.state, members={**state.members, event.site: member})))


def _with_region(event: SiteAdded, state: RunState) -> Transition:
    if state.spec.outer is None:
        raise ConflictError(
            "no_such_region",
            f"site {event.site} is in region {event.region}; run {state.id} has {', '.join(state.regions)} only, which "
            "would never meet another one, since its spec has no `outer`: start the agent of the site with --region "
            f"{min(state.regions)}, or begin a run with `outer` where this one is: `isthmus run snapshot {state.id}`, "
            f"then `isthmus run start SPEC --from {state.id}/N`",
        )
    return region_added(state, event.region)


def site_removed(event: SiteRemoved, state: RunState, now: datetime) -> Transition:
    """The site is a member no more, until it is added again; not the last one without which the run would fail."""
    asked_in(state, *_ALIVE, to="remove a site")
    member = state.members.get(event.site)
    if member is None:
        raise NotFoundError("site_not_found", f"site {event.site!r} is not a member of run {state.id}")
    if member.excluded:
        return Transition(state)
    after = _excluded(state, event.site, event.because)
    if (lost := lost_region(after)) is not None:
        raise ConflictError(
            "last_site",
            f"site {event.site} is the last one of region {lost}, without which run {state.id} cannot go on: add "
            f"another of that region first (`isthmus run add-site {state.id} SITE`), or end the run (`isthmus run stop "
            f"{state.id}`)",
        )
    return Transition(after)
