import hashlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from algorithms.aggregate import aggregate
from algorithms.bits import signed
from algorithms.codec import (
    Coefficients,
    SparseUpdate,
    bfloat16,
    digest_arrays,
    merge,
    pack_bits,
    pack_contribution,
    pack_update,
    quantise,
    unpack_bits,
    unpack_contribution,
    unpack_update,
)
from algorithms.layout import ParameterLayout, TensorSpec
from algorithms.traffic import contribution_bytes

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


def test_quantise_sign() -> None:
    values, scales = quantise(np.array([[1.0, -2.0, 3.0], [0.0, 0.0, 0.0], [-0.0, 1.0, -1.0]], np.float32), "sign")
    assert values[[0, 2]].tolist() == [[1, -1, 1], [1, 1, -1]]
    assert scales.tolist() == [2.0, 0.0, pytest.approx(2 / 3, rel=2**-8)]


def test_quantise_int8() -> None:
    rows = np.random.default_rng(0).standard_normal((50, 40)).astype(np.float32)
    values, scales = quantise(rows, "int8")
    assert np.abs(values.astype(int)).max() == 127
    assert np.abs(values * scales[:, None] - rows).max() <= 0.01 * np.abs(rows).max()
    extreme, scale = quantise(np.full((1, 2), 3e38, np.float32), "int8")
    assert np.isfinite(extreme * scale[:, None]).all()
    with pytest.raises(ValueError, match="codec must be one of"):
        quantise(rows, "int3")  # type: ignore[arg-type]


def test_bfloat16_rounds_ties_to_even() -> None:
    floats = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-7], np.float32)
    assert bfloat16(floats).tolist() == [0x3F80, 0x3F80, 0x3F82, 0x3F81]


@pytest.mark.parametrize("codec", ["sign", "int8"])
def test_contribution_round_trip(small_layout: ParameterLayout, contribute: Contribute, codec: Any) -> None:
    for absent in (frozenset(), frozenset({0, 2})):
        update = contribute(small_layout, 40, codec, 1, absent)
        arrays = pack_contribution(update, small_layout, codec)
        names = [small_layout.tensors[tensor].name for tensor in absent]
        assert same(unpack_contribution(arrays, small_layout, codec=codec, k=40, absent=names), update)
        if not absent:
            assert sum(array.nbytes for array in arrays.values()) == contribution_bytes(small_layout, 40, codec)


def part_of(update: SparseUpdate, chunks: range) -> SparseUpdate:
    shapes = {}
    for shape, sent in update.shapes.items():
        mine = np.isin(sent.chunks, chunks)
        if mine.any():
            shapes[shape] = Coefficients(sent.chunks[mine], sent.indices[mine], sent.values[mine], sent.scales[mine])
    return SparseUpdate(shapes, update.absent, update.codec)


@pytest.mark.parametrize("codec", ["sign", "int8"])
def test_shards_merge_to_the_whole(odd_layout: ParameterLayout, contribute: Contribute, codec: Any) -> None:
    whole = contribute(odd_layout, 16, codec, 2)
    parts = []
    for rank in range(3):
        chunks = odd_layout.shard(rank, 3)
        arrays = pack_contribution(part_of(whole, chunks), odd_layout, codec)
        parts.append(unpack_contribution(arrays, odd_layout, codec=codec, k=16, absent=(), chunks=chunks))
    assert same(merge(parts), whole)
    with pytest.raises(ValueError, match="overlap"):
        merge([parts[0], parts[0]])
    with pytest.raises(ValueError, match="disagree about absent"):
        merge([parts[0], SparseUpdate({}, frozenset({1}), codec)])


@pytest.mark.parametrize("codec", ["sign", "int8"])
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


def put(position: int | slice, value: int) -> Callable[[np.ndarray], np.ndarray]:
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
    arrays = pack_contribution(contribute(layout, 1, "int8", 0), layout, "int8")
    arrays["1x3.values"] = np.array([0x80, 0, 0], np.uint8)
    with pytest.raises(ValueError, match=r"'w', chunk 0 .* value below -127"):
        unpack_contribution(arrays, layout, codec="int8", k=1, absent=())


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
        ("50x35.indices", lambda array: array * 0, "tensor 'a', chunk 0 .* do not ascend"),
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
