from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from algorithms.updates import CODEC_BITS, CODEC_LIMITS, Codec
from algorithms.values import MAX_SCALE, bfloat16, from_bfloat16, pack_values, quantise, unpack_values

CODECS = get_args(Codec)
INTEGERS = [codec for codec in CODECS if codec != "sign"]

ROWS = st.integers(1, 6).flatmap(
    lambda rows: arrays(
        np.float32,
        st.tuples(st.just(rows), st.integers(1, 9)),
        elements=st.one_of(
            st.floats(-4, 4, width=32),
            st.floats(width=32, allow_nan=False, allow_infinity=False),
            st.sampled_from([0.0, -0.0, 2.0**-149, -(2.0**-126), 2.0**100]),
        ),
    )
)


def test_signs_and_mean_magnitude() -> None:
    values, scales = quantise(np.array([[1.0, -2.0, 3.0], [0.0, 0.0, 0.0], [-0.0, 1.0, -1.0]], np.float32), "sign")
    assert values[[0, 2]].tolist() == [[1, -1, 1], [1, 1, -1]]
    assert scales.tolist() == [2.0, 0.0, pytest.approx(2 / 3, rel=2**-8)]


@pytest.mark.parametrize(
    ("codec", "expected"),
    [
        ("int2", [3, -3, 3, 1, -1, 1, -1, 1]),
        ("int4", [7, -7, 5, 4, -2, 1, 0, 0]),
        ("int8", [127, -127, 86, 74, -42, 21, -2, 0]),
        ("int16", [32639, -32639, 22102, 19018, -10794, 5397, -514, 0]),
    ],
)
def test_nearest_integers(codec: Codec, expected: list[int]) -> None:
    """In units of 1/32 the scales are 127/3, up to 42.5, 127/7, up to 18.25, 1, and 127/32767, up to 255/65536."""
    values = np.array([[127, -127, 86, 74, -42, 21, -2, 0]], np.float32) / 32
    integers, scales = quantise(values, codec)
    exact = 127 / 32 / CODEC_LIMITS[codec]
    assert exact <= scales[0] <= exact * (1 + 2**-7)
    assert integers.tolist() == [expected]


def test_int2_has_odd_integers_only_and_ties_go_to_one() -> None:
    values = np.array([[3, 2.001, 2, 1, 0, -0.0, -1e-30, -2, -2.001, -3]], np.float32)
    integers, scales = quantise(values, "int2")
    assert scales.tolist() == [1.0]
    assert integers.tolist() == [[3, 3, 1, 1, 1, 1, -1, -1, -3, -3]]


@pytest.mark.parametrize("codec", INTEGERS)
@given(ROWS)
def test_nothing_is_cut_and_every_integer_is_one_of_the_codec(codec: Codec, rows: np.ndarray) -> None:
    integers, scales = quantise(rows, codec)
    limit = CODEC_LIMITS[codec]
    assert integers.dtype == (np.int16 if codec == "int16" else np.int8)
    assert np.abs(integers.astype(int)).max() <= limit
    assert codec != "int2" or (integers % 2 == 1).all()
    assert np.array_equal(from_bfloat16(bfloat16(scales)), scales)
    peaks = np.abs(rows).max(axis=1).astype(np.float64)
    assert np.array_equal(scales == 0, peaks == 0)
    fits = peaks <= limit * MAX_SCALE
    assert (scales[~fits] == MAX_SCALE).all()
    assert (limit * scales[fits].astype(np.float64) >= peaks[fits]).all()
    below = from_bfloat16(bfloat16(scales) - (scales > 0).astype(np.uint16))
    assert (limit * below.astype(np.float64) <= peaks).all()
    sent = integers * scales[:, None]
    assert sent.dtype == np.float32
    assert np.isfinite(sent).all()
    error = np.abs(sent.astype(np.float64) - rows)[fits & (peaks > 0)]
    allowed = scales[fits & (peaks > 0), None] * (1.0 if codec == "int2" else 0.5 + limit * 2.0**-23)
    assert (error <= allowed).all()


@given(ROWS)
def test_the_scale_of_signs_is_the_nearest_to_the_mean(rows: np.ndarray) -> None:
    integers, scales = quantise(rows, "sign")
    assert np.array_equal(integers, np.where(rows < 0, -1, 1))
    means = np.minimum(np.abs(rows.astype(np.float64)).mean(axis=1), MAX_SCALE)
    assert np.allclose(scales, means, rtol=2**-8, atol=2.0**-134)
    assert (scales <= MAX_SCALE).all()


def test_bfloat16_rounds_ties_to_even() -> None:
    floats = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-7], np.float32)
    assert bfloat16(floats).tolist() == [0x3F80, 0x3F80, 0x3F82, 0x3F81]


def test_unknown_codec() -> None:
    with pytest.raises(ValueError, match=r"codec must be one of .*'int16'.*, got 'int3'"):
        quantise(np.ones((1, 1), np.float32), "int3")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("codec", "values", "expected"),
    [
        ("sign", [1, -1, -1, 1, 1, 1, 1, 1, -1], [0b00000110, 0b1]),
        ("int2", [-3, -1, 1, 3, -1], [0b11100100, 0b01]),
        ("int4", [1, -1, -7], [0xF1, 0x9]),
        ("int8", [1, -1, -127], [1, 0xFF, 0x81]),
        ("int16", [1, -2, -32767], [1, 0, 0xFE, 0xFF, 1, 0x80]),
    ],
)
def test_bits_of_values(codec: Any, values: list[int], expected: list[int]) -> None:
    integers = np.array(values, np.int16 if codec == "int16" else np.int8)
    packed = pack_values(integers, codec)
    assert packed.tolist() == expected
    read = unpack_values(packed, codec, len(values))
    assert read.dtype == integers.dtype
    assert read.tolist() == values


@pytest.mark.parametrize("codec", CODECS)
@given(st.data())
def test_bits_of_values_round_trip(codec: Codec, data: Any) -> None:
    """Every word of bits reads as another integer, and back."""
    width = CODEC_BITS[codec]
    count = data.draw(st.integers(0, 40))
    raw = np.frombuffer(data.draw(st.binary(min_size=2 * count, max_size=2 * count)), np.uint8)[: count * width // 8]
    values = unpack_values(raw, codec, raw.size * 8 // width)
    assert np.array_equal(pack_values(values, codec), raw)
