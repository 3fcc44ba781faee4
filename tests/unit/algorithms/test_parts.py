"""Parts of contributions and updates are the whole, cut, whatever the cut; real ones keep to their limit."""

from itertools import pairwise
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from algorithms.aggregate import aggregate, without_empty_tensors
from algorithms.codec import pack_contribution, pack_update, unpack_contribution, unpack_update
from algorithms.layout import ParameterLayout, TensorSpec
from algorithms.outliers import norm, squares
from algorithms.parts import PART_BYTES, cut, join_parts
from algorithms.traffic import contribution_bytes
from algorithms.transforms import TRANSFORMS
from algorithms.updates import Codec, Coefficients, Indices, SparseUpdate, merge, restrict
from tests.unit.algorithms.test_against_reference import Round, assert_same, layouts, rounds, rules, thorough
from tests.unit.algorithms.test_traffic import spread

CODECS = get_args(Codec)
FORMS = get_args(Indices)


def size_of(arrays: dict[str, np.ndarray]) -> int:
    return sum(array.nbytes for array in arrays.values())


def over_the_wire(update: SparseUpdate, round_: Round, form: Indices, chunks: range) -> SparseUpdate:
    """A part as it is after being packed and read."""
    layout, absent = round_.layout, [round_.layout.tensors[index].name for index in update.absent]
    arrays = pack_contribution(restrict(update, chunks), layout, update.codec, form)
    return unpack_contribution(
        arrays, layout, codec=update.codec, k=round_.k, absent=absent, indices=form, chunks=chunks
    )


@thorough
@given(rounds(), st.data(), st.sampled_from(FORMS), st.sampled_from(TRANSFORMS), st.integers(1, 3000))
def test_parts_joined_are_the_whole(round_: Round, data: Any, form: Any, transform: Any, limit: int) -> None:
    tensors = round_.layout.tensors
    layout = ParameterLayout(tensors, round_.layout.chunk, round_.layout.groups, transform)
    round_ = Round(layout, round_.k, round_.codec, round_.contributions)
    ranges = cut(layout, round_.k, round_.codec, form, limit)
    rule = vars(data.draw(rules(len(round_.contributions))))
    halvings = list(range(len(round_.contributions)))
    sent = [[over_the_wire(update, round_, form, chunks) for chunks in ranges] for update in round_.contributions]
    for parts, whole in zip(sent, round_.contributions, strict=True):
        arrays = pack_contribution(merge(parts), layout, round_.codec, form)
        expected = pack_contribution(whole, layout, round_.codec, form)
        assert arrays.keys() == expected.keys()
        assert all(np.array_equal(arrays[name], expected[name]) for name in arrays)
        assert sum(map(squares, parts)) == pytest.approx(norm(whole) ** 2, rel=1e-12)
    received = []
    for number, chunks in enumerate(ranges):
        part = aggregate([parts[number] for parts in sent], layout, halvings, **rule, chunks=chunks)
        arrays = pack_update(without_empty_tensors(part, layout), layout)
        received.append(unpack_update(arrays, layout, chunks))
    assert_same(join_parts(received, layout, ranges), aggregate(round_.contributions, layout, halvings, **rule))


@thorough
@given(layouts(), st.sampled_from(CODECS), st.sampled_from(FORMS), st.data())
def test_the_cut_covers_all_chunks_in_order_and_parts_keep_to_the_limit(
    layout: ParameterLayout, codec: Any, form: Any, data: Any
) -> None:
    k = data.draw(st.integers(1, layout.chunk**2))
    limit = data.draw(st.integers(64 << 10, 256 << 10) | st.integers(1, 5000))
    ranges = cut(layout, k, codec, form, limit)
    assert [number for chunks in ranges for number in chunks] == list(range(layout.chunk_count))
    assert ranges == cut(ParameterLayout.from_json(layout.to_json()), k, codec, form, limit)
    whole = spread(layout, k, codec)
    sizes = [size_of(pack_contribution(restrict(whole, chunks), layout, codec, form)) for chunks in ranges]
    assert all(size <= limit or len(chunks) == 1 for size, chunks in zip(sizes, ranges, strict=True))
    rounding = 3 * len(layout.shapes)
    assert all(one + other > limit - rounding for one, other in pairwise(sizes))


def test_a_layout_without_chunks_has_one_part() -> None:
    layout = ParameterLayout([TensorSpec("empty", (0, 4), 0)])
    (chunks,) = cut(layout, 32, "sign")
    assert len(chunks) == 0
    assert pack_contribution(restrict(SparseUpdate({}, frozenset()), chunks), layout, "sign") == {}


def test_a_model_of_a_hundred_million_parameters() -> None:
    """By hand: 24,576 chunks of 32 * (12 + 8) + 16 bits, 82 bytes, of which 1 MiB holds 12,787."""
    layout = ParameterLayout([TensorSpec(f"{layer}", (4096, 4096), 0) for layer in range(6)])
    assert contribution_bytes(layout, 32, "int8") == 24_576 * 82
    assert [len(chunks) for chunks in cut(layout, 32, "int8")] == [24_576]
    assert [len(chunks) for chunks in cut(layout, 32, "int8", limit=1 << 20)] == [12_787, 11_789]
    assert 12_787 * 82 <= 1 << 20 < 12_788 * 82
    assert PART_BYTES == 6 * 1024 * 1024


def test_a_tensor_without_values_in_one_part_has_zeros_there() -> None:
    """Tensor a cancels in its first chunk only, and b everywhere; c is a dense vector that cancels in its first row."""
    layout = ParameterLayout(
        [TensorSpec("a", (40, 20), 0), TensorSpec("b", (40, 20), 0), TensorSpec("c", (40,), 0)], 32
    )
    assert layout.chunk_count == 6
    sites = []
    for a, b, c in ((1, 1, 1), (-1, -1, -1)):
        big = Coefficients(
            np.arange(4), np.zeros((4, 1), np.uint16), np.array([[a], [1], [b], [b]], np.int8), np.ones(4, np.float32)
        )
        row = Coefficients(
            np.array([4]), np.arange(32, dtype=np.uint16)[None], np.full((1, 32), c, np.int8), np.ones(1, np.float32)
        )
        rest = Coefficients(
            np.array([5]), np.arange(8, dtype=np.uint16)[None], np.full((1, 8), 1, np.int8), np.ones(1, np.float32)
        )
        sites.append(SparseUpdate({(1, 8): rest, (1, 32): row, (20, 20): big}, frozenset()))
    ranges = [range(number, number + 1) for number in range(6)]
    parts = [without_empty_tensors(aggregate(sites, layout, [0, 0], chunks=chunks), layout) for chunks in ranges]
    assert [sorted(part.absent) for part in parts] == [[0, 1, 2], [1, 2], [0, 1, 2], [0, 1, 2], [0, 1, 2], [0, 1]]
    joined = join_parts(parts, layout, ranges)
    assert_same(joined, aggregate(sites, layout, [0, 0]))
    assert joined.absent == {1}
    with pytest.raises(ValueError, match="5 parts for 6 ranges"):
        join_parts(parts[:5], layout, ranges)
