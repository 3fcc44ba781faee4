"""Every digest in a state is known to be that of a blob, or not to be."""

import hashlib
import re
from datetime import UTC, datetime

from api.schemas import Position, Resume, RunStatus
from api.specs import Change, InForce, OuterSpec, RunSpec
from coordinator.records import (
    Contents,
    FragmentRound,
    Layout,
    Member,
    Origin,
    OuterRound,
    Region,
    Round,
    RunState,
    Sent,
    Share,
    Snapshot,
    Start,
    Wanted,
)
from coordinator.references import blobs_of, blobs_of_entry, named_in

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def name(text):
    return hashlib.sha256(text.encode()).hexdigest()


def blob(text):
    return name(f"blob {text}")


def position(text):
    return Position(seq=3, hash=name(text))


def contents(which):
    return Contents(
        step=1,
        positions={"west": position("snapshot")},
        parameters=(blob(f"parameters {which}"),),
        buffers=blob(f"buffers {which}"),
        rounds=1,
        momenta=(blob(f"momentum {which}"), None),
    )


FRAGMENT = FragmentRound(
    copies={"a": blob("copy")},
    stored=frozenset({blob("stored")}),
    encoded={"west": {blob("copy"): blob("encoded")}},
    anchor=blob("made"),
    before=blob("before"),
    shares=(Share(region="west", copies=(blob("copy"),), uploads=(blob("listed"),), weight=1),),
)
IN_FORCE = InForce(lr=0.1, k=32, every=1)
RESUME = Resume(position=position("resume"), step=1, outer_round=1, anchors=[blob("resume")], in_force=IN_FORCE)
ORIGIN = Origin(
    file=blob("file"),
    layout=blob("its layout"),
    parameters=(blob("its parameters"),),
    buffers=blob("its buffers"),
    momenta=(blob("its momentum"), None),
)
SENT = Sent(digest=name("sent"), parts=(name("part"),), tokens=1, norm=1.0)
STATE = RunState(
    id="run",
    spec=RunSpec(name="run", task="task", steps=5, outer=OuterSpec(every=1)),
    created_at=NOW,
    started_at=NOW,
    since=NOW,
    members={"a": Member(site="a", region="west", since=NOW, seat=name("seat"), final=blob("final"))},
    regions={
        "west": Region(
            name="west", head=position("head"), round=Round(step=2, contributions={"a": SENT}), resume=RESUME
        )
    },
    layout=Layout(digest=name("layout"), blob=blob("layout"), groups=("decay",)),
    start=Start(parameters=blob("parameters"), buffers=blob("buffers")),
    outer=OuterRound(
        number=1, step=1, ends=1, every=1, weights={"west": 1}, participants=frozenset("a"), fragments={0: FRAGMENT}
    ),
    anchors=(blob("anchor"), None),
    momenta=(None, blob("momentum")),
    buffers=blob("mean of buffers"),
    origin=ORIGIN,
    snapshots=(Snapshot(number=1, manifest=blob("manifest"), contents=contents("kept")),),
    wanted=Wanted(number=2, contents=contents("wanted")),
    changes=(Change(from_step=2, lr=0.1),),
)
OTHERS = {name(text) for text in ("resume", "sent", "part", "seat", "head", "layout", "snapshot")}


def test_every_digest_of_a_state():
    found = set(re.findall(r"[0-9a-f]{64}", STATE.model_dump_json()))
    assert blobs_of(STATE) == found - OTHERS
    assert found >= OTHERS
    assert named_in(STATE.model_dump_json()) == found


def test_every_field_of_a_state_is_set_here():
    """A new field that names blobs is to be set above, and to be known to `blobs_of`."""
    plain = {name for name, field in RunState.model_fields.items() if field.annotation in (int, bool, str, RunStatus)}
    assert set(RunState.model_fields) - STATE.model_fields_set - plain == {"alarms", "met_at"}


def test_the_blobs_that_entries_name():
    start = {"kind": "start", "parameters": blob("a"), "buffers": None}
    assert blobs_of_entry(start) == {blob("a")}
    assert blobs_of_entry({**start, "buffers": blob("b")}) == {blob("a"), blob("b")}
    copies = [{"region": "west", "digest": blob("copy"), "weight": 1}]
    assert blobs_of_entry({"kind": "anchor", "digest": blob("c"), "participants": copies}) == {blob("c")}
    moved = {"kind": "anchor", "digest": blob("c"), "before": blob("b"), "participants": copies}
    assert blobs_of_entry(moved) == {blob("b"), blob("c")}
    assert blobs_of_entry({**moved, "before": None}) == {blob("c")}
    copies[0]["uploads"] = [blob("upload")]
    assert blobs_of_entry({"kind": "anchor", "digest": blob("c"), "participants": copies}) == {
        blob("c"),
        blob("upload"),
    }
    assert blobs_of_entry({"kind": "step", "parts": [name("part")], "contributors": []}) == set()
