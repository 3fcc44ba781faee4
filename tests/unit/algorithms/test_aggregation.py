import math
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from algorithms import averages
from algorithms.aggregate import aggregate, join, norm, outlier_halvings
from algorithms.layout import ParameterLayout, TensorSpec
from algorithms.settings import Average
from algorithms.updates import CODEC_LIMITS, AggregateUpdate, Codec, Coefficients, SparseUpdate
from tests.unit.algorithms.test_against_reference import Round, Rule, assert_same, rounds, rules, thorough

Contribute = Callable[..., SparseUpdate]

AVERAGES = get_args(Average)

pytestmark = pytest.mark.usefixtures("loops")


def one_chunk(*sites: tuple[dict[int, int], float], shape: tuple[int, int] = (10, 7)) -> list[SparseUpdate]:
    """Sites that each send some values, by index, of the only chunk of a layout."""
    contributions = []
    for values, scale in sites:
        part = Coefficients(
            np.array([0]),
            np.array([list(values)], np.uint16),
            np.array([list(values.values())], np.int8),
            np.array([scale], np.float32),
        )
        contributions.append(SparseUpdate({shape: part}, frozenset(), "int8"))
    return contributions


ONE_CHUNK = ParameterLayout([TensorSpec("w", (10, 7), 0)])


def result(contributions: list[SparseUpdate], layout: ParameterLayout = ONE_CHUNK, **rule: Any) -> dict[int, float]:
    """The values of the only chunk by index."""
    update = aggregate(contributions, layout, [0] * len(contributions), **rule)
    if not update.shapes:
        return {}
    (part,) = update.shapes.values()
    values = part.values * 2.0 ** part.exponents[0]
    return dict(zip(part.indices.tolist(), values.tolist(), strict=True))


# --- what does not matter ---------------------------------------------------------------------------------------------


@thorough
@given(rounds(mixed=True), st.data())
def test_order_of_sites_does_not_matter(round_: Round, data: Any) -> None:
    count = len(round_.contributions)
    rule = data.draw(rules(count))
    halvings = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    order = data.draw(st.permutations(range(count)))
    moved = Rule(rule.average, rule.tokens and tuple(rule.tokens[i] for i in order), rule.largest)
    assert_same(
        aggregate([round_.contributions[i] for i in order], round_.layout, [halvings[i] for i in order], **vars(moved)),
        aggregate(round_.contributions, round_.layout, halvings, **vars(rule)),
    )


@thorough
@given(rounds(mixed=True), st.data(), st.sampled_from([1, 7, 100, 3000]))
def test_size_of_tiles_does_not_matter(round_: Round, data: Any, size: int) -> None:
    rule = data.draw(rules(len(round_.contributions)))
    halvings = [0] * len(round_.contributions)
    whole = aggregate(round_.contributions, round_.layout, halvings, **vars(rule))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(averages, "TILE_KEYS", size)
        assert_same(aggregate(round_.contributions, round_.layout, halvings, **vars(rule)), whole)


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("sites", [2, 5])
def test_equal_sites_average_to_one(
    odd_layout: ParameterLayout, contribute: Contribute, sites: int, average: Average
) -> None:
    site = contribute(odd_layout, 30, "int8", 1)
    together = aggregate([site] * sites, odd_layout, [0] * sites, average=average, tokens=[7] * sites)
    assert_same(together, aggregate([site], odd_layout, [0]))


def test_contributions_are_taken_one_by_one(contribute: Contribute) -> None:
    """What is kept of each is its coefficients, at 3 bytes, and 12 bytes per chunk."""
    layout = ParameterLayout([TensorSpec("w", (512, 512), 0)])
    sites, k = 6, 64
    memory: list[int] = []

    def unpacked() -> Iterator[SparseUpdate]:
        for seed in range(sites):
            yield contribute(layout, k, "int8", seed)
            memory.append(tracemalloc.get_traced_memory()[0])

    tracemalloc.start()
    update = aggregate(unpacked(), layout, [0] * sites)
    tracemalloc.stop()
    assert_same(update, aggregate([contribute(layout, k, "int8", seed) for seed in range(sites)], layout, [0] * sites))
    each = layout.chunk_count * (3 * k + 12)
    assert max(later - earlier for earlier, later in pairwise(memory)) < each + 4000  # of records and arrays


def test_memory_does_not_grow_with_the_model_beyond_the_update(contribute: Contribute) -> None:
    layout = ParameterLayout([TensorSpec("w", (2048, 2048), 0)])
    contributions = [contribute(layout, 64, "int8", 0)] * 16
    tracemalloc.start()
    update = aggregate(contributions, layout, [0] * 16)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < sum(array.nbytes for part in update.shapes.values() for array in vars(part).values()) * 1.1
    assert peak < 2 * kept + 12 * 8 * averages.TILE_KEYS


