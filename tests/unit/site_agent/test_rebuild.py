"""A log made by hand is rebuilt as the reference does it; what does not fit is an error that names its entry."""

import hashlib
from datetime import UTC, datetime
from typing import IO, Any

import numpy as np
import pytest

from algorithms.aggregate import aggregate
from algorithms.codec import digest_arrays, pack_update
from algorithms.layout import ParameterLayout
from api.errors import GoneError, IsthmusError
from api.payload import digest_json, encode_message
from api.schemas import (
    Condition,
    LogPage,
    Manifest,
    MemberView,
    OuterManifest,
    Position,
    RegionView,
    Resume,
    Run,
    RunStatus,
)
from api.specs import InForce, OptimizerSpec, OuterSpec, RunSpec
from site_agent.rebuild import rebuild
from site_agent.replay import compared
from tests import reference
from tests.contract.by_hand import LAYOUT, coefficients

NOW = datetime(2026, 1, 1, tzinfo=UTC)
FRAGMENTS = 2


class Log:
    """Answers what `rebuild` asks a coordinator."""

    def __init__(self, outer: OuterSpec | None = None, **optimizer: Any) -> None:
        self.spec = RunSpec(
            name="run",
            task="task",
            steps=9,
            optimizer=OptimizerSpec(**{"chunk": 32, "k": 64} | optimizer),
            outer=outer or OuterSpec(every=2, fragments=FRAGMENTS),
        )
        tensors, groups = LAYOUT.tensors, LAYOUT.groups
        self.model = ParameterLayout(tensors, LAYOUT.chunk, groups, self.spec.optimizer.transform)
        self.items: list[tuple[dict[str, Any], dict[str, np.ndarray]]] = []
        self.blobs: dict[str, bytes] = {}
        self.trimmed = 0
        self.copied: dict[int, dict[str, np.ndarray]] = {}
        self.random = np.random.default_rng(3)
        self.begin()

    # --- as the client

    def layout(self, run: str) -> dict[str, Any]:
        return self.model.to_json()

    def log(self, run: str, region: str, start: int, stop: int | None = None) -> LogPage:
        if 0 < start < self.trimmed:
            anchors = [header for header, _ in self.items[: self.trimmed]][-FRAGMENTS:]
            resume = Resume(
                position=Position(seq=anchors[-1]["seq"], hash=digest_json(anchors[-1])),
                step=anchors[-1]["step"],
                outer_round=anchors[-1]["outer_round"],
                in_force=InForce(lr=1.0, k=self.spec.optimizer.k, every=5),
                anchors=[header["digest"] for header in anchors],
            )
            raise GoneError("log_trimmed", "gone", context={"resume": resume.model_dump()})
        headers = [header for header, _ in self.items[start : min(stop or start + 3, start + 3)]]
        if start == 0 and self.trimmed:
            del headers[1:]
        last = self.items[-1][0]
        return LogPage(items=headers, head=Position(seq=last["seq"], hash=digest_json(last)), ended=True)

    def entry(self, run: str, region: str, seq: int) -> bytes:
        return encode_message("entry", *self.items[seq])

    def copy_blob(self, digest: str, file: IO[bytes]) -> None:
        file.write(self.blobs[digest])

    # --- what is in it

    def append(self, kind: str, arrays: dict[str, np.ndarray] | None = None, **fields: Any) -> None:
        last = self.items[-1][0] if self.items else None
        common = {"kind": kind, "seq": len(self.items), "previous": digest_json(last) if last else "0" * 64}
        self.items.append(({**common, "step": last["step"] if last else 0, **fields}, arrays or {}))

    @property
    def step_now(self) -> int:
        return int(self.items[-1][0]["step"])

    def blob(self, values: np.ndarray) -> str:
        data = values.astype("<f4").tobytes()
        digest = hashlib.sha256(data).hexdigest()
        self.blobs[digest] = data
        return digest

    def begin(self) -> None:
        parameters = self.blob(self.random.standard_normal(self.model.parameter_count))
        self.append("start", layout=self.model.digest, parameters=parameters, buffers=None)

    def step(self, empty: bool = False) -> None:
        step = self.items[-1][0]["step"] + 1
        arrays = {}
        if not empty:
            update = aggregate([coefficients([step, site]) for site in range(3)], self.model, [0, 0, 1])
            arrays = dict(pack_update(update, self.model))
        parts = [digest_arrays(arrays)] if arrays else []
        rates = {"lr": [0.03125, 0.0625], "decay": [0.96875, 1.0]}
        sent = {"k": self.spec.optimizer.k, "codec": self.spec.optimizer.codec}
        self.append("step", arrays, step=step, parts=parts, contributors=[], **sent, **rates)

    def outer(self, *, wrong: bool = False, without: str | None = None) -> None:
        """An outer step whose anchors are none of the copies; this region's are what the reference says.

        `without` this region, which "keeps" what it has or "follows".
        """
        before, position = self.reference(), 0
        flat = np.concatenate([before[tensor.name].ravel() for tensor in self.model.tensors])
        for fragment, tensors in enumerate(self.model.fragments(FRAGMENTS)):
            size = self.model.fragment_elements(tensors)
            copy = flat[position : position + size].astype("<f4").tobytes()
            position += size
            own = "1" * 64 if wrong else hashlib.sha256(copy).hexdigest()
            participants = [{"region": "east", "digest": "2" * 64}, {"region": "west", "digest": own}]
            moves: dict[str, Any] = {}
            if without is not None:
                del participants[1]
                moves["before"] = self.anchor_before(fragment) if without == "keeps" else None
            anchor = self.blob(self.random.standard_normal(size))
            place = moves | {"outer_round": -(-self.step_now // 2), "taken_after": self.step_now, "every": 2}
            self.append("anchor", fragment=fragment, digest=anchor, participants=participants, **place)

    def anchor_before(self, fragment: int) -> str:
        anchors = [header["digest"] for header, _ in self.items if header.get("fragment") == fragment]
        return str([self.items[0][0]["parameters"], *anchors][-1])

    def late(self, number: int, fragment: int, taken: int) -> None:
        """An anchor of what this region had after step `taken`."""
        self.reference()
        names = [self.model.tensors[index].name for index in self.model.fragments(FRAGMENTS)[fragment]]
        copy = np.concatenate([self.copied[taken][name].ravel() for name in names]).astype("<f4")
        participants = [{"region": "west", "digest": hashlib.sha256(copy.tobytes()).hexdigest()}]
        anchor = self.blob(self.random.standard_normal(copy.size))
        place = {"outer_round": number, "taken_after": taken, "every": 4}
        self.append("anchor", fragment=fragment, digest=anchor, participants=participants, **place)

    def reference(self, log: list[Any] | None = None) -> dict[str, np.ndarray]:
        ranges = [(tensors.start, tensors.stop) for tensors in self.model.fragments(FRAGMENTS)]
        flat = np.frombuffer(self.blobs[self.items[0][0]["parameters"]], "<f4")
        start = {
            tensor.name: flat[offset : offset + tensor.elements].reshape(tensor.shape)
            for tensor, offset in zip(self.model.tensors, self.model.offsets, strict=True)
        }
        optimizer = self.spec.optimizer
        return reference.replay(
            log or self.items,
            start,
            self.blobs.__getitem__,
            chunk=32,
            fragments=ranges,
            groups=[tensor.group for tensor in self.model.tensors],
            transform=optimizer.transform,
            base_update=optimizer.base_update,
            beta2=optimizer.beta2,
            mix=self.spec.outer.mix,
            copied=self.copied,
        )

    def expected(self, log: list[Any] | None = None) -> str:
        rebuilt = self.reference(log)
        return reference.parameters_digest([rebuilt[tensor.name] for tensor in self.model.tensors])

    def run(self, status: RunStatus = RunStatus.SUCCEEDED, **digests: str) -> Run:
        members = [
            MemberView(
                site=site,
                region="west",
                attempt=1,
                ready=True,
                condition=Condition.ACTIVE,
                since=NOW,
                reason="",
                digest=digest,
            )
            for site, digest in digests.items()
        ]
        return Run(
            id="run",
            spec=self.spec,
            status=status,
            reason="",
            since=NOW,
            created_at=NOW,
            step=0,
            outer_rounds=0,
            members=members,
            regions=[RegionView(name="west", step=0, tokens=0)],
            alarms=[],
        )

    def snapshot(self, seq: int) -> Manifest:
        """Made of the anchors of which the last one is that entry."""
        header = self.items[seq][0]
        anchors = [header["digest"] for header, _ in self.items[seq + 1 - FRAGMENTS : seq + 1]]
        return Manifest(
            version=1,
            run="run",
            number=4,
            step=header["step"],
            layout={"digest": self.model.digest, "blob": "0" * 64},
            positions={"west": Position(seq=seq, hash=digest_json(header))},
            parameters=anchors,
            buffers=None,
            outer=OuterManifest(rounds=header["outer_round"], anchors=anchors, momenta=[None] * FRAGMENTS),
            spec=self.spec,
        )

    def rebuilt(self, to: int | None = None, snapshot: Manifest | None = None, region: str = "west") -> Any:
        return rebuild(self, self.run(), region, to, lambda *_: None, snapshot)  # type: ignore[arg-type]


def streaming() -> Log:
    """Turns after 2 (fragment 0), 4 (1), 6 (0), 8 (1) and the last step, anchors one step later with half of it."""
    log = Log(OuterSpec(every=4, fragments=FRAGMENTS, stagger=True, delay=1, mix=0.5))
    for step in range(1, 10):
        log.step(empty=step == 4)
        for number, taken in enumerate((2, 4, 6, 8), 1):
            if step == taken + 1:
                log.late(number, (number + 1) % 2, taken)
        if step == 9:
            log.late(5, 0, 9)
            log.late(5, 1, 9)
    return log


def two_outer_rounds(**optimizer: Any) -> Log:
    log = Log(**optimizer)
    for _ in range(2):
        log.step()
        log.step()
        log.outer()
    log.append("change", from_step=5, lr=1.0, k=7, every=3)
    log.step(empty=True)
    log.step()
    return log


def test_late_anchors_come_under_what_was_done_since():
    log = streaming()
    rebuilt = log.rebuilt()
    assert rebuilt.digest == log.expected()
    assert (rebuilt.step, rebuilt.whole, rebuilt.copies, rebuilt.differing) == (9, True, 6, ())


def test_a_region_that_was_not_in_the_mean_keeps_what_it_has():
    log = Log()
    for without in ("keeps", None, "keeps", "keeps", "follows"):
        log.step()
        log.step()
        log.outer(without=without)
    log.step()
    rebuilt = log.rebuilt()
    assert rebuilt.digest == log.expected()
    assert (rebuilt.step, rebuilt.whole, rebuilt.copies, rebuilt.differing) == (11, True, 2, ())
    ends = {header["step"]: seq + 1 for seq, (header, _) in enumerate(log.items) if header["kind"] == "anchor"}
    made = {
        to: b"".join(log.blobs[header["digest"]] for header, _ in log.items[end - 2 : end]) for to, end in ends.items()
    }
    becomes = [log.rebuilt(to).digest == hashlib.sha256(data).hexdigest() for to, data in made.items()]
    assert becomes == [False, True, False, False, True]


@pytest.mark.parametrize(
    "optimizer",
    [
        {},
        {"base_update": "sgd", "subtract": "aggregate", "alpha": 0.25},
        {"base_update": "adam", "beta2": 0.875},
        {"transform": "random"},
    ],
    ids=str,
)
def test_the_same_bits_as_the_reference(optimizer):
    log = two_outer_rounds(**optimizer)
    rebuilt = log.rebuilt()
    assert rebuilt.digest == log.expected()
    assert (rebuilt.first, rebuilt.seq, rebuilt.step, rebuilt.whole) == (0, 11, 6, True)
    assert (rebuilt.copies, rebuilt.differing) == (4, ())


@pytest.mark.parametrize(("to", "seq"), [(0, 0), (1, 1), (2, 4), (3, 5), (4, 9), (6, 11), (99, 11)])
def test_up_to_a_step_with_its_outer_round(to, seq):
    log = two_outer_rounds()
    rebuilt = log.rebuilt(to)
    assert (rebuilt.seq, rebuilt.whole) == (seq, seq == 11)
    assert rebuilt.digest == log.expected(log.items[: seq + 1])


def test_a_trimmed_log_is_entered_behind_an_outer_round():
    log = two_outer_rounds()
    log.trimmed = 9
    rebuilt = log.rebuilt()
    assert rebuilt.digest == log.expected()
    assert (rebuilt.first, rebuilt.seq, rebuilt.copies) == (8, 11, 0)
    with pytest.raises(IsthmusError, match=r"begins behind step 4, .* step 3 cannot be rebuilt"):
        log.rebuilt(3)


@pytest.mark.parametrize(("seq", "to", "copies"), [(4, None, 2), (4, 3, 0), (8, None, 0)])
def test_from_a_snapshot_on_the_same_bits(seq, to, copies):
    """Also where what was before it is trimmed."""
    log = two_outer_rounds()
    snapshot = log.snapshot(seq)
    whole = log.rebuilt(to)
    log.trimmed = seq
    rebuilt = log.rebuilt(to, snapshot)
    assert (rebuilt.first, rebuilt.seq, rebuilt.step, rebuilt.copies) == (seq, whole.seq, whole.step, copies)
    assert (rebuilt.digest, rebuilt.whole) == (whole.digest, whole.whole)


def test_a_snapshot_that_does_not_lead_there():
    log = two_outer_rounds()
    snapshot = log.snapshot(4)
    with pytest.raises(IsthmusError, match=r"snapshot 4 of run run is after step 2: it does not lead to step 1"):
        log.rebuilt(1, snapshot)
    with pytest.raises(IsthmusError, match=r"snapshot 4 of run run is of region west, not of east: add --region west"):
        log.rebuilt(None, snapshot, region="east")
    other = snapshot.model_copy(update={"positions": {"west": Position(seq=4, hash="1" * 64)}})
    with pytest.raises(IsthmusError, match="entry 5: entry 5 does not follow entry 4"):
        log.rebuilt(None, other)
    log.trimmed = 9
    with pytest.raises(IsthmusError, match=r"follows snapshot 4 was trimmed .* behind step 4: name a newer one"):
        log.rebuilt(None, snapshot)
    stateful = two_outer_rounds(base_update="adam")
    with pytest.raises(IsthmusError, match=r"snapshot 4 .* lacks the state of base update adam, .*leave out --from"):
        stateful.rebuilt(None, stateful.snapshot(4))


def test_copies_that_the_steps_do_not_lead_to_are_named():
    log = Log()
    log.step()
    log.step()
    log.outer(wrong=True)
    rebuilt = log.rebuilt()
    assert rebuilt.differing == (3, 4)
    assert rebuilt.digest == log.expected()
    assert compared(log.run(a=rebuilt.digest), [rebuilt])["equal"] is False


def change_arrays(log: Log) -> None:
    header, arrays = log.items[2]
    name = max(arrays, key=lambda name: arrays[name].size)
    log.items[2] = header, arrays | {name: arrays[name] ^ np.uint8(1)}


def change_header(log: Log) -> None:
    log.items[2][0]["lr"] = [0.5, 0.5]


def change_blob(log: Log) -> None:
    digest = log.items[3][0]["digest"]
    log.blobs[digest] = log.blobs[digest][:-4]


def change_kind(log: Log) -> None:
    log.items[5][0]["kind"] = "surprise"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (change_arrays, "run run, region west, entry 2: .*other arrays than its header names"),
        (change_header, "run run, region west, entry 3: .*does not follow entry 2"),
        (change_blob, "run run, region west, entry 3: blob .* bytes, its tensors have"),
        (change_kind, "run run, region west, entry 5: it is of kind 'surprise'"),
    ],
)
def test_damage_is_named_by_its_entry(damage, message):
    log = two_outer_rounds()
    damage(log)
    with pytest.raises(IsthmusError, match=message):
        log.rebuilt()


