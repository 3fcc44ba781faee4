"""A replica moves along the hash chain or not at all."""

import hashlib
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from torch import nn

from algorithms import DeMo
from algorithms.aggregate import aggregate, without_empty_tensors
from algorithms.codec import digest_arrays, pack_update
from algorithms.momentum import encode
from algorithms.parts import PART_BYTES
from algorithms.schedule import OuterSchedule
from algorithms.updates import SparseUpdate
from api.errors import IsthmusError
from api.payload import digest_json, encode_message
from api.schemas import Position, Resume
from api.specs import InForce
from site_agent.buffers import buffer_bytes, load_buffers, save_buffers
from site_agent.fetched import Fetched
from site_agent.replica import Replica
from tests import reference
from tests.unit.algorithms.test_against_reference import assert_same

GENESIS = "0" * 64
SENT = "5" * 64


class Model(nn.Module):
    def __init__(self, features: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(features, 3)
        self.norm = nn.BatchNorm1d(3)


class Scene:
    """A replica, the blobs it may fetch, and the log that it follows."""

    def __init__(
        self,
        features: int = 4,
        part_bytes: int = PART_BYTES,
        outer: bool = True,
        keeps_anchors: bool = False,
        **how: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model = Model(features)
        self.optimizer = DeMo(list(self.model.named_parameters()), lr=0.5, exchange=lambda *_: pytest.fail("no step"))
        self.blobs: dict[str, bytes] = {}
        fragments = self.optimizer.layout.fragments(2) if outer else ()
        self.messages: dict[tuple[int, int], bytes] = {}
        fetches = self.fetched, lambda seq, part: self.messages[seq, part]
        schedule = OuterSchedule(**{"every": 4, "fragments": 2, "steps": 40} | how) if outer else None
        self.replica = Replica(
            self.optimizer,
            self.model,
            fragments,
            "a",
            *fetches,
            part_bytes,
            schedule=schedule,
            keeps_anchors=keeps_anchors,
        )
        self.elements = self.optimizer.layout.parameter_count
        self.previous = GENESIS
        self.most_read = 0
        """Of a blob at once."""

    def blob(self, data: bytes) -> str:
        digest = hashlib.sha256(data).hexdigest()
        self.blobs[digest] = data
        return digest

    def fetched(self, digest: str) -> Any:
        data = self.blobs[digest]

        def read(start: int, stop: int) -> bytes:
            self.most_read = max(self.most_read, stop - start)
            return data[start:stop]

        return nullcontext(Fetched(len(data), read))

    def read(self, fragment: int) -> bytes:
        source = self.replica.read_fragment(fragment)
        data = b"".join(source.blocks(0))
        assert source.size == len(data)
        assert b"".join(source.blocks(7)) == data[7:]
        return data

    def header(self, kind: str, **fields: Any) -> dict[str, Any]:
        step = self.replica.step + (kind == "step")
        common = {"kind": kind, "seq": self.replica.next_seq, "step": step, "previous": self.previous}
        place = {"outer_round": 1, "taken_after": step, "every": 4} if kind == "anchor" else {}
        return common | place | fields

    def start(self, **fields: Any) -> None:
        parameters = self.blob(np.arange(self.elements, dtype="<f4").tobytes())
        layout = self.optimizer.layout.digest
        header = self.header("start", layout=layout, parameters=parameters, buffers=None) | fields
        self.replica.apply_start(header)
        self.previous = digest_json(header)

    def sent(self) -> SparseUpdate:
        layout = self.optimizer.layout
        gradients = {index: torch.ones(tensor.shape) for index, tensor in enumerate(layout.tensors)}
        momentum = {index: torch.zeros(tensor.elements) for index, tensor in enumerate(layout.tensors)}
        return encode(self.optimizer._ownership, momentum, gradients, beta=0.0, k=32, codec="sign")

    def arrays(self, chunks: range | None = None) -> dict[str, np.ndarray]:
        layout = self.optimizer.layout
        update = aggregate([self.sent()], layout, [0], chunks=chunks)
        return pack_update(without_empty_tensors(update, layout), layout)

    def step(self, arrays: dict[str, np.ndarray], **fields: Any) -> Any:
        parts = [digest_arrays(arrays)] if arrays else []
        entry = self.replica.read_step(self.message(arrays, **{"parts": parts} | fields), SENT)
        self.previous = self.replica.position.hash
        return entry

    def message(self, arrays: dict[str, np.ndarray], **fields: Any) -> bytes:
        contributors = [{"site": "a", "digest": SENT}]
        header = self.header("step", lr=[0.5], decay=[1.0], contributors=contributors, k=32, codec="sign") | fields
        return encode_message("entry", header, arrays)


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_along_the_chain(scene: Scene):
    scene.start()
    everything = range(len(scene.optimizer.layout.tensors))
    assert scene.optimizer.read_parameters(everything).tolist() == list(range(scene.elements))
    entry = scene.step(scene.arrays())
    assert entry.listed
    scene.optimizer.apply(entry)
    assert scene.optimizer.read_parameters(everything).tolist() == [x - 0.5 for x in range(scene.elements)]
    entry = scene.step({}, contributors=[{"site": "b", "digest": SENT}])
    assert (entry.update, entry.listed) == (None, False)
    own = scene.read(1)
    header = scene.header("anchor", outer_round=1, fragment=1, digest=scene.blob(bytes(len(own))))
    scene.replica.apply_anchor(header, held="0" * 64)
    assert scene.read(1) == bytes(len(own))
    assert scene.read(0) == (np.arange(scene.elements, dtype="<f4") - 0.5).tobytes()[: -len(own)]
    assert scene.replica.position.seq == 3
    assert (scene.replica.step, scene.optimizer.steps) == (2, 2)


def test_a_site_is_listed_only_with_what_it_has_sent(scene: Scene):
    """Its earlier ranks may have answered the round, or it has abstained."""
    scene.start()
    assert not scene.step({}, contributors=[{"site": "a", "digest": "6" * 64}]).listed
    message = scene.message({}, parts=[], contributors=[{"site": "a", "digest": SENT}])
    assert not scene.replica.read_step(message).listed


class InParts(Scene):
    """A bias and a matrix of 3 x 320 in five chunks, each of them a part."""

    def __init__(self) -> None:
        super().__init__(features=320, part_bytes=1)
        self.start()
        self.ranges = self.replica.parts(32, "sign")
        self.own = [self.arrays(chunks) for chunks in self.ranges]
        self.digests = [digest_arrays(arrays) for arrays in self.own]
        for part in range(1, len(self.own)):
            self.put(part, self.own[part])

    def put(self, part: int, arrays: dict[str, np.ndarray], **fields: Any) -> None:
        self.messages[1, part] = self.message(arrays, **{"parts": self.digests} | fields)

    def read(self, **fields: Any) -> Any:
        return self.replica.read_step(self.message(self.own[0], **{"parts": self.digests} | fields), SENT)


def test_an_update_in_parts_moves_the_parameters_as_a_whole_does():
    scene = InParts()
    assert len(scene.ranges) == scene.optimizer.layout.chunk_count > 5
    entry = scene.read()
    assert_same(entry.update, aggregate([scene.sent()], scene.optimizer.layout, [0]))
    assert entry.listed


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda scene: scene.put(2, scene.own[0]), "entry 1 arrived with other arrays than its header names"),
        (lambda scene: scene.put(2, {}), "entry 1 arrived with other arrays than its header names"),
        (lambda scene: scene.put(2, scene.own[2], lr=[0.25]), "part 2 of entry 1 has another header than part 0"),
        (lambda scene: scene.digests.pop(), "parts, by the run's settings"),
    ],
)
def test_a_part_that_does_not_belong_to_the_entry_is_refused(fault: Any, message: str):
    scene = InParts()
    fault(scene)
    with pytest.raises(IsthmusError, match=message):
        scene.read()


