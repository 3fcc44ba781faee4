"""A replica moves along the hash chain or not at all."""

import hashlib
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save
from torch import nn

from algorithms import DeMo
from algorithms.aggregate import aggregate
from algorithms.codec import digest_arrays, pack_update
from algorithms.momentum import encode
from api.errors import IsthmusError
from api.payload import digest_json, encode_message
from api.schemas import Position, Resume
from site_agent.replica import Replica, load_buffers, save_buffers

GENESIS = "0" * 64


class Model(nn.Module):
    def __init__(self, features: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(features, 3)
        self.norm = nn.BatchNorm1d(3)


class Scene:
    """A replica, the blobs it may fetch, and the log that it follows."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Model()
        self.optimizer = DeMo(list(self.model.named_parameters()), lr=0.5, exchange=lambda *_: pytest.fail("no step"))
        self.blobs: dict[str, bytes] = {}
        fragments = self.optimizer.layout.fragments(2)
        self.replica = Replica(self.optimizer, self.model, fragments, "a", self.blobs.__getitem__)
        self.elements = self.optimizer.layout.parameter_count
        self.previous = GENESIS

    def blob(self, data: bytes) -> str:
        digest = hashlib.sha256(data).hexdigest()
        self.blobs[digest] = data
        return digest

    def header(self, kind: str, **fields: Any) -> dict[str, Any]:
        step = self.replica.step + (kind == "step")
        return {"kind": kind, "seq": self.replica.next_seq, "step": step, "previous": self.previous} | fields

    def start(self, **fields: Any) -> None:
        parameters = self.blob(np.arange(self.elements, dtype="<f4").tobytes())
        layout = self.optimizer.layout.digest
        header = self.header("start", layout=layout, parameters=parameters, buffers=None) | fields
        self.replica.apply_start(header)
        self.previous = digest_json(header)

    def arrays(self) -> dict[str, np.ndarray]:
        layout = self.optimizer.layout
        gradients = {index: torch.ones(tensor.shape) for index, tensor in enumerate(layout.tensors)}
        momentum = {index: torch.zeros(tensor.elements) for index, tensor in enumerate(layout.tensors)}
        sent = encode(self.optimizer._ownership, momentum, gradients, beta=0.0, k=32, codec="sign")
        return pack_update(aggregate([sent], layout, [0]), layout)

    def step(self, arrays: dict[str, np.ndarray], **fields: Any) -> Any:
        parts = [digest_arrays(arrays)] if arrays else []
        header = self.header("step", parts=parts, lr=[0.5], decay=[1.0], contributors=[{"site": "a"}]) | fields
        entry = self.replica.read_step(encode_message("entry", header, arrays))
        self.previous = digest_json(header)
        return entry


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
    entry = scene.step({}, contributors=[{"site": "b"}])
    assert (entry.update, entry.listed) == (None, False)
    own = scene.replica.read_fragment(1)
    scene.replica.apply_anchor(scene.header("anchor", fragment=1, digest=scene.blob(bytes(len(own)))), held="0" * 64)
    assert scene.replica.read_fragment(1) == bytes(len(own))
    assert scene.replica.read_fragment(0) == (np.arange(scene.elements, dtype="<f4") - 0.5).tobytes()[: -len(own)]
    assert scene.replica.position.seq == 3
    assert (scene.replica.step, scene.optimizer.steps) == (2, 2)


def test_resuming_takes_the_anchors_and_goes_on_from_their_place(scene: Scene):
    fragments = scene.optimizer.layout.fragments(2)
    sizes = [scene.optimizer.layout.fragment_elements(fragment) for fragment in fragments]
    anchors = [scene.blob(np.full(size, 7.0 + number, "<f4").tobytes()) for number, size in enumerate(sizes)]
    resume = Resume(position=Position(seq=25, hash="a" * 64), step=20, anchors=anchors)
    scene.replica.resume(resume)
    scene.previous = "a" * 64
    parameters = scene.optimizer.read_parameters(range(len(scene.optimizer.layout.tensors))).tolist()
    assert parameters == [7.0] * sizes[0] + [8.0] * sizes[1]
    entry = scene.step(scene.arrays())
    assert scene.optimizer.steps == 20
    scene.optimizer.apply(entry)
    assert (scene.replica.step, scene.optimizer.steps, scene.replica.position.seq) == (21, 21, 26)


def test_an_anchor_that_is_what_the_site_holds_is_not_fetched(scene: Scene):
    scene.start()
    own = scene.replica.read_fragment(0)
    held = hashlib.sha256(own).hexdigest()
    scene.replica.apply_anchor(scene.header("anchor", fragment=0, digest=held), held)
    assert scene.replica.read_fragment(0) == own


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


def test_other_buffers_are_named():
    with pytest.raises(IsthmusError, match=r"buffers of entry 0 and of this site's model differ: extra, norm\.num"):
        load_buffers(Model(), save({"extra": torch.zeros(1), "norm.running_mean": torch.zeros(3)}))