def test_a_message_with_a_header_of_its_own(monkeypatch):
    log = two_outer_rounds()
    entry = log.entry
    header, arrays = log.items[1]
    other = encode_message("entry", header | {"lr": [1.0, 1.0]}, arrays)
    monkeypatch.setattr(log, "entry", lambda run, region, seq: other if seq == 1 else entry(run, region, seq))
    with pytest.raises(IsthmusError, match="entry 1: its message carries another header than the log"):
        log.rebuilt()


def test_a_head_that_the_log_does_not_lead_to(monkeypatch):
    log = two_outer_rounds()
    page = log.log
    head = Position(seq=11, hash="1" * 64)
    monkeypatch.setattr(log, "log", lambda *place: page(*place).model_copy(update={"head": head}))
    with pytest.raises(IsthmusError, match="entry 11 is another than"):
        log.rebuilt()


def test_verdicts():
    log = two_outer_rounds()
    whole, part = log.rebuilt(), log.rebuilt(2)
    own = whole.digest
    report = compared(log.run(a=own, b=own), [whole])
    (line,) = report["regions"]
    assert (report["run"], report["equal"], line["equal"]) == ("run", True, True)
    assert (line["region"], line["seq"], line["step"], line["digest"]) == ("west", 11, 6, own)
    assert line["reported"] == {"a": own, "b": own}
    assert compared(log.run(a=own, b="1" * 64), [whole])["equal"] is False
    for nothing in (
        compared(log.run(), [whole]),
        compared(log.run(a=own), [part]),
        compared(log.run(RunStatus.RUNNING, a=own), [whole]),
    ):
        assert nothing["equal"] is None
        assert nothing["regions"][0]["reported"] == {}
