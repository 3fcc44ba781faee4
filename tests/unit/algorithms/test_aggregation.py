import math
from collections import defaultdict
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from algorithms.aggregate import aggregate, norm, outlier_halvings
from algorithms.codec import Coefficients, SparseUpdate, digest_arrays, pack_update
from algorithms.layout import ParameterLayout, TensorSpec

Contribute = Callable[..., SparseUpdate]


def by_hand(sites: list[SparseUpdate], halvings: list[int], shape: Any, chunk: int) -> tuple[dict[int, int], int, int]:
    """Rule B3 for one chunk in rational numbers: values by index, exponent, bits."""
    sent = []
    for site, halving in zip(sites, halvings, strict=True):
        part = site.shapes[shape]
        row = int(np.searchsorted(part.chunks, chunk))
        if row < part.chunks.size and part.chunks[row] == chunk and part.scales[row] > 0:
            scale = Fraction(float(part.scales[row])) / 2**halving
            exponent = math.frexp(float(scale))[1] + (7 if site.codec == "int8" else 0)
            sent.append(
                (dict(zip(part.indices[row].tolist(), part.values[row].tolist(), strict=True)), scale, exponent)
            )
    if not sent:
        return {}, 0, 4
    top = max(exponent for _, _, exponent in sent)
    values = defaultdict(list)
    for coefficients, scale, _ in sent:
        for index, value in coefficients.items():
            values[index].append(round(value * scale * Fraction(2) ** (22 - top)))
    means = {index: round(Fraction(sum(found), len(found))) for index, found in values.items()}
    nonzeros = sum(value != 0 for value in means.values())
    bits = 4 if nonzeros <= 148 else 6 if nonzeros <= 512 else 8
    shift = 0
    while round(Fraction(max(map(abs, means.values())), 2**shift)) > 2 ** (bits - 1) - 1:
        shift += 1
    return {index: round(Fraction(v, 2**shift)) for index, v in means.items()}, top - 22 + shift, bits


@pytest.mark.parametrize("codec", ["sign", "int8"])
@pytest.mark.parametrize(("k", "halvings"), [(20, [0]), (100, [0, 1, 0]), (700, [2, 0, 0, 1])])
def test_aggregate_follows_the_rule(
    small_layout: ParameterLayout, contribute: Contribute, codec: Any, k: int, halvings: list[int]
) -> None:
    absences = [frozenset(), frozenset({1}), frozenset({0}), frozenset({2})]
    sites = [contribute(small_layout, k, codec, seed, absences[seed]) for seed in range(len(halvings))]
    sites = [site for site in sites if (50, 35) in site.shapes]
    halvings = halvings[: len(sites)]
    update = aggregate(sites, small_layout, halvings)
    for shape, part in update.shapes.items():
        ends = np.cumsum(part.counts)
        for row, chunk in enumerate(part.chunks):
            mine = slice(ends[row] - part.counts[row], ends[row])
            got = dict(zip(part.indices[mine].tolist(), part.values[mine].tolist(), strict=True))
            having = [(site, halving) for site, halving in zip(sites, halvings, strict=True) if shape in site.shapes]
            values, exponent, bits = by_hand([s for s, _ in having], [h for _, h in having], shape, chunk)
            assert {index: value for index, value in got.items() if value} == {i: v for i, v in values.items() if v}
            assert (part.exponents[row], part.bits[row]) == (exponent, bits)


def test_order_of_sites_does_not_matter(odd_layout: ParameterLayout, contribute: Contribute) -> None:
    sites = [contribute(odd_layout, 16, "int8", seed) for seed in range(5)]
    halvings = [0, 0, 1, 0, 3]
    digests = {
        digest_arrays(
            pack_update(aggregate([sites[i] for i in order], odd_layout, [halvings[i] for i in order]), odd_layout)
        )
        for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 4, 1, 3])
    }
    assert len(digests) == 1
    changed = aggregate(sites, odd_layout, [1, 0, 1, 0, 3])
    assert digest_arrays(pack_update(changed, odd_layout)) not in digests


@pytest.mark.parametrize("sites", [2, 5])
def test_equal_sites_average_to_one(small_layout: ParameterLayout, contribute: Contribute, sites: int) -> None:
    site = contribute(small_layout, 30, "int8", 1)
    alone = pack_update(aggregate([site], small_layout, [0]), small_layout)
    together = pack_update(aggregate([site] * sites, small_layout, [0] * sites), small_layout)
    assert digest_arrays(alone) == digest_arrays(together)


def scalar(value: int, scale: float) -> SparseUpdate:
    values = np.array([[value]], np.int8)
    part = Coefficients(np.array([0]), np.zeros((1, 1), np.uint16), values, np.array([scale], np.float32))
    return SparseUpdate({(1, 1): part}, frozenset())


def test_cancelled_and_zero_tensors_are_absent() -> None:
    layout = ParameterLayout([TensorSpec("w", (), 0)])
    assert aggregate([scalar(1, 1.0), scalar(-1, 1.0)], layout, [0, 0]).absent == {0}
    assert aggregate([scalar(1, 0.0)], layout, [0]).absent == {0}
    part = aggregate([scalar(1, 0.0), scalar(-1, 1.5)], layout, [0, 0]).shapes[1, 1]
    assert part.values[0] * 2.0 ** part.exponents[0] == -1.5


def test_aggregate_refuses(small_layout: ParameterLayout, contribute: Contribute) -> None:
    site = contribute(small_layout, 4, "int8", 0)
    with pytest.raises(ValueError, match="1 contributions but 2 halvings"):
        aggregate([site], small_layout, [0, 0])
    with pytest.raises(ValueError, match="halvings must be 0 to 300"):
        aggregate([site], small_layout, [-1])
    with pytest.raises(ValueError, match="beyond 1"):
        aggregate([SparseUpdate(site.shapes, site.absent)], small_layout, [0])
    with pytest.raises(ValueError, match="chunks that the layout has not"):
        aggregate([scalar(1, 1.0)], ParameterLayout([TensorSpec("v", (64,), 0), TensorSpec("w", (), 0)]), [0])


def test_norm() -> None:
    assert norm(scalar(-1, 1.5)) == 1.5
    part = Coefficients(
        np.arange(2), np.zeros((2, 2), np.uint16), np.array([[3, 4], [0, 127]], np.int8), np.array([2, 0.5], np.float32)
    )
    assert norm(SparseUpdate({(9, 9): part}, frozenset(), "int8")) == pytest.approx(math.hypot(10, 63.5))


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
