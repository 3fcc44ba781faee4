"""Uploads of outer rounds in fewer bits: their bits, against the slow reference, and what is left of them."""

from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from algorithms.codec import pack_contribution, unpack_contribution
from algorithms.coefficients import fragment_layout, write_values
from algorithms.compression import PICKED, SCALED, ElementCodec, decode, encode, encoded_range, left_over, wanted
from algorithms.fragment_picks import pick_largest
from algorithms.layout import ParameterLayout, TensorSpec
from algorithms.updates import SparseUpdate
from tests import reference

CODECS = get_args(ElementCodec)
UPLOAD = {"bf16": reference.upload_bf16, "int8": reference.upload_int8}
READ = {"bf16": reference.read_bf16, "int8": reference.read_int8}
SIZES = [0, 1, 7, SCALED, SCALED + 3]


def normal(seed: int, size: int, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


def spread(seed: int, size: int) -> np.ndarray:
    """Of many magnitudes, with zeros and numbers on ties."""
    values = np.ldexp(normal(seed, size), np.random.default_rng(seed).integers(-60, 60, size)).astype(np.float32)
    values[::5] = 0
    values[::7] = np.round(values[::7] * 256) / 256
    return values


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("size", SIZES)
def test_bits(codec: ElementCodec, size: int) -> None:
    tiny = np.full(size % SCALED, 1e-45, np.float32)
    for values in (spread(size, size), tiny, 190 * tiny, -np.abs(normal(1, tiny.size))):
        data = encode(codec, values)
        assert data.tobytes() == UPLOAD[codec](values)
        assert decode(codec, data, values.size).tobytes() == READ[codec](data.tobytes()).tobytes()


@pytest.mark.parametrize("words", [[0x3F808000], [0x3F818000], [0x3F818001], [0x3F817FFF]])
def test_bfloat16_ties_are_even(words: list[int]) -> None:
    values = np.array(words, np.uint32).view(np.float32)
    assert encode("bf16", values).tobytes() == reference.upload_bf16(values)


@pytest.mark.parametrize("codec", CODECS)
def test_a_range_of_values_is_a_range_of_bytes(codec: ElementCodec) -> None:
    values = normal(3, 3 * SCALED + 5)
    whole = encode(codec, values)
    for start in range(0, values.size, SCALED):
        for stop in (start + SCALED, values.size):
            part = encoded_range(codec, start, min(stop, values.size))
            data = whole[part.start : part.stop]
            assert np.array_equal(data, encode(codec, values[start:stop]))
            expected = decode(codec, whole, values.size)[start:stop]
            assert np.array_equal(decode(codec, data, expected.size), expected)
    assert len(whole) == encoded_range(codec, 0, values.size).stop


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so_and_leaves_nothing(codec: ElementCodec, bad: float) -> None:
    values = normal(0, SCALED + 9)
    values[3] = bad
    decoded = decode(codec, encode(codec, values), values.size)
    assert np.isnan(decoded[3])
    assert np.isfinite(decoded[SCALED:]).all()
    assert np.isfinite(left_over(values, decoded)).all()


@pytest.mark.parametrize(
    ("codec", "data", "message"),
    [
        ("bf16", np.zeros(5, np.uint8), "3 values of bf16 take 6 bytes, got 5"),
        ("int8", np.zeros(6, np.uint8), "3 values of int8 take 7 bytes, got 6"),
        ("int8", np.array([0, 0, 0x80, 0xBF, 1, 2, 3], np.uint8), "a scale is negative: -1.0"),
        ("int8", np.array([0, 0, 0x80, 0x3F, 1, 128, 3], np.uint8), "a value is below -127"),
    ],
)
def test_damaged_uploads_are_refused(codec: ElementCodec, data: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode(codec, data, 3)


def test_wanted_rounds_twice() -> None:
    anchor, copy, left = (np.array([value], np.float32) for value in (1, -(2.0**-25), 2.0**-24))
    assert wanted(anchor, copy, left)[0] == 1, "with one rounding it would be above 1"


# --- coefficients ---------------------------------------------------------------------------------------------------

SHAPES = {"a": (100, 70), "b": (70,), "c": (), "d": (40, 8, 3, 3), "e": (0, 3), "f": (3, 90, 33)}


def odd_layout(chunk: int = 64) -> ParameterLayout:
    return ParameterLayout([TensorSpec(name, shape, 0) for name, shape in SHAPES.items()], chunk)


def sent_and_read(values: np.ndarray, layout: ParameterLayout, k: int) -> tuple[SparseUpdate, np.ndarray]:
    """Through the wire, as the coordinator reads it."""
    arrays = pack_contribution(pick_largest(values, layout, k), layout, PICKED, "compact")
    update = unpack_contribution(arrays, layout, codec=PICKED, k=k, absent=(), indices="compact")
    decoded = np.full_like(values, np.nan)
    write_values(update, layout, decoded)
    return update, decoded


@pytest.mark.parametrize("chunk", [32, 64, 128])
def test_coefficients_are_those_of_the_reference(chunk: int) -> None:
    layout = odd_layout(chunk)
    values = normal(5, layout.parameter_count)
    _, decoded = sent_and_read(values, layout, 40)
    tensors = [(tensor.name, tensor.shape) for tensor in layout.tensors]
    arrays = pack_contribution(pick_largest(values, layout, 40), layout, PICKED, "compact")
    sent = reference.unpack_contribution(arrays, tensors, chunk, PICKED, 40, [], "compact")
    assert decoded.tobytes() == reference.contribution_values(sent, tensors, chunk).tobytes()


def test_all_coefficients_are_nearly_everything() -> None:
    layout = odd_layout()
    values = normal(6, layout.parameter_count)
    _, decoded = sent_and_read(values, layout, 64 * 64)
    assert np.linalg.norm(values - decoded) < 0.02 * np.linalg.norm(values)


def test_absent_tensors_say_zero_and_sizes_are_checked() -> None:
    layout = odd_layout()
    full = pick_largest(normal(7, layout.parameter_count), layout, 40)
    flat = np.full(layout.parameter_count, np.nan, np.float32)
    write_values(SparseUpdate({}, frozenset(range(len(layout.tensors))), PICKED), layout, flat)
    assert not flat.any()
    with pytest.raises(ValueError, match=f"{layout.parameter_count} elements"):
        write_values(full, layout, flat[1:])


def test_a_fragment_is_a_layout_of_its_own() -> None:
    layout = odd_layout(32)
    fragment = fragment_layout(layout, range(1, 4))
    assert [tensor.name for tensor in fragment.tensors] == ["b", "c", "d"]
    assert (fragment.chunk, fragment.transform) == (32, "dct")
    values = normal(8, layout.parameter_count)
    part = values[layout.offsets[1] : layout.offsets[4]]
    _, decoded = sent_and_read(part, fragment, 1024)
    assert np.linalg.norm(part - decoded) < 0.02 * np.linalg.norm(part)


# --- error feedback -------------------------------------------------------------------------------------------------

ROUNDS = 60


def say(codec: str, values: np.ndarray, layout: ParameterLayout) -> np.ndarray:
    if codec == "topk":
        return sent_and_read(values, layout, 128)[1]
    return decode(codec, encode(codec, values), values.size)  # type: ignore[arg-type]


BOUNDS = {"bf16": 2.0**-7, "int8": 0.1, "topk": 60.0}
"""How much may be left, in norms of one pseudo-gradient: of 4,096 normal values the largest is 4 times the root mean
square, so that half an integer step is 4/254 of it; of 128 coefficients among 4,096 little more than 1/32 of the square
goes in every round, which leaves at most 1 / (1 - sqrt(1 - 1/32)) = 63."""


@pytest.mark.parametrize("codec", ["bf16", "int8", "topk"])
@pytest.mark.parametrize("same", [True, False])
def test_what_is_left_stays_bounded_and_nothing_is_lost(codec: str, same: bool) -> None:
    layout = ParameterLayout([TensorSpec("a", (64, 128), 0), TensorSpec("b", (33,), 0)])
    anchor = np.zeros(layout.parameter_count, np.float32)
    left, all_wanted, all_said = (np.zeros(layout.parameter_count) for _ in range(3))
    left = left.astype(np.float32)
    peaks = []
    for number in range(ROUNDS):
        copy = normal(1 if same else number, anchor.size)
        want = wanted(anchor, copy, left)
        said = say(codec, want, layout)
        left = left_over(want, said)
        all_wanted -= copy
        all_said += said
        peaks.append(np.linalg.norm(left) / np.linalg.norm(copy))
    assert max(peaks) < BOUNDS[codec]
    assert np.abs(all_said + left - all_wanted).max() < ROUNDS * 2.0**-24 * 128, "sent and left is all that was wanted"
    assert np.linalg.norm(left) > 0


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(CODECS), st.integers(0, 2**32 - 1), st.floats(2.0**-40, 2.0**40), st.integers(1, 50))
def test_of_bounded_input_a_bounded_rest_is_left(codec: ElementCodec, seed: int, scale: float, size: int) -> None:
    """Element by element: half a step of the largest of what was wanted, which is at most the bound and the rest."""
    random = np.random.default_rng(seed)
    left = np.zeros(size, np.float32)
    step = {"bf16": 2.0**-8, "int8": 1 / 254}[codec]
    for _ in range(20):
        change = (random.uniform(-1, 1, size) * scale).astype(np.float32)
        want = wanted(change, np.zeros_like(change), left)
        left = left_over(want, decode(codec, encode(codec, want), size))
        assert np.abs(left).max() <= scale * step / (1 - step) * 1.001
