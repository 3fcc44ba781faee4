import hashlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from algorithms.aggregate import aggregate
from algorithms.bits import signed
from algorithms.codec import (
    Codec,
    Coefficients,
    Indices,
    SparseUpdate,
    digest_arrays,
    merge,
    pack_bits,
    pack_contribution,
    pack_update,
    unpack_bits,
    unpack_contribution,
    unpack_update,
)
from algorithms.layout import ParameterLayout, TensorSpec
from tests.unit.algorithms.test_against_reference import Round, rounds, thorough

CODECS = get_args(Codec)
FORMS = get_args(Indices)

pytestmark = pytest.mark.usefixtures("loops")

Contribute = Callable[..., SparseUpdate]


def same(one: Any, other: Any) -> bool:
    """Equality of two updates, array by array, dtypes included."""
    if one.absent != other.absent or one.shapes.keys() != other.shapes.keys():
        return False
    pairs = [(vars(one.shapes[shape]), vars(other.shapes[shape])) for shape in one.shapes]
    return all(
        np.array_equal(left[field], right[field]) and left[field].dtype == right[field].dtype
        for left, right in pairs
        for field in left
    )


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 16), st.integers(0, 70), st.integers(0, 2**32))
def test_bits_round_trip(width: int, count: int, seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, 1 << width, count).astype(np.uint16)
    packed = pack_bits(values, width)
    stream = ((values[:, None] >> np.arange(width)) & 1).astype(np.uint8).reshape(-1)
    assert np.array_equal(packed, np.packbits(stream, bitorder="little"))
    assert np.array_equal(unpack_bits(packed, width, count), values)


def test_signed_bits() -> None:
    values = np.array([-7, -1, 0, 1, 7], np.int8)
    assert signed(unpack_bits(pack_bits(values, 4), 4, 5), 4).tolist() == values.tolist()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("codec", CODECS)
def test_contribution_round_trip(small_layout: ParameterLayout, contribute: Contribute, codec: Any, form: Any) -> None:
    for absent in (frozenset(), frozenset({0, 2})):
        update = contribute(small_layout, 40, codec, 1, absent)
        arrays = pack_contribution(update, small_layout, codec, form)
        names = [small_layout.tensors[tensor].name for tensor in absent]
        read = unpack_contribution(arrays, small_layout, codec=codec, k=40, absent=names, indices=form)
        assert same(read, update)


def part_of(update: SparseUpdate, chunks: range) -> SparseUpdate:
    shapes = {}
    for shape, sent in update.shapes.items():
        mine = np.isin(sent.chunks, chunks)
        if mine.any():
            shapes[shape] = Coefficients(sent.chunks[mine], sent.indices[mine], sent.values[mine], sent.scales[mine])
    return SparseUpdate(shapes, update.absent, update.codec)


@pytest.mark.parametrize(("codec", "form"), [("sign", "packed"), ("int8", "compact"), ("int16", "packed")])
def test_shards_merge_to_the_whole(odd_layout: ParameterLayout, contribute: Contribute, codec: Any, form: Any) -> None:
    whole = contribute(odd_layout, 16, codec, 2)
    parts = []
    for rank in range(3):
        chunks = odd_layout.shard(rank, 3)
        arrays = pack_contribution(part_of(whole, chunks), odd_layout, codec, form)
        read = unpack_contribution(arrays, odd_layout, codec=codec, k=16, absent=(), indices=form, chunks=chunks)
        parts.append(read)
    assert same(merge(parts), whole)
    with pytest.raises(ValueError, match="overlap"):
        merge([parts[0], parts[0]])
    with pytest.raises(ValueError, match="disagree about absent"):
        merge([parts[0], SparseUpdate({}, frozenset({1}), codec)])


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("k", "sites"), [(8, 1), (128, 2), (300, 3), (600, 4)])
def test_update_round_trip(
    small_layout: ParameterLayout, contribute: Contribute, codec: Any, k: int, sites: int
) -> None:
    contributions = [contribute(small_layout, k, codec, seed, frozenset({1})) for seed in range(sites)]
    update = aggregate(contributions, small_layout, [0] * sites)
    assert update.absent == {1}
    assert same(unpack_update(pack_update(update, small_layout), small_layout), update)


def test_empty_update_round_trip(small_layout: ParameterLayout) -> None:
    update = aggregate([], small_layout, [])
    assert update.absent == {0, 1, 2, 3}
    assert list(pack_update(update, small_layout)) == ["present"]
    assert same(unpack_update(pack_update(update, small_layout), small_layout), update)