def test_resuming_takes_the_anchors_and_goes_on_from_their_place(scene: Scene):
    fragments = scene.optimizer.layout.fragments(2)
    sizes = [scene.optimizer.layout.fragment_elements(fragment) for fragment in fragments]
    anchors = [scene.blob(np.full(size, 7.0 + number, "<f4").tobytes()) for number, size in enumerate(sizes)]
    position, in_force = Position(seq=25, hash="a" * 64), InForce(lr=1, k=5, every=3)
    place = {"position": position, "step": 20, "outer_round": 4, "outer_step": 20}
    resume = Resume(**place, in_force=in_force, anchors=anchors)
    scene.replica.resume(resume)
    scene.previous = "a" * 64
    parameters = scene.optimizer.read_parameters(range(len(scene.optimizer.layout.tensors))).tolist()
    assert parameters == [7.0] * sizes[0] + [8.0] * sizes[1]
    assert scene.most_read == 4 * max(tensor.elements for tensor in scene.optimizer.layout.tensors)
    entry = scene.step(scene.arrays())
    assert scene.optimizer.steps == 20
    scene.optimizer.apply(entry)
    assert (scene.replica.step, scene.optimizer.steps, scene.replica.position.seq) == (21, 21, 26)
    assert (scene.replica.outer.number, scene.replica.outer.step, scene.optimizer.settings.k) == (4, 20, 5)
    assert [step for step in range(20, 30) if scene.replica.outer.concerns(step)] == [21]


