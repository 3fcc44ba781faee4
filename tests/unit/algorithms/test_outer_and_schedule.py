from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from algorithms.outer import (
    BLOCK,
    OuterOptimizer,
    heavy_ball,
    nesterov,
    outer_update,
    pseudo_gradient,
    weighted_mean,
)
from algorithms.schedule import learning_rate, outer_due


def floats(seed: int, size: int = 1000) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def test_weighted_mean() -> None:
    copies = [floats(seed) for seed in range(3)]
    mean = weighted_mean(copies, [1, 2, 5])
    exact = [
        float(sum(Fraction(float(x)) * w for x, w in zip(row, (1, 2, 5), strict=True)) / 8)
        for row in zip(*copies, strict=True)
    ]
    assert np.abs(mean - exact).max() < 1e-15
    assert np.array_equal(weighted_mean(copies, [0, 7, 0]), copies[1])


@pytest.mark.parametrize("sites", [1, 2, 5])
def test_equal_copies_average_to_themselves(sites: int) -> None:
    copy = floats(0, BLOCK + 3)
    mean = weighted_mean([copy] * sites, [3] * sites)
    assert np.array_equal(mean.astype(np.float32), copy)


@pytest.mark.parametrize("weights", [[0, 0], [-1, 2], [1]])
def test_bad_weights(weights: list[int]) -> None:
    with pytest.raises(ValueError, match="weights"):
        weighted_mean([floats(0), floats(1)], weights)


def test_sizes_must_agree() -> None:
    with pytest.raises(ValueError, match="one size"):
        weighted_mean([floats(0), floats(1, 7)], [1, 1])
    with pytest.raises(ValueError, match="one size"):
        nesterov(floats(0), floats(1, 7), floats(2).astype(np.float64), 1.0, 0.0)


def test_outer_step_without_momentum_takes_the_mean() -> None:
    anchor, mean = floats(0), floats(1).astype(np.float64) / 3
    new, buffer = nesterov(anchor, np.zeros_like(anchor), mean, 1.0, 0.0)
    assert np.array_equal(new, mean.astype(np.float32))
    assert np.array_equal(buffer, pseudo_gradient(anchor, mean).astype(np.float32))
    same, _ = nesterov(anchor, np.zeros_like(anchor), mean, 0.0, 0.9)
    assert np.array_equal(same, anchor)


@pytest.mark.parametrize("optimizer", ["nesterov", "sgd"])
def test_a_learning_rate_of_0_changes_no_bit(optimizer: OuterOptimizer) -> None:
    anchor = np.array([-0.0, 1.0], np.float32)
    same, _ = outer_update(optimizer, anchor, np.array([1.0, -1.0], np.float32), np.array([1.0, 3.0]), 0.0, 0.9)
    assert same.tobytes() == anchor.tobytes()


def test_momentum_without_look_ahead() -> None:
    anchor, buffer, mean = np.array([2.0], np.float32), np.array([4.0], np.float32), np.array([1.0])
    assert [array[0] for array in heavy_ball(anchor, buffer, mean, 0.5, 0.25)] == [2 - 0.5 * 2, 2]
    assert [array[0] for array in nesterov(anchor, buffer, mean, 0.5, 0.25)] == [2 - 0.5 * (1 + 0.25 * 2), 2]


def test_the_average_is_the_mean_and_has_no_momentum() -> None:
    anchor, buffer, mean = floats(0), floats(1), floats(2).astype(np.float64) / 3
    new, same = outer_update("average", anchor, buffer, mean, 0.7, 0.9)
    assert np.array_equal(new, mean.astype(np.float32))
    assert same is buffer


def test_outer_step_is_the_formula() -> None:
    anchor, buffer, mean = floats(0, BLOCK + 5), floats(1, BLOCK + 5), floats(2, BLOCK + 5).astype(np.float64)
    new_anchor, new_buffer = nesterov(anchor, buffer, mean, 0.7, 0.5)
    gradient = anchor.astype(np.float64) - mean
    momenta = 0.5 * buffer.astype(np.float64) + gradient
    assert np.array_equal(new_buffer, momenta.astype(np.float32))
    assert np.array_equal(new_anchor, (anchor - 0.7 * (gradient + 0.5 * momenta)).astype(np.float32))
    assert new_anchor.dtype == new_buffer.dtype == np.float32


def test_the_step_goes_towards_the_mean() -> None:
    anchor, mean = np.array([1.0], np.float32), np.array([0.5])
    assert pseudo_gradient(anchor, mean)[0] == 0.5
    assert nesterov(anchor, np.zeros(1, np.float32), mean, 0.5, 0.0)[0][0] == 0.75


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", {1: 0.1, 5: 0.5, 10: 1.0, 60: 1.0, 110: 1.0}),
        ("cosine", {1: 0.1, 10: 1.0, 60: 0.55, 110: 0.1, 500: 0.1}),
        ("linear", {1: 0.1, 10: 1.0, 60: 0.55, 110: 0.1, 500: 0.1}),
    ],
)
def test_learning_rate(schedule: Any, expected: dict[int, float]) -> None:
    for step, rate in expected.items():
        value = learning_rate(step, lr=1.0, steps=110, warmup=10, schedule=schedule)
        assert value == pytest.approx(rate, rel=1e-6)
        assert float(np.float32(value)) == value


def test_learning_rate_without_warmup_starts_near_the_peak() -> None:
    assert learning_rate(1, lr=0.5, steps=1, warmup=0, schedule="linear") == pytest.approx(0.05)
    assert learning_rate(1, lr=0.5, steps=1000, warmup=0, schedule="cosine") == pytest.approx(0.5, rel=1e-4)


def test_learning_rate_refuses() -> None:
    with pytest.raises(ValueError, match="steps count from 1"):
        learning_rate(0, lr=1.0, steps=1, warmup=0, schedule="linear")
    with pytest.raises(ValueError, match="schedule must be"):
        learning_rate(1, lr=1.0, steps=1, warmup=0, schedule="step")  # type: ignore[arg-type]


def test_outer_due() -> None:
    assert [step for step in range(1, 13) if outer_due(step, 5, 12)] == [5, 10, 12]
    assert not any(outer_due(step, None, 12) for step in range(1, 13))