def damage(arrays: dict[str, np.ndarray], name: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    arrays[name] = change(arrays[name].copy())


def put(position: int | slice, value: int | list[int]) -> Callable[[np.ndarray], np.ndarray]:
    def change(array: np.ndarray) -> np.ndarray:
        array[position] = value
        return array

    return change


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("50x35.indices", lambda array: array[:-1], "50x35.indices must be"),
        ("50x35.scales", lambda array: np.append(array, array[:1]), "50x35.scales must be"),
        ("50x35.values", lambda array: array.view(np.int8), "50x35.values must be .* uint8, got int8"),
        ("50x35.values", lambda array: array.reshape(1, -1), "50x35.values must be"),
        ("50x35.scales", put(1, 0x7F), r"tensor 'a', chunk 0 \(50, 35\): scale"),
        ("50x35.scales", put(3, 0xFF), r"tensor 'a', chunk 1 \(50, 35\): scale"),
        ("50x35.scales", put(1, 0xBF), r"tensor 'a', chunk 0 \(50, 35\): scale"),
        ("50x35.scales", put(slice(0, 2), [0x00, 0x80]), r"tensor 'a', chunk 0 \(50, 35\): scale"),  # -0.0
        ("50x35.scales", put(slice(0, 2), [0x81, 0x6F]), r"tensor 'a', chunk 0 \(50, 35\): scale"),
        ("40x36.indices", put(slice(0, 2), 0xFF), "tensor 'd', chunk .* index not below 1440"),
        ("50x35.indices", lambda array: np.zeros_like(array), "tensor 'a', chunk 0 .* do not ascend"),
    ],
)
def test_hostile_contributions(
    small_layout: ParameterLayout, contribute: Contribute, name: str, change: Any, message: str
) -> None:
    arrays = pack_contribution(contribute(small_layout, 40, "sign", 3), small_layout, "sign")
    damage(arrays, name, change)
    with pytest.raises(ValueError, match=message):
        unpack_contribution(arrays, small_layout, codec="sign", k=40, absent=())


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("50x35.high", lambda array: array[:-1], "50x35.high must be"),
        ("50x35.low", lambda array: np.append(array, array[:1]), "50x35.low must be"),
        ("50x35.high", put(0, 0xFF), r"tensor 'a', chunk 0 \(50, 35\): the record has not as many ones"),
        ("50x35.high", lambda array: array * 0, r"tensor 'a', chunk 0 \(50, 35\): the record has not as many ones"),
        ("50x35.low", lambda array: array * 0, "tensor 'a', chunk 0 .* do not ascend"),
        ("50x35.high", lambda array: array | last_bits(3 * 44), "50x35.high: the unused bits"),
        ("50x35.low", lambda array: array | last_bits(3 * 17 * 6), "50x35.low: the unused bits"),
    ],
)
def test_hostile_compact_contributions(contribute: Contribute, name: str, change: Any, message: str) -> None:
    """Three chunks of 1,750 elements, 17 indices of 6 low bits each, records of 44 bits."""
    layout = ParameterLayout([TensorSpec("a", (150, 35), 0)])
    arrays = pack_contribution(contribute(layout, 40, "sign", 3), layout, "sign", "compact")
    damage(arrays, name, change)
    with pytest.raises(ValueError, match=message):
        unpack_contribution(arrays, layout, codec="sign", k=40, absent=(), indices="compact")


