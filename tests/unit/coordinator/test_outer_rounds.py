"""An outer step from blobs to blobs, on real files: the bits of the whole arrays', in the memory of a few blocks."""

import subprocess
import sys

import numpy as np
import pytest

from algorithms.layout import ParameterLayout, TensorSpec
from algorithms.outer import nesterov, weighted_mean
from api.errors import NotFoundError, ProblemError
from api.schemas import OuterSpec
from coordinator import outer_rounds as module
from coordinator.blob_directory import BlobDirectory
from coordinator.blobs import store_bytes
from coordinator.outer_rounds import Copies, outer_step
from tests import reference

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
from api.schemas import OuterSpec
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
    assert [draft.size for draft in (made.parameters, made.momentum)] == [mebibytes << 20] * 2
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

first = peak(1)
print(peak(64) - first)
"""


def test_memory_does_not_grow_with_the_parameters(tmp_path):
    done = subprocess.run([sys.executable, "-c", MEMORY, str(tmp_path)], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 32