def test_places_without_coefficients_are_never_taken_for_an_index() -> None:
    """The last of 62,464 places in a row is empty: 4,096 + 62,463 in 16 bits would be 1,023, the last index sent."""
    layout = ParameterLayout([TensorSpec("w", (128, 64), 0)])

    def site(count: int, scales: list[float]) -> SparseUpdate:
        indices = np.tile(np.arange(1024 - count, 1024, dtype=np.uint16), (2, 1))
        part = Coefficients(np.arange(2), indices, np.ones(indices.shape, np.int8), np.array(scales, np.float32))
        return SparseUpdate({(64, 64): part}, frozenset())

    sites = [site(1024, [1, 1])] * 60 + [site(1023, [1, 1]), site(1, [0, 1])]
    part = aggregate(sites, layout, [0] * 62).shapes[64, 64]
    assert part.counts.tolist() == [1024, 1024]
    assert set(part.values.tolist()) == {64}


# --- ranges -----------------------------------------------------------------------------------------------------------


def part_of(update: SparseUpdate, chunks: range) -> SparseUpdate:
    shapes = {}
    for shape, sent in update.shapes.items():
        mine = (sent.chunks >= chunks.start) & (sent.chunks < chunks.stop)
        if mine.any():
            shapes[shape] = Coefficients(sent.chunks[mine], sent.indices[mine], sent.values[mine], sent.scales[mine])
    return SparseUpdate(shapes, update.absent, update.codec)


@thorough
@given(rounds(mixed=True), st.data(), st.booleans())
def test_ranges_join_to_the_whole(round_: Round, data: Any, in_parts: bool) -> None:
    layout, contributions = round_.layout, round_.contributions
    rule = data.draw(rules(len(contributions)))
    halvings = list(range(len(contributions)))
    cuts = data.draw(st.lists(st.integers(0, layout.chunk_count), max_size=4).map(sorted))
    updates = []
    for start, stop in pairwise([0, *cuts, layout.chunk_count]):
        chunks = range(start, stop)
        parts = [part_of(update, chunks) for update in contributions] if in_parts else contributions
        updates.append(aggregate(parts, layout, halvings, **vars(rule), chunks=chunks))
    assert_same(join(updates, layout), aggregate(contributions, layout, halvings, **vars(rule)))


def test_a_tensor_is_absent_only_if_it_is_in_all_ranges() -> None:
    """Tensor a cancels; b has a value in its second chunk only, so that its first one stays."""
    layout = ParameterLayout([TensorSpec("a", (40, 20), 0), TensorSpec("b", (40, 20), 0)], 32)
    assert layout.chunk_count == 4
    sites = []
    for values in ([[1], [1], [1], [1]], [[-1], [-1], [-1], [1]]):
        part = Coefficients(
            np.arange(4), np.zeros((4, 1), np.uint16), np.array(values, np.int8), np.ones(4, np.float32)
        )
        sites.append(SparseUpdate({(20, 20): part}, frozenset()))
    parts = [aggregate(sites, layout, [0, 0], chunks=chunks) for chunks in (range(3), range(3, 4))]
    joined = join(parts, layout)
    assert_same(joined, aggregate(sites, layout, [0, 0]))
    assert joined.absent == {0}
    part = joined.shapes[20, 20]
    assert (part.chunks.tolist(), part.counts.tolist()) == ([2, 3], [0, 1])
    for wrong in (parts[:1], parts[::-1], [*parts, parts[1]]):
        with pytest.raises(ValueError, match=r"not all chunks of shape \(20, 20\) in order"):
            join(wrong, layout)
    with pytest.raises(ValueError, match="nothing to join"):
        join([], layout)


# --- what does --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({}, {0: 1.0, 1: -2.5, 2: 0.5}),
        ({"average": "sites"}, {0: 1.0, 1: -1.25}),  # 0.125 becomes 0
        ({"average": "median"}, {0: 0.5, 1: -2.5, 2: 0.5}),
        ({"average": "tokens", "tokens": [2, 1, 1, 0]}, {0: 0.5, 1: -2.5, 2: 1.0}),  # 2/3
        ({"largest": 2}, {0: 1.0, 1: -2.5}),
    ],
)
def test_each_setting_changes_the_result(rule: dict[str, Any], expected: dict[int, float]) -> None:
    sites = one_chunk(({0: 1, 2: 1}, 0.5), ({0: 1, 1: -5}, 0.5), ({0: 1, 1: -5}, 0.5), ({0: 5}, 0.5))
    assert result(sites, **rule) == expected