def test_a_change_holds_from_the_next_step_on(scene: Scene):
    scene.start()
    scene.optimizer.apply(scene.step(scene.arrays()))
    before = scene.optimizer.parameters_digest()
    header = scene.header("change", from_step=2, lr=0.5, k=5, every=3)
    scene.replica.apply_change(header)
    scene.previous = digest_json(header)
    assert (scene.replica.step, scene.optimizer.settings.k) == (1, 5)
    assert scene.replica.outer.concerns(3)
    assert scene.optimizer.parameters_digest() == before
    scene.step(scene.arrays(), k=5)
    assert (scene.replica.step, scene.replica.position.seq) == (2, 3)


def test_a_snapshot_of_a_run_without_outer_steps_is_entered_with_its_buffers():
    scene = Scene(outer=False)
    buffers = {name: torch.full_like(buffer, 3) for name, buffer in scene.model.named_buffers()}
    parameters = scene.blob(np.full(scene.elements, 5.0, "<f4").tobytes())
    place = Position(seq=4, hash="b" * 64)
    scene.replica.resume(
        Resume(
            position=place,
            step=4,
            outer_round=0,
            in_force=InForce(lr=0.1, k=4, every=None),
            anchors=[parameters],
            buffers=scene.blob(save(buffers)),
        )
    )
    assert set(scene.optimizer.read_parameters(range(len(scene.optimizer.layout.tensors))).tolist()) == {5.0}
    assert scene.model.norm.running_var.tolist() == [3.0] * 3
    assert (scene.replica.position, scene.replica.step, scene.optimizer.steps) == (place, 4, 4)


def test_buffers_are_one_more_fragment(scene: Scene):
    held = scene.read(2)
    assert load(held).keys() == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert scene.replica.fragment_digest(2) == hashlib.sha256(held).hexdigest()
    scene.start(buffers=scene.blob(held))
    other = save({name: torch.full_like(buffer, 2) for name, buffer in load(held).items()})
    scene.replica.apply_anchor(scene.header("anchor", step=4, taken_after=4, fragment=2, digest=scene.blob(other)))
    assert scene.model.norm.running_mean.tolist() == [2.0] * 3
    assert scene.replica.outer.missing == {0, 1}


