"""Transitions of snapshots: wanted, asked of a site, taken, registered (A18). Pure.

A run with outer steps takes them from its anchors, right behind an outer round. In any other run one site is asked, by
the answer to its next contribution. Nothing of a snapshot is used before its manifest, which is stored last, is
registered here.
"""

from datetime import datetime

from api.errors import ConflictError, NotFoundError
from api.message import PROTOCOL_VERSION
from api.payload import canonical_json
from api.schemas import Manifest, OuterManifest, Resume, RunStatus
from coordinator.events import SnapshotAsked, SnapshotRegistered, SnapshotRequested, SnapshotTaken
from coordinator.in_force import in_force_at
from coordinator.records import Contents, RunState, Snapshot, Wanted
from coordinator.transitions import Transition, asked_in, going_on, ranks_of, with_, with_region

__all__ = [
    "asked",
    "asks",
    "behind_outer_round",
    "manifest",
    "registered",
    "requested",
    "snapshot_of",
    "taken",
    "with_due",
]


def requested(event: SnapshotRequested, state: RunState, now: datetime) -> Transition:
    """One that is wanted already is the one."""
    asked_in(state, RunStatus.RUNNING, RunStatus.PAUSED, to="make a snapshot")
    return Transition(state if state.wanted is not None else _wanted(state))


def _wanted(state: RunState) -> RunState:
    number = state.last_snapshot + 1
    return with_(state, wanted=Wanted(number=number), last_snapshot=number)


def with_due(state: RunState) -> RunState:
    """Wants a snapshot if it is time for one. If the one before is still in the making, another site may be asked."""
    if state.spec.outer is not None or not _is_due(state, state.step):
        return state
    state = with_(state, last_snapshot_step=state.step)
    if state.wanted is None:
        return _wanted(state)
    if state.wanted.contents is not None:
        return state
    return with_(state, wanted=Wanted(number=state.wanted.number))


def _is_due(state: RunState, step: int) -> bool:
    every = state.spec.snapshots.every
    return every is not None and step // every > state.last_snapshot_step // every


# --- in a run with outer steps ----------------------------------------------------------------------------------------


def behind_outer_round(state: RunState, step: int) -> RunState:
    """The contents of a snapshot that is wanted, or due, after an outer round of all fragments.

    One that still waits for its manifest stays what it is. A region apart has no place in it: its log does not lead to
    the anchors.
    """
    if _is_due(state, step):
        state = with_(state if state.wanted is not None else _wanted(state), last_snapshot_step=step)
    if state.wanted is None or state.wanted.contents is not None:
        return state
    contents = Contents(
        step=step,
        positions={
            name: region.head
            for name, region in state.regions.items()
            if region.head is not None and not (state.has_rounds and region.apart)
        },
        parameters=tuple(anchor for anchor in state.anchors if anchor is not None),
        buffers=state.buffers,
        rounds=state.outer_rounds,
        momenta=state.momenta,
    )
    return with_(state, wanted=state.wanted.model_copy(update={"contents": contents}))


# --- in a run without outer steps -------------------------------------------------------------------------------------


def asks(state: RunState, site: str, step: int) -> int | None:
    """The number of the snapshot for which the site is asked by the answer to its contribution to this step.

    It is the one that was asked already, or the first one to come, if there is none whose ranks are still there.
    """
    wanted, member = state.wanted, state.members.get(site)
    if wanted is None or wanted.contents is not None or state.spec.outer is not None or member is None:
        return None
    if not member.live or step != state.regions[member.region].step:
        return None
    other = state.members.get(wanted.site)
    if other is not None and other.live and other.seat == wanted.seat and other.site != site:
        return None
    return wanted.number


def asked(event: SnapshotAsked, state: RunState, now: datetime) -> Transition:
    member = ranks_of(state, event.site, event.attempt)
    if not state.going_on or state.wanted is None or asks(state, event.site, state.regions[member.region].step) is None:
        return Transition(state)
    return Transition(with_(state, wanted=Wanted(number=state.wanted.number, site=event.site, seat=member.seat)))


def taken(event: SnapshotTaken, state: RunState, now: datetime) -> Transition:
    """The first site that has stored the contents gives them."""
    member = ranks_of(state, event.site, event.attempt)
    if event.number <= state.last_snapshot and (state.wanted is None or state.wanted.number != event.number):
        return Transition(state)
    going_on(state, to="take a snapshot")
    if state.wanted is None or state.wanted.number != event.number or state.spec.outer is not None:
        raise ConflictError("no_snapshot_wanted", f"run {state.id} wants no snapshot {event.number} of its sites")
    if state.wanted.contents is not None:
        return Transition(state)
    contents = Contents(
        step=event.upload.step,
        positions={member.region: event.upload.position},
        parameters=(event.upload.parameters,),
        buffers=event.upload.buffers,
    )
    return Transition(with_(state, wanted=state.wanted.model_copy(update={"contents": contents})))


# --- the manifest -----------------------------------------------------------------------------------------------------


def manifest(state: RunState) -> bytes:
    """Of the snapshot whose contents are there; the same bytes whenever it is written."""
    assert state.wanted is not None
    assert state.wanted.contents is not None
    assert state.layout is not None
    contents, outer = state.wanted.contents, None
    if contents.rounds is not None:
        anchors, momenta = list(contents.parameters), list(contents.momenta)
        outer = OuterManifest(rounds=contents.rounds, anchors=anchors, momenta=momenta)
    written = Manifest(
        version=PROTOCOL_VERSION,
        run=state.id,
        number=state.wanted.number,
        step=contents.step,
        layout={"digest": state.layout.digest, "blob": state.layout.blob},
        positions=contents.positions,
        parameters=list(contents.parameters),
        buffers=contents.buffers,
        outer=outer,
        spec=state.spec,
    )
    return canonical_json(written.model_dump(mode="json")).encode()


def registered(event: SnapshotRegistered, state: RunState, now: datetime) -> Transition:
    """From now on it is used; the log may be entered there. The oldest go that are more than are kept."""
    wanted = state.wanted
    if wanted is None or wanted.contents is None or wanted.number != event.number or not state.going_on:
        return Transition(state)
    contents = wanted.contents
    made = Snapshot(number=event.number, manifest=event.manifest, contents=contents)
    kept = (*state.snapshots, made)[-state.spec.snapshots.keep :]
    for name, position in contents.positions.items():
        resume = state.regions[name].resume
        if resume is None or resume.position.seq < position.seq:
            entrance = Resume(
                outer_round=state.outer_rounds,
                in_force=in_force_at(state, contents.step),
                position=position,
                step=contents.step,
                anchors=list(contents.parameters),
                buffers=contents.buffers,
            )
            state = with_region(state, name, resume=entrance)
    return Transition(with_(state, snapshots=kept, wanted=None))


def snapshot_of(state: RunState, number: int | None) -> Snapshot:
    """The newest one, without a number.

    Raises:
        NotFoundError: it is not there.
    """
    there = {snapshot.number: snapshot for snapshot in state.snapshots}
    if number is None and there:
        return state.snapshots[-1]
    if number is None or number not in there:
        listed = ", ".join(map(str, there)) or "none; `isthmus run snapshot` makes one"
        which = "snapshot" if number is None else f"snapshot {number}"
        raise NotFoundError("snapshot_not_found", f"run {state.id} has no {which}; its snapshots: {listed}")
    return there[number]