def last_bits(used: int) -> np.ndarray:
    """All unused bits of an array of so many used ones."""
    return np.packbits(np.arange(-(-used // 8) * 8) >= used, bitorder="little")


@pytest.mark.parametrize(("form", "largest"), [("packed", 2047), ("compact", 1791)])
def test_index_beyond_the_chunk(contribute: Contribute, form: Any, largest: int) -> None:
    """The largest index that the bits can say."""
    layout = ParameterLayout([TensorSpec("a", (100, 35), 0)])
    update = contribute(layout, 40, "sign", 3)
    for index, message in ((1750, "tensor 'a', chunk 1 .* index not below 1750"), (largest, "index not below 1750")):
        update.shapes[50, 35].indices[1, -1] = index
        arrays = pack_contribution(update, layout, "sign", form)
        with pytest.raises(ValueError, match=message):
            unpack_contribution(arrays, layout, codec="sign", k=40, absent=(), indices=form)


def test_other_form_of_indices_is_refused(small_layout: ParameterLayout, contribute: Contribute) -> None:
    update = contribute(small_layout, 40, "sign", 3)
    for form, other, missing in (("packed", "compact", "high"), ("compact", "packed", "indices")):
        arrays = pack_contribution(update, small_layout, "sign", form)
        with pytest.raises(ValueError, match=rf"array 40x36\.{missing} is missing"):
            unpack_contribution(arrays, small_layout, codec="sign", k=40, absent=(), indices=other)
    with pytest.raises(ValueError, match="indices must be one of"):
        pack_contribution(update, small_layout, "sign", "dense")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="indices must be one of"):
        unpack_contribution({}, small_layout, codec="sign", k=1, absent=(), indices="dense")  # type: ignore[arg-type]


@thorough
@given(rounds(max_sites=1), st.sampled_from(FORMS), st.data())
def test_whatever_is_accepted_has_no_other_encoding(round_: Round, form: Any, data: Any) -> None:
    layout, codec, (update,) = round_.layout, round_.codec, round_.contributions
    arrays = {name: array.copy() for name, array in pack_contribution(update, layout, codec, form).items()}
    for _ in range(data.draw(st.integers(1, 3)) if arrays else 0):
        array = arrays[data.draw(st.sampled_from(sorted(arrays)))]
        flip(array, data.draw(st.integers(0, 8 * array.size - 1)))
    absent = [layout.tensors[tensor].name for tensor in update.absent]
    try:
        read = unpack_contribution(arrays, layout, codec=codec, k=round_.k, absent=absent, indices=form)
    except ValueError:
        return
    assert digest_arrays(pack_contribution(read, layout, codec, form)) == digest_arrays(arrays)


def flip(array: np.ndarray, bit: int) -> None:
    """Flips a bit and, half of the time, the next one too, which moves the one of a record."""
    array[bit // 8] ^= 1 << (bit % 8)
    if bit % 4 < 2 and bit + 1 < 8 * array.size:
        array[(bit + 1) // 8] ^= 1 << ((bit + 1) % 8)


def test_hostile_names(small_layout: ParameterLayout, contribute: Contribute) -> None:
    arrays = pack_contribution(contribute(small_layout, 40, "sign", 3), small_layout, "sign")
    with pytest.raises(ValueError, match="unexpected arrays: extra"):
        unpack_contribution({**arrays, "extra": arrays["1x1.values"]}, small_layout, codec="sign", k=40, absent=())
    with pytest.raises(ValueError, match="absent tensors are not in the layout: z"):
        unpack_contribution(arrays, small_layout, codec="sign", k=40, absent=["z"])
    with pytest.raises(ValueError, match="must be"):
        unpack_contribution(arrays, small_layout, codec="sign", k=41, absent=())
    del arrays["50x35.indices"]
    with pytest.raises(ValueError, match=r"50x35\.indices is missing"):
        unpack_contribution(arrays, small_layout, codec="sign", k=40, absent=())


def test_hostile_padding_and_value(contribute: Contribute) -> None:
    layout = ParameterLayout([TensorSpec("w", (3,), 0)])
    arrays = pack_contribution(contribute(layout, 1, "sign", 0), layout, "sign")
    arrays["1x3.values"] = arrays["1x3.values"] | 0x80
    with pytest.raises(ValueError, match=r"1x3\.values: the unused bits"):
        unpack_contribution(arrays, layout, codec="sign", k=1, absent=())
    for codec, values, limit in (
        ("int4", [0x08, 0], 7),
        ("int8", [0, 0, 0x80], 127),
        ("int16", [0, 0, 0, 0x80, 0, 0], 32767),
    ):
        arrays = pack_contribution(contribute(layout, 1, codec, 0), layout, codec)
        arrays["1x3.values"] = np.array(values, np.uint8)
        with pytest.raises(ValueError, match=rf"'w', chunk 0 .* value below -{limit}"):
            unpack_contribution(arrays, layout, codec=codec, k=1, absent=())


def test_wrong_codec_is_refused(small_layout: ParameterLayout, contribute: Contribute) -> None:
    with pytest.raises(ValueError, match="made with codec 'int8'"):
        pack_contribution(contribute(small_layout, 4, "int8", 0), small_layout, "sign")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("50x35.counts", lambda array: np.full_like(array, 0xFF), "tensor 'a', chunk 0 .* more than 1750"),
        ("50x35.bits", put(0, 5), "tensor 'a', chunk 0 .* bits per value"),
        ("50x35.exponents", put(1, 0x7F), "tensor 'a', chunk 0 .* exponent"),
        ("50x35.values4", lambda array: np.full_like(array, 0x88), "50x35.values4: value below -7"),
        ("50x35.values4", lambda array: array * 0, "tensor 'a', chunk 0 .* zero among"),
        ("50x35.low", lambda array: array * 0, "tensor 'a', chunk 0 .* do not ascend"),
        ("50x35.high", put(0, 0xFF), "tensor 'a', chunk 0 .* record has not as many ones"),
        ("50x35.high", lambda array: array[:-1], "50x35.high must be"),
        ("present", put(0, 0x1F), "unused bits"),
        ("present", lambda array: array[:0], "present must be"),
    ],
)
def test_hostile_updates(
    small_layout: ParameterLayout, contribute: Contribute, name: str, change: Any, message: str
) -> None:
    update = aggregate([contribute(small_layout, 40, "sign", 3)], small_layout, [0])
    arrays = pack_update(update, small_layout)
    damage(arrays, name, change)
    with pytest.raises(ValueError, match=message):
        unpack_update(arrays, small_layout)


def test_digest_of_arrays() -> None:
    arrays = {"b": np.array([1, 2], np.uint8), "a": np.array([], np.uint8)}
    expected = b"a\0" + bytes(8) + b"b\0" + (2).to_bytes(8, "little") + b"\x01\x02"
    assert digest_arrays(arrays) == hashlib.sha256(expected).hexdigest()


def test_coordinator_modules_do_not_import_torch() -> None:
    names = ["layout", "transforms", "codec", "aggregate", "outer", "traffic", "schedule"]
    code = (
        "import sys\n" + "".join(f"import algorithms.{name}\n" for name in names) + "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