def test_which_fragments_miss_the_anchors_of_the_last_outer_round(scene: Scene):
    """A region that is taken along twice gets anchors of two outer rounds with no step in between."""

    def anchor(step: int, fragment: int) -> set[int]:
        elements = scene.optimizer.layout.fragment_elements(scene.optimizer.layout.fragments(2)[fragment])
        digest = scene.blob(np.full(elements, step, "<f4").tobytes())
        place = {"step": step, "taken_after": step, "outer_round": step // 4}
        header = scene.header("anchor", fragment=fragment, digest=digest, **place)
        scene.replica.apply_anchor(header)
        scene.previous = digest_json(header)
        return scene.replica.outer.missing

    scene.start()
    scene.optimizer.apply(scene.step(scene.arrays()))
    assert anchor(4, 0) == {1}
    assert anchor(4, 1) == set()
    assert anchor(8, 0) == {1}
    assert (scene.replica.step, scene.optimizer.steps) == (8, 8)
    assert anchor(8, 1) == set()
    scene.optimizer.apply(scene.step(scene.arrays()))
    assert (scene.replica.step, scene.replica.outer.number, scene.replica.outer.missing) == (9, 2, set())


def late_scene() -> Scene:
    """After step 2: fragment 0 is due, whose anchor is applied one step later."""
    scene = Scene(stagger=True, delay=1)
    scene.start(buffers=scene.blob(save_buffers(scene.model)))
    for _ in range(2):
        scene.optimizer.apply(scene.step(scene.arrays()))
    return scene


def anchor_of(scene: Scene, fragment: int, value: float, **place: Any) -> dict[str, Any]:
    elements = scene.optimizer.layout.fragment_elements(scene.optimizer.layout.fragments(2)[fragment])
    header = scene.header("anchor", fragment=fragment, digest=scene.blob(np.full(elements, value, "<f4").tobytes()))
    return header | place


def test_what_was_done_since_the_copy_is_kept_on_top_of_a_late_anchor():
    scene = late_scene()
    taken = scene.read(0)
    scene.optimizer.apply(scene.step(scene.arrays()))
    assert scene.read(0) == taken, "it is the copy that is announced"
    assert scene.replica.fragment_digest(0) == hashlib.sha256(taken).hexdigest()
    assert scene.replica.outer.is_held(3)
    now = scene.optimizer.read_parameters(scene.optimizer.layout.fragments(2)[0])
    scene.replica.apply_anchor(anchor_of(scene, 0, 100.0, taken_after=2))
    expected = reference.delayed_anchor(np.full(now.size, 100, np.float32), now, np.frombuffer(taken, "<f4"), 1.0)
    assert scene.read(0) == expected.tobytes()
    assert (now != np.frombuffer(taken, "<f4")).any()
    assert not scene.replica.outer.is_held(3)


def test_a_late_anchor_that_is_the_copy_is_not_fetched():
    scene = late_scene()
    held = hashlib.sha256(scene.read(0)).hexdigest()
    scene.optimizer.apply(scene.step(scene.arrays()))
    now = scene.optimizer.parameters_digest()
    scene.replica.apply_anchor(scene.header("anchor", fragment=0, digest=held, taken_after=2), held)
    assert scene.optimizer.parameters_digest() == now


def test_a_region_that_was_taken_along_has_no_copy_and_takes_the_anchor_as_it_is():
    scene = late_scene()
    scene.optimizer.apply(scene.step(scene.arrays()))
    scene.replica.apply_anchor(anchor_of(scene, 1, 7.0, step=5, taken_after=4, outer_round=2))
    assert set(np.frombuffer(scene.read(1), "<f4")) == {7.0}
    assert (scene.replica.step, scene.replica.outer.missing) == (5, {2}), "the buffers are due with fragment 1"


def floats(data: bytes) -> np.ndarray:
    return np.frombuffer(data, "<f4")


def test_a_region_that_was_not_in_the_mean_moves_as_the_anchors_do():
    """The first one moves from entry 0 on, which is one blob of all fragments."""
    scene = Scene(keeps_anchors=True)
    scene.start()
    scene.optimizer.apply(scene.step(scene.arrays()))
    random = np.random.default_rng(5)
    for fragment, tensors in enumerate(scene.optimizer.layout.fragments(2)):
        begin = scene.optimizer.layout.offsets[tensors.start]
        before = np.arange(begin, begin + scene.optimizer.layout.fragment_elements(tensors), dtype="<f4")
        digest = hashlib.sha256(np.arange(scene.elements, dtype="<f4").tobytes()).hexdigest()
        for number in (1, 2):
            now, anchor = floats(scene.read(fragment)), random.standard_normal(before.size).astype("<f4")
            place = {"outer_round": number, "taken_after": 1, "before": digest}
            digest = scene.blob(anchor.tobytes())
            header = scene.header("anchor", fragment=fragment, digest=digest) | place
            held = hashlib.sha256(now.tobytes()).hexdigest()
            scene.replica.apply_anchor(header, held)
            scene.previous = digest_json(header)
            assert scene.read(fragment) == reference.shifted(now, anchor, before).tobytes()
            assert scene.read(fragment) != anchor.tobytes()
            assert scene.replica.anchors[fragment].outer_round == number
            assert scene.replica.anchors[fragment].values.tobytes() == anchor.tobytes()
            assert scene.replica.apart
            before = anchor
    scene.replica.apply_anchor(anchor_of(scene, 1, 7.0, outer_round=3))
    assert set(floats(scene.read(1))) == {7.0}
    assert not scene.replica.apart
    assert scene.most_read == 4 * max(tensor.elements for tensor in scene.optimizer.layout.tensors)


def test_an_anchor_before_of_another_size_changes_nothing(scene: Scene):
    scene.start()
    before = scene.optimizer.parameters_digest()
    header = anchor_of(scene, 0, 1.0, before=scene.blob(scene.read(0)[:-4]))
    with pytest.raises(IsthmusError, match=r"blob .* has \d+ bytes, the anchor after it has \d+"):
        scene.replica.apply_anchor(header)
    assert scene.optimizer.parameters_digest() == before


def test_a_region_whose_copy_was_not_finite_becomes_the_late_anchor():
    scene = late_scene()
    scene.optimizer.write_parameters(range(1), np.full(scene.optimizer.layout.tensors[0].elements, np.nan, "<f4"))
    scene.replica.begin_outer_round()
    held = scene.replica.fragment_digest(0)
    scene.optimizer.apply(scene.step(scene.arrays()))
    scene.replica.apply_anchor(anchor_of(scene, 0, 7.0, taken_after=2, before=None), held)
    assert set(floats(scene.read(0))) == {7.0}
    assert not scene.replica.apart


def test_a_region_that_was_not_in_the_mean_keeps_all_it_did_under_a_late_anchor():
    scene = late_scene()
    scene.optimizer.apply(scene.step(scene.arrays()))
    now = scene.optimizer.read_parameters(scene.optimizer.layout.fragments(2)[0])
    before = np.arange(now.size, dtype="<f4")
    digest = scene.blob(before.tobytes())
    scene.replica.apply_anchor(anchor_of(scene, 0, 100.0, taken_after=2, before=digest))
    expected = reference.shifted(now, np.full(now.size, 100, np.float32), before)
    assert scene.read(0) == expected.tobytes()


def test_buffers_of_a_late_outer_round_are_the_mean_and_nothing_else():
    scene = Scene(delay=1)
    scene.start(buffers=scene.blob(save_buffers(scene.model)))
    for _ in range(4):
        scene.optimizer.apply(scene.step(scene.arrays()))
    scene.replica.begin_outer_round()
    taken = scene.read(2)
    with torch.no_grad():
        scene.model.norm.running_mean.fill_(9)
    assert scene.read(2) == taken
    scene.optimizer.apply(scene.step(scene.arrays()))
    held = hashlib.sha256(taken).hexdigest()
    scene.replica.apply_anchor(scene.header("anchor", fragment=2, digest=scene.blob(taken), taken_after=4), held)
    assert save_buffers(scene.model) == taken


def test_an_anchor_of_another_size_changes_nothing(scene: Scene):
    scene.start()
    before = scene.optimizer.parameters_digest()
    header = scene.header("anchor", outer_round=1, fragment=0, digest=scene.blob(scene.read(0)[:-4]))
    with pytest.raises(IsthmusError, match=r"blob .* has \d+ bytes, its tensors have \d+"):
        scene.replica.apply_anchor(header)
    assert scene.optimizer.parameters_digest() == before


def test_an_anchor_that_is_what_the_site_holds_is_not_fetched(scene: Scene):
    scene.start()
    own = scene.read(0)
    held = hashlib.sha256(own).hexdigest()
    scene.replica.apply_anchor(scene.header("anchor", outer_round=1, fragment=0, digest=held), held)
    assert scene.read(0) == own


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seq": 2}, "entry 2 does not follow entry 0 of this site"),
        ({"seq": 0}, "entry 0 does not follow entry 0"),
        ({"previous": "1" * 64}, "entry 1 does not follow entry 0 of this site: its log is another one"),
        ({"kind": "anchor"}, "entry 1 is of kind anchor, not step"),
        ({"parts": ["1" * 64]}, "entry 1 arrived with other arrays than its header names"),
        ({"parts": []}, "entry 1 arrived with other arrays"),
    ],
)
def test_a_step_off_the_chain_is_refused(scene: Scene, fields: dict[str, Any], message: str):
    scene.start()
    with pytest.raises(IsthmusError, match=message):
        scene.step(scene.arrays(), **fields)


