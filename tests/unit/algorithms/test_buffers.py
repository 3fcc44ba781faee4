"""Means of buffers, against fractions and torch's own rounding."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from algorithms.buffers import mean_block
from tests import reference

TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def raw(values, dtype):
    return torch.tensor(values, dtype=torch.float64).to(TYPES[dtype]).view(torch.uint8).numpy().tobytes()


def values_of(block, dtype):
    return torch.frombuffer(bytearray(block), dtype=TYPES[dtype])


def nearest(fraction, dtype):
    """By trying the neighbours of what double rounding gives; ties to even are not met here."""
    guess = torch.tensor(float(fraction), dtype=torch.float64).to(TYPES[dtype])
    near = [guess, *(torch.nextafter(guess, torch.tensor(end, dtype=guess.dtype)) for end in (-1e4, 1e4))]
    return min(near, key=lambda value: abs(Fraction(value.item()) - fraction)).item()


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_the_mean_is_rounded_once(dtype):
    random = np.random.default_rng(3)
    copies = [raw(random.standard_normal(200) * 3, dtype) for _ in range(3)]
    weights = [700, 41, 0]
    mean = values_of(mean_block(copies, weights, dtype), dtype)
    held = [[Fraction(value.item()) for value in values_of(copy, dtype)] for copy in copies]
    wanted = [
        sum(weight * copy[place] for copy, weight in zip(held, weights, strict=True)) / sum(weights)
        for place in range(200)
    ]
    assert mean.tolist() == [nearest(fraction, dtype) for fraction in wanted]


@pytest.mark.parametrize("dtype", [*TYPES, "I64"])
def test_the_same_bits_as_the_reference(dtype):
    """Of any bytes at all: subnormal numbers, infinities and NaN among them."""
    random = np.random.default_rng(4)
    copies = [random.bytes(8 * 300) for _ in range(3)]
    copies[1] = copies[0][:80] + copies[1][80:]
    for weights in ([700, 41, 9], [0, 3, 3], [2**40, 1, 0], [0, 0, 0]):
        assert mean_block(copies, weights, dtype) == reference.mean_of_buffers(copies, weights, dtype)


def test_bfloat16_is_not_rounded_twice():
    """Half of the last place and a little more, which float32 would round to a tie."""
    base, place = 1.0, 2.0**-7
    above = base + place / 2 + 2.0**-40
    copies = [raw([base, base], "BF16"), raw([base + place, base + place], "BF16")]
    weights = [2**40 - 2**8, 2**40 + 2**8]
    exact = (weights[0] * base + weights[1] * (base + place)) / sum(weights)
    assert base + place / 2 < exact < above + place
    assert values_of(mean_block(copies, weights, "BF16"), "BF16").tolist() == [base + place] * 2


def test_elements_that_are_not_finite_are_left_out():
    copies = [raw([float("nan"), -float("inf"), 1.0], "F32"), raw([3.0, -float("inf"), 2.0], "F32")]
    assert values_of(mean_block(copies, [5, 5], "F32"), "F32").tolist() == [3.0, -float("inf"), 1.5]


def test_equal_copies_integers_and_copies_without_weight():
    third = raw([1 / 3], "F64")
    assert mean_block([third, third], [1, 2], "F64") == third
    assert mean_block([b"\1" * 8, b"\2" * 8], [1, 9], "I64") == b"\1" * 8
    assert mean_block([raw([1.0], "F32"), raw([2.0], "F32")], [0, 0], "F32") == raw([1.0], "F32")
