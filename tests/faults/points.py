"""The points of outer rounds and of snapshots at which something is killed, in the coordinator and in ranks."""

from collections.abc import Callable

from coordinator.records import RunState
from tests.faults.traps import Call, Point, called_by

__all__ = ["IN_COORDINATOR", "IN_RANK", "OF_OUTER_ROUNDS", "OF_REMOVAL", "OF_SNAPSHOTS"]

COMMIT = "coordinator.store:Store.commit"
KEEP = "coordinator.kept_blobs:KeptBlobs.keep"


def _commits(changes: Callable[[RunState, RunState], bool]) -> Callable[[Call], bool]:
    return lambda call: changes(call.args[1].state, call.args[2].state)


def _around(what: str, changes: Callable[[RunState, RunState], bool]) -> list[Point]:
    holds = _commits(changes)
    return [
        Point(f"{what}: before the commit", COMMIT, "before", holds),
        Point(f"{what}: committed, nobody told", COMMIT, "after", holds),
    ]


def _copies(state: RunState) -> int:
    return sum(len(fragment.copies) for fragment in state.outer.fragments.values()) if state.outer else 0


def _stored(state: RunState) -> int:
    return sum(len(fragment.stored) for fragment in state.outer.fragments.values()) if state.outer else 0


def _is_upload(call: Call) -> bool:
    return call.args[1]._path.parent.name == "uploads"


def _is_manifest(call: Call) -> bool:
    return bytes(call.args[1]).startswith(b'{"buffers"')


def _contents(state: RunState) -> bool:
    return state.wanted is not None and state.wanted.contents is not None


def _begins(place: int) -> Callable[[Call], bool]:
    """The first of several pieces; `place`: of the offset among the arguments."""
    return lambda call: call.args[place] == 0


# --- outer rounds -----------------------------------------------------------------------------------------------------

_OUTER_IN_COORDINATOR = [
    *_around("an outer round opens", lambda before, after: before.outer is None and after.outer is not None),
    *_around("a copy is announced", lambda before, after: _copies(after) > _copies(before)),
    Point("half a copy has arrived", "coordinator.drafts:Upload.append", "after", _begins(1)),
    Point("a copy has arrived, is not stored", KEEP, "before", _is_upload),
    Point("a copy is stored, its site does not know", KEEP, "after", _is_upload),
    *_around("a copy is said to be stored", lambda before, after: _stored(after) > _stored(before)),
    Point("an outer step is computed into drafts", "coordinator.outer_rounds:outer_update", "after"),
    Point(
        "one draft is written, the other is not",
        "coordinator.drafts:Draft.write",
        "after",
        lambda _: called_by("outer_step"),
    ),
    Point("both drafts are whole, none is stored", "coordinator.engine:outer_step", "after"),
    Point("the anchor is stored, its momentum is not", KEEP, "after", lambda _: called_by("_average")),
    *_around("an anchor", lambda before, after: after.anchors != before.anchors),
    *_around("the mean of the buffers", lambda before, after: after.buffers != before.buffers),
    *_around("the last anchor", lambda before, after: after.outer_rounds > before.outer_rounds),
    Point("a site asks for an anchor", "coordinator.blob_directory:BlobDirectory.open", "before"),
]

_OUTER_IN_RANK = [
    Point("a copy is hashed, not announced", "api.client:CoordinatorClient.announce", "before"),
    Point(
        "a site is asked for its copy",
        "api.client:CoordinatorClient.announce",
        "after",
        lambda call: call.result.upload,
    ),
    Point("half a copy is sent", "api.transfers:_append", "after", _begins(3)),
    Point("a copy is sent, not said to be", "api.client:CoordinatorClient.put_blob", "after"),
    Point(
        "an anchor is named, not fetched",
        "api.client:CoordinatorClient.log",
        "after",
        lambda call: any(header["kind"] == "anchor" for header in call.result.items),
    ),
    Point("an anchor is on its way to a site", "api.transfers:_size", "after"),
    Point("an anchor is fetched, not taken", "api.client:CoordinatorClient.copy_blob", "after"),
    Point(
        "half an anchor is taken",
        "algorithms.flat:FlatParameters.write_parameters",
        "after",
        lambda _: called_by("apply_anchor"),
    ),
    Point(
        "one of several anchors is taken",
        "site_agent.replica:Replica.apply_anchor",
        "after",
        lambda call: call.args[1]["fragment"] == 0,
    ),
    Point(
        "all anchors are taken",
        "site_agent.replica:Replica.apply_anchor",
        "after",
        lambda call: not call.args[0].outer.missing,
    ),
    Point("the first step behind an outer round", "api.client:CoordinatorClient.contribute", "before"),
]