def test_a_step_without_the_arrays_that_it_names_is_refused(scene: Scene):
    scene.start()
    with pytest.raises(IsthmusError, match="other arrays"):
        scene.step({}, parts=["1" * 64])


def test_the_first_entry_must_be_a_start_of_this_layout(scene: Scene):
    with pytest.raises(IsthmusError, match="another layout"):
        scene.start(layout="1" * 64)
    with pytest.raises(IsthmusError, match="entry 0 does not follow the empty log"):
        Scene().step({}, previous="1" * 64)
    with pytest.raises(IsthmusError, match="entry 0 is of kind step, not start"):
        Scene().start(kind="step")


def test_buffers_come_with_entry_0(scene: Scene):
    with torch.no_grad():
        scene.model.norm.running_mean.fill_(7.0)
        scene.model.norm.num_batches_tracked.fill_(41)
    saved = save_buffers(scene.model)
    other = Scene()
    other.start(buffers=other.blob(saved))
    assert other.model.norm.running_mean.tolist() == [7.0] * 3
    assert other.model.norm.num_batches_tracked.dtype == torch.int64
    assert other.model.norm.num_batches_tracked.item() == 41
    assert save_buffers(nn.Linear(2, 2)) is None
    assert (buffer_bytes(scene.model), buffer_bytes(nn.Linear(2, 2))) == (2 * 3 * 4 + 8, 0)


def test_other_buffers_are_named():
    with pytest.raises(IsthmusError, match=r"buffers of entry 0 and of this site's model differ: extra, norm\.num"):
        load_buffers(Model(), save({"extra": torch.zeros(1), "norm.running_mean": torch.zeros(3)}))