@pytest.mark.parametrize(
    ("average", "expected"),
    [
        ("contributors", {1: 2, 2: -2, 3: 4, 4: 7, 5: -3}),  # 1.5, -2.5, 3.5
        ("sites", {1: 1, 2: -1, 3: 2, 4: 2, 5: -1}),  # 3/4, -5/4, 7/4, 7/4, -3/4; 6: 1/4
        ("median", {1: 2, 2: -2, 3: 4, 4: 7, 5: -3}),
    ],
)
def test_averages_are_rounded_to_even(average: Average, expected: dict[int, int]) -> None:
    """Large values that cancel leave small ones, in units of 2^-14: E = 8."""
    unit = 2.0**-14
    small = one_chunk(({1: 1, 2: -2, 3: 3, 4: 7, 6: 1}, unit), ({1: 2, 2: -3, 3: 4, 5: -3, 6: 0}, unit))
    update = result([*one_chunk(({0: 1}, 1.0), ({0: -1}, 1.0)), *small], average=average)
    assert {index: value / unit for index, value in update.items()} == expected


@pytest.mark.parametrize("codec", CODEC_LIMITS)
def test_the_unit_is_that_of_the_largest_scale_and_codec(codec: Codec) -> None:
    bits = {"sign": 0, "int2": 2, "int4": 3, "int8": 7, "int16": 15}[codec]
    unit = 2.0 ** (1 + bits - 22)
    for scale, expected in [(unit, {1: unit}), (unit / 2, {})]:
        large, opposite, small = one_chunk(({0: 1}, 1.0), ({0: -1}, 1.0), ({1: 1}, scale))
        sites = [SparseUpdate(site.shapes, frozenset(), codec) for site in (large, opposite)]
        assert result([*sites, SparseUpdate(small.shapes, frozenset(), "sign")]) == expected


def test_largest_keeps_the_first_of_equals() -> None:
    contributions = one_chunk(({3: 4, 5: -6, 8: 5}, 1.0), ({2: -5, 5: -6, 9: 5}, 1.0), ({60: 7}, 1.0))
    ordered = [60, 5, 2, 8, 9, 3]
    for most in range(1, 8):
        assert set(result(contributions, largest=most)) == set(ordered[:most])


def test_largest_leaves_dense_chunks_whole() -> None:
    layout = ParameterLayout([TensorSpec("w", (2, 2), 0)])
    contributions = one_chunk(({0: 1, 1: -2, 2: 0, 3: 4}, 1.0), shape=(2, 2))
    assert result(contributions, layout, largest=1) == {0: 1, 1: -2, 2: 0, 3: 4}


def test_largest_comes_before_the_bits_are_chosen() -> None:
    """600 non-zero results would have 8 bits each, 148 have 4."""
    layout = ParameterLayout([TensorSpec("w", (40, 40), 0)])
    values = dict.fromkeys(range(600), 100)
    for most, bits in [(None, 8), (513, 8), (512, 6), (149, 6), (148, 4)]:
        update = aggregate(one_chunk((values, 1.0), shape=(40, 40)), layout, [0], largest=most)
        assert update.shapes[40, 40].bits.tolist() == [bits]
        assert update.shapes[40, 40].counts.tolist() == [most or 600]


def test_sites_with_more_tokens_weigh_more() -> None:
    """The mean of their values is that of the weights 1.5 and 0.5, over two sites."""
    sites = one_chunk(({0: 4}, 1.0), ({0: -4}, 1.0))
    assert result(sites, average="tokens", tokens=[3, 1]) == {0: 2}
    assert result(sites, average="tokens", tokens=[1, 0]) == {0: 8}
    assert result(sites, average="tokens", tokens=[5, 5]) == {}


def test_without_any_tokens_the_update_is_empty(small_layout: ParameterLayout, contribute: Contribute) -> None:
    sites = [contribute(small_layout, 4, "int8", seed) for seed in range(2)]
    update = aggregate(sites, small_layout, [0, 0], average="tokens", tokens=[0, 0])
    assert update == AggregateUpdate({}, frozenset(range(len(small_layout.tensors))))


def test_weights_do_not_lead_to_exponents_that_readers_refuse() -> None:
    sites = one_chunk(({0: 127}, 2.0**112), *[({1: 1}, 1.0)] * 9)
    assert result(sites, average="tokens", tokens=[1] + [0] * 9) == result(sites[:1])


