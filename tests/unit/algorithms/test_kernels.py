import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import algorithms
from algorithms import kernels

WITHOUT = """
import sys
sys.modules["algorithms._compiled"] = None
from algorithms import kernels
from algorithms.bits import pack_bits, unpack_bits
import numpy as np
assert kernels.compiled is None
values = np.arange(100, dtype=np.uint16) % 32
assert (unpack_bits(pack_bits(values, 5), 5, 100) == values).all()
"""


def test_without_compiled_loops_numpy_does_their_work() -> None:
    subprocess.run([sys.executable, "-c", WITHOUT], check=True, cwd=Path(algorithms.__file__).parents[1])


@pytest.fixture
def compiled() -> Any:
    """What could write beyond an array refuses to, or does not."""
    if kernels.compiled is None:
        pytest.skip("the loops are not compiled: install with a C compiler")
    return kernels.compiled


def test_keys_that_are_too_narrow(compiled: Any) -> None:
    indices, values = np.zeros((2, 2), np.uint16), np.ones((2, 2), np.int8)
    with pytest.raises(IndexError, match="too narrow"):
        compiled.fill_keys(np.zeros((2, 3), np.int64), 2, np.arange(2), indices, values, np.ones(2), 0)


def test_rows_beyond_the_keys(compiled: Any) -> None:
    indices, values = np.zeros((2, 2), np.uint16), np.ones((2, 2), np.int8)
    for rows in ([0, 2], [-1, 0]):
        with pytest.raises(IndexError, match="row"):
            compiled.fill_keys(np.zeros((2, 2), np.int64), 0, np.array(rows), indices, values, np.ones(2), 0)


@pytest.mark.parametrize(("values", "scales"), [((2, 1), 2), ((2, 3), 2), ((3, 2), 2), ((2, 2), 1)])
def test_other_values_than_indices(compiled: Any, values: tuple[int, int], scales: int) -> None:
    keys, indices = np.zeros((2, 2), np.int64), np.zeros((2, 2), np.uint16)
    with pytest.raises(ValueError, match="not as many indices, values and scales"):
        compiled.fill_keys(keys, 0, np.arange(2), indices, np.ones(values, np.int8), np.ones(scales), 0)


def test_counts_of_other_indices(compiled: Any) -> None:
    for counts in ([2], [1, 3], [4], [150, -147], [-1, 4]):
        with pytest.raises(ValueError, match="3 indices, but"):
            compiled.pack_high(np.zeros(3, np.uint16), np.array(counts), 0, 8, np.zeros(8, np.uint8))


def test_indices_beyond_the_chunk(compiled: Any) -> None:
    """Of a chunk of 9 elements there are 8 zeros and a one: index 500 is far beyond these two bytes."""
    data = np.full(64, 7, np.uint8)
    compiled.pack_high(np.array([500], np.uint16), np.array([1]), 0, 8, data[:2])
    assert data[2:].tolist() == [7] * 62