# --- snapshots --------------------------------------------------------------------------------------------------------

_MANIFEST = [
    Point("half a manifest is written", "coordinator.drafts:Draft.write", "halfway", _is_manifest),
    Point("a manifest is written, not stored", KEEP, "before", lambda _: called_by("_worked")),
    *_around("a manifest is registered", lambda before, after: after.snapshots != before.snapshots),
]


_SNAPSHOT_IN_COORDINATOR = [
    *_around("a snapshot is wanted", lambda before, after: before.wanted is None and after.wanted is not None),
    *_around(
        "a site is asked",
        lambda before, after: after.wanted is not None and after.wanted.site != (before.wanted or after.wanted).site,
    ),
    Point("half the parameters have arrived", "coordinator.drafts:Upload.append", "after", _begins(1)),
    Point("the parameters have arrived, are not stored", KEEP, "before", _is_upload),
    Point("the parameters are stored, their site does not know", KEEP, "after", _is_upload),
    *_around("the contents are reported", lambda before, after: _contents(after) and not _contents(before)),
    *_MANIFEST,
]

_SNAPSHOT_IN_RANK = [
    Point("a site has been asked, has written nothing", "site_agent.snapshots:write_parameters", "before"),
    Point(
        "half the file is written",
        "algorithms.demo:DeMo._flat",
        "before",
        lambda call: call.args[1] > 0 and called_by("blocks") and called_by("take"),
    ),
    Point("the file is written, nothing is sent", "site_agent.snapshots:write_parameters", "after"),
    Point("half the parameters are sent", "api.transfers:_append", "after", _begins(3)),
    Point("the parameters are sent, the buffers are not", "api.client:CoordinatorClient.put_blob", "after"),
    Point("all is sent, nothing is reported", "api.client:CoordinatorClient.take_snapshot", "before"),
    Point("the contents are reported, the site goes on", "api.client:CoordinatorClient.take_snapshot", "after"),
]


OF_REMOVAL = [
    Point(
        "blobs are about to be removed", "coordinator.garbage:Garbage.claim", "after", lambda call: bool(call.result)
    ),
    Point("a blob is about to be removed", "coordinator.blob_directory:BlobDirectory.remove", "before"),
    Point("a blob is removed, still in the list", "coordinator.blob_directory:BlobDirectory.remove", "after"),
    Point("a segment is stored, not registered", "coordinator.log_store:LogStore.register", "before"),
    Point("a segment is registered", "coordinator.log_store:LogStore.register", "after"),
    Point("a segment is about to be dropped", "coordinator.log_store:LogStore.drop", "before"),
    Point("a segment is dropped", "coordinator.log_store:LogStore.drop", "after"),
]
"""While older snapshots and entries go, of which nothing is kept."""

IN_RANK = [*_OUTER_IN_RANK, *_SNAPSHOT_IN_RANK]
IN_COORDINATOR = [*_OUTER_IN_COORDINATOR, *_SNAPSHOT_IN_COORDINATOR, *OF_REMOVAL]
OF_OUTER_ROUNDS = [*_OUTER_IN_COORDINATOR, *_OUTER_IN_RANK, *_MANIFEST]
OF_SNAPSHOTS = [*_SNAPSHOT_IN_COORDINATOR, *_SNAPSHOT_IN_RANK]