def test_cancelled_and_zero_tensors_are_absent() -> None:
    layout = ParameterLayout([TensorSpec("w", (), 0)])

    def scalars(*sites: tuple[int, float]) -> list[SparseUpdate]:
        return one_chunk(*(({0: value}, scale) for value, scale in sites), shape=(1, 1))

    assert aggregate(scalars((1, 1.0), (-1, 1.0)), layout, [0, 0]).absent == {0}
    assert aggregate(scalars((1, 0.0)), layout, [0]).absent == {0}
    assert aggregate([], layout, []).absent == {0}
    assert result(scalars((1, 0.0), (-1, 1.5)), layout) == {0: -1.5}


def test_products_are_rounded_before_they_are_added_to() -> None:
    """9 * (2 / 6) is 3 as a float64, and 1.5 units, rounded to even; unrounded it is a little less, hence one unit."""
    first = one_chunk(({3: 9}, 1.0))[0]
    part = Coefficients(np.array([0]), np.array([[5]], np.uint16), np.zeros((1, 1), np.int16), np.array([128.0], "f4"))
    second = SparseUpdate({(10, 7): part}, frozenset(), "int16")
    assert result([first, second], average="tokens", tokens=[1, 5]) == {3: 4.0}


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"halvings": [0, 0]}, "1 contributions but 2 halvings"),
        ({"halvings": [-1]}, "halvings must be 0 to 300"),
        ({"halvings": [301]}, "halvings must be 0 to 300"),
        ({"tokens": [1, 1]}, "1 contributions but 2 tokens"),
        ({"average": "tokens", "tokens": [-1]}, "tokens must be 0 to"),
        ({"average": "tokens", "tokens": [2**63]}, "tokens must be 0 to"),
        ({"average": "tokens"}, "needs the tokens"),
        ({"average": "mean"}, "average must be one of"),
        ({"largest": 0}, "largest must be at least 1"),
    ],
)
def test_aggregate_refuses_settings(rule: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        aggregate(one_chunk(({0: 1}, 1.0)), ONE_CHUNK, **({"halvings": [0]} | rule))


def test_aggregate_refuses_contributions() -> None:
    (site,) = one_chunk(({0: 2}, 1.0))
    with pytest.raises(ValueError, match="a value of a sign contribution is beyond 1"):
        aggregate([SparseUpdate(site.shapes, frozenset())], ONE_CHUNK, [0])
    (lowest,) = one_chunk(({0: -128}, 1.0))
    with pytest.raises(ValueError, match="a value of a int8 contribution is beyond 127"):
        aggregate([lowest], ONE_CHUNK, [0])
    other = ParameterLayout([TensorSpec("v", (64,), 0), TensorSpec("w", (10, 7), 0)])
    with pytest.raises(ValueError, match=r"chunks of shape \(10, 7\) that the layout has not"):
        aggregate([site], other, [0])
    with pytest.raises(ValueError, match=r"chunks of shape \(10, 7\) that the layout has not"):
        aggregate([SparseUpdate(site.shapes, frozenset({0}), "int8")], ONE_CHUNK, [0])


# --- outlier rule -----------------------------------------------------------------------------------------------------


def test_norm() -> None:
    assert norm(one_chunk(({0: -1}, 1.5))[0]) == 1.5
    part = Coefficients(
        np.arange(2), np.zeros((2, 2), np.uint16), np.array([[3, 4], [0, 127]], np.int8), np.array([2, 0.5], np.float32)
    )
    assert norm(SparseUpdate({(9, 9): part}, frozenset(), "int8")) == pytest.approx(math.hypot(10, 63.5))


def test_norm_of_the_largest_values() -> None:
    """No integer overflows: 16,384 squares of 32,767 are below 2^44."""
    values = np.full((3, 16384), -32767, np.int16)
    part = Coefficients(np.arange(3), np.zeros(values.shape, np.uint16), values, np.full(3, 2.0**104, np.float32))
    assert norm(SparseUpdate({(128, 128): part}, frozenset(), "int16")) == pytest.approx(
        math.sqrt(3 * 16384) * 32767 * 2.0**104
    )


@pytest.mark.parametrize(
    ("norms", "expected"),
    [
        ([], []),
        ([5.0], [0]),
        ([1.0, 1e6], [0, 19]),
        ([1.0, 2.0, 2.0], [0, 0, 0]),
        ([1.0, 1.0, 2.0001], [0, 0, 1]),
        ([0.0, 0.0, 5.0], [0, 0, 0]),
        ([1.0, 3.0], [0, 1]),
    ],
)
def test_outlier_halvings(norms: list[float], expected: list[int]) -> None:
    assert outlier_halvings(norms) == expected


def test_outlier_rule_refuses_nan() -> None:
    with pytest.raises(ValueError, match="finite"):
        outlier_halvings([1.0, math.nan])
