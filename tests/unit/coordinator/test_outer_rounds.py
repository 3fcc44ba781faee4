"""An outer step from blobs to blobs, on real files: the bits of the whole arrays', in the memory of a few blocks."""

import re
import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy

from algorithms.compression import encode
from algorithms.fragment_picks import pick_largest
from algorithms.layout import ParameterLayout, TensorSpec
from algorithms.outer import nesterov, weighted_mean
from api.encodings import coefficients_message
from api.errors import InvalidError, NotFoundError, ProblemError
from api.specs import OuterSpec
from coordinator import outer_rounds as module
from coordinator.blob_directory import BlobDirectory
from coordinator.encodings import check_encoding
from coordinator.outer_rounds import Copies, outer_step
from tests import reference
from tests.blob_stores import store_bytes

SHAPES = {"a": (30,), "b": (5, 9), "c": (0,), "d": (40,)}
LAYOUT = ParameterLayout([TensorSpec(name, shape, 0) for name, shape in SHAPES.items()])


@pytest.fixture
def blobs(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", 16)
    return BlobDirectory(tmp_path)


def store(blobs, values):
    return store_bytes(blobs, values.tobytes())


def step(blobs, *place, outer):
    made = outer_step(Copies(*place), LAYOUT, outer, blobs)
    with made.parameters, made.momentum:
        return [blobs.read(draft.commit()) for draft in (made.parameters, made.momentum)]


@pytest.mark.parametrize("rates", [(0.7, 0.9), (1.0, 0.0)])
@pytest.mark.parametrize("weights", [[3, 5, 2], [1, 0, 7]])
@pytest.mark.parametrize("fragment", [0, 1])
def test_the_bits_are_those_of_whole_arrays(blobs, fragment, weights, rates):
    outer = OuterSpec(every=1, fragments=2, lr=rates[0], momentum=rates[1])
    rng = np.random.default_rng(fragment)
    start = rng.standard_normal(LAYOUT.parameter_count).astype("<f4")
    tensors = LAYOUT.fragments(2)[fragment]
    first, elements = LAYOUT.offsets[tensors.start], LAYOUT.fragment_elements(tensors)
    values = rng.standard_normal((3, elements)).astype("<f4")
    regions = tuple(((store(blobs, copy),), weight) for copy, weight in zip(values, weights, strict=True))
    own = start[first : first + elements]
    anchor, momentum = step(blobs, fragment, store(blobs, start), None, None, regions, outer=outer)
    expected = reference.outer_step(own, np.zeros_like(own), list(values), weights, *rates)
    assert [anchor, momentum] == [array.tobytes() for array in expected]
    copies = (fragment, "0" * 64, store_bytes(blobs, anchor), store_bytes(blobs, momentum), regions)
    again = nesterov(*expected, weighted_mean(list(values), weights), *rates)
    assert step(blobs, *copies, outer=outer) == [array.tobytes() for array in again]


def test_copies_that_are_one_blob_are_the_mean(blobs):
    outer = OuterSpec(every=1, lr=1.0, momentum=0.0)
    start, copy = np.random.default_rng(0).standard_normal((2, LAYOUT.parameter_count)).astype("<f4")
    regions = (((store(blobs, copy),), 2), ((store(blobs, copy),), 7))
    assert step(blobs, 0, store(blobs, start), None, None, regions, outer=outer)[0] == copy.tobytes()


def test_what_one_site_and_averaging_come_to(blobs):
    """One region, outer sgd with lr 1 and no momentum: its copy, bit for bit; with lr 0: the anchor."""
    start, copy, other = np.random.default_rng(0).standard_normal((3, LAYOUT.parameter_count)).astype("<f4")
    place = 0, store(blobs, start), None, None
    alone = (((store(blobs, copy),), 5),)
    assert step(blobs, *place, alone, outer=OuterSpec(every=1, optimizer="sgd", lr=1, momentum=0))[0] == copy.tobytes()
    assert step(blobs, *place, alone, outer=OuterSpec(every=1, optimizer="sgd", lr=0))[0] == start.tobytes()
    two = (((store(blobs, copy),), 1), ((store(blobs, other),), 3))
    mean = (copy.astype(np.float64) + 3 * other.astype(np.float64)) / 4
    assert step(blobs, *place, two, outer=OuterSpec(every=1, optimizer="average")) == [
        mean.astype("<f4").tobytes(),
        bytes(start.nbytes),
    ]


def test_copies_of_a_region_without_a_majority_share_its_weight(blobs):
    outer = OuterSpec(every=1, optimizer="average")
    values = np.random.default_rng(0).standard_normal((3, LAYOUT.parameter_count)).astype("<f4")
    first, second, third = (store(blobs, one) for one in values)
    mean = weighted_mean(list(values), [3, 3, 2 * 5]).astype("<f4")
    regions = (((first, second), 3), ((third,), 5))
    assert step(blobs, 0, first, None, None, regions, outer=outer)[0] == mean.tobytes()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_left_out(blobs, bad):
    outer = OuterSpec(every=1, optimizer="average")
    start, good, wrong = np.random.default_rng(0).standard_normal((3, LAYOUT.parameter_count)).astype("<f4")
    wrong[-1] = bad
    good, wrong = store(blobs, good), store(blobs, wrong)
    for regions, expected in (
        ((((good, wrong), 2), ((wrong,), 9)), blobs.read(good)),
        ((((wrong,), 2),), start.tobytes()),
    ):
        copies = Copies(0, store(blobs, start), None, None, regions)
        made = outer_step(copies, LAYOUT, outer, blobs)
        with made.parameters, made.momentum:
            assert made.rejected == {wrong}
            assert blobs.read(made.parameters.commit()) == expected


LARGE = ParameterLayout([TensorSpec("a", (90, 100), 0), TensorSpec("b", (7,), 0)])


def encoded(codec, wanted):
    """The upload, and what it says by the reference."""
    if codec == "topk":
        body = coefficients_message(pick_largest(wanted, LARGE, 20), LARGE, 20)
        tensors = [(tensor.name, tensor.shape) for tensor in LARGE.tensors]
        sent = reference.unpack_contribution(safetensors.numpy.load(body), tensors, 64, "int8", 20, [], "compact")
        return body, reference.contribution_values(sent, tensors, 64)
    write, read = {
        "bf16": (reference.upload_bf16, reference.read_bf16),
        "int8": (reference.upload_int8, reference.read_int8),
    }[codec]
    return write(wanted), read(write(wanted))


@pytest.mark.parametrize("codec", ["bf16", "int8", "topk"])
def test_copies_are_what_their_encodings_say_of_the_anchor(blobs, monkeypatch, codec):
    """Several blocks of all arrays; a third region whose copy is not finite is left out."""
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", 4096)
    outer = OuterSpec(every=1, codec=codec, **({"k": 20} if codec == "topk" else {}))
    anchor, momentum, *values = np.random.default_rng(3).standard_normal((4, LARGE.parameter_count)).astype("<f4")
    uploads, said = zip(*(encoded(codec, anchor - copy) for copy in values), strict=True)
    bad = np.full(LARGE.parameter_count, np.nan, "<f4")
    wrong = coefficients_message(None, LARGE, 20) if codec == "topk" else encode(codec, bad).tobytes()
    stored = [store_bytes(blobs, upload) for upload in (*uploads, wrong)]
    regions = tuple(((upload,), weight) for upload, weight in zip(stored, (3, 5, 7), strict=True))
    made = outer_step(Copies(0, "0" * 64, store(blobs, anchor), store(blobs, momentum), regions), LARGE, outer, blobs)
    copies = [anchor.astype(np.float64) - one for one in said]
    expected = reference.outer_step(anchor, momentum, copies, [3, 5], outer.lr, outer.momentum)
    with made.parameters, made.momentum:
        assert made.rejected == {stored[2]}
        found = [blobs.read(draft.commit()) for draft in (made.parameters, made.momentum)]
    assert found == [array.tobytes() for array in expected]
    for upload in stored:
        check_encoding(upload, len(blobs.read(upload)), 0, LARGE, outer, blobs)


@pytest.mark.parametrize(
    ("codec", "body", "message"),
    [
        ("bf16", bytes(6), "9007 values of bf16 take 18014 bytes, got 6"),
        ("int8", bytes(9007), "values of int8 take 9019 bytes"),
        ("int8", b"\x00\x00\x80\xbf" + bytes(9015), "a scale is negative"),
        ("topk", b"rubbish", "too few for a safetensors message"),
        ("topk", coefficients_message(None, LARGE, 21), "it says {'finite': False, 'k': 21}"),
        ("topk", bytes(2 << 20), "at most 1120632 bytes, got 2097152"),
    ],
)
def test_what_is_no_encoding_of_the_fragment_is_named(blobs, codec, body, message):
    outer = OuterSpec(every=1, codec=codec, **({"k": 20} if codec == "topk" else {}))
    digest = store_bytes(blobs, body)
    with pytest.raises(InvalidError, match=f"upload {digest} of fragment 0: .*{re.escape(message)}"):
        check_encoding(digest, len(body), 0, LARGE, outer, blobs)


def test_nobody_has_trained(blobs):
    outer = OuterSpec(every=1)
    start, copy = np.random.default_rng(0).standard_normal((2, LAYOUT.parameter_count)).astype("<f4")
    stored = step(blobs, 0, store(blobs, start), None, None, (((store(blobs, copy),), 0),), outer=outer)
    assert stored == [start.tobytes(), bytes(start.nbytes)]


def test_a_copy_that_is_missing_or_of_another_size_leaves_nothing(blobs):
    outer = OuterSpec(every=1)
    start = store(blobs, np.zeros(LAYOUT.parameter_count, "<f4"))
    short = store(blobs, np.zeros(LAYOUT.parameter_count - 1, "<f4"))
    for copy, error in ((short, ProblemError), ("0" * 64, NotFoundError)):
        with pytest.raises(error, match=copy):
            outer_step(Copies(0, start, None, None, (((copy,), 1),)), LAYOUT, outer, blobs)
    assert list((blobs.root / "incoming").iterdir()) == []


MEMORY = """
import resource, sys
from pathlib import Path
from algorithms.layout import ParameterLayout, TensorSpec
from api.specs import OuterSpec
from coordinator.blob_directory import BlobDirectory
from coordinator.outer_rounds import Copies, outer_step

blobs, outer = BlobDirectory(Path(sys.argv[1])), OuterSpec(every=1, lr=0.7, momentum=0.9)

def peak(mebibytes):
    layout = ParameterLayout([TensorSpec("a", (mebibytes << 8, 1024), 0)], chunk=64)
    digests = []
    for number in range(3):
        with blobs.draft() as draft:
            for _ in range(mebibytes):
                draft.write(bytes([number]) * (1 << 20))
            digests.append(draft.commit())
    anchor, *copies = digests
    made = outer_step(Copies(0, anchor, anchor, anchor, tuple(((c,), 1) for c in copies)), layout, outer, blobs)
    assert [made.parameters.size, made.momentum.size] == [mebibytes << 20] * 2
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

first = peak(1)
print(peak(64) - first)
"""


def test_memory_does_not_grow_with_the_parameters(tmp_path):
    done = subprocess.run([sys.executable, "-c", MEMORY, str(tmp_path)], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 32
