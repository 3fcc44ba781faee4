"""What refers to blobs: a run's state, and the entries of its logs. What is named here is kept. Pure.

Whatever else comes to refer to blobs, is to be named here, too; and whoever makes something refer to a blob, has to ask
`KeptBlobs.stays` right before, or to write the blob by `KeptBlobs`.
"""

import re

from coordinator.entries import Header
from coordinator.records import Contents, RunState

__all__ = ["blobs_of", "blobs_of_contents", "blobs_of_entry", "named_in"]

_DIGEST = re.compile(r'"([0-9a-f]{64})"')


def blobs_of(state: RunState) -> set[str]:
    """Digests of the blobs to which a state refers; those that another one does not refer to any more may go."""
    found = {*state.anchors, *state.momenta, state.buffers}
    if state.layout is not None:
        found.add(state.layout.blob)
    if state.start is not None:
        found |= {state.start.parameters, state.start.buffers}
    if state.outer is not None:
        for fragment in state.outer.fragments.values():
            found |= {fragment.anchor, fragment.before, *fragment.copies.values(), *fragment.stored}
            found |= {upload for encoded in fragment.encoded.values() for upload in encoded.values()}
            found |= {upload for share in fragment.shares for upload in share.uploads}
    for region in state.regions.values():
        found |= {*region.resume.anchors, region.resume.buffers} if region.resume is not None else set()
    found |= {member.final for member in state.members.values()}
    if state.origin is not None:
        origin = state.origin
        found |= {origin.file, origin.layout, *origin.parameters, origin.buffers, *origin.momenta}
    for snapshot in state.snapshots:
        found |= {snapshot.manifest, *blobs_of_contents(snapshot.contents)}
    if state.wanted is not None and state.wanted.contents is not None:
        found |= blobs_of_contents(state.wanted.contents)
    return {digest for digest in found if digest is not None}


def blobs_of_contents(contents: Contents) -> set[str]:
    """Digests of the blobs of a snapshot, but for its manifest and the layout."""
    found = {*contents.parameters, contents.buffers, *contents.momenta}
    return {digest for digest in found if digest is not None}


def blobs_of_entry(header: Header) -> set[str]:
    """Digests of the blobs that an entry names; its messages are another matter."""
    fields = {"start": ("parameters", "buffers"), "anchor": ("digest", "before")}.get(header["kind"], ())
    uploads = {upload for line in header.get("participants", ()) for upload in line.get("uploads", ())}
    return uploads | {header[field] for field in fields if header.get(field) is not None}


def named_in(state: str) -> set[str]:
    """Every digest in the text of a state, which may be of another release: more than `blobs_of` at most."""
    return set(_DIGEST.findall(state))
