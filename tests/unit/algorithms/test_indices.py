from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from algorithms.indices import (
    check_indices,
    index_bits,
    index_sizes,
    low_bits,
    pack_indices,
    record_bits,
    unpack_high,
)

pytestmark = pytest.mark.usefixtures("loops")


def ascending(counts: list[int], elements: int, seed: int) -> np.ndarray:
    """Random positions, so many in each chunk."""
    random = np.random.default_rng(seed)
    return np.concatenate([np.sort(random.permutation(elements)[:count]) for count in counts]).astype(np.uint16)


def pack(indices: np.ndarray, counts: list[int], elements: int, form: Any = "compact") -> dict[str, np.ndarray]:
    return pack_indices(indices, np.array(counts), elements, form)


def highs_of(data: np.ndarray, counts: list[int], elements: int) -> tuple[np.ndarray, np.ndarray]:
    return unpack_high(data, np.array(counts), elements)


@pytest.mark.parametrize(
    ("elements", "count", "low", "record"),
    [
        (4096, 32, 7, 63),
        (4096, 8, 9, 15),
        (16384, 32, 9, 63),
        (4096, 128, 5, 255),
        (4096, 4096, 0, 8191),
        (65, 1, 7, 1),
    ],
)
def test_widths_of_usual_chunks(elements: int, count: int, low: int, record: int) -> None:
    assert low_bits(elements, count) == low
    assert record_bits(elements, count) == record


@given(st.integers(65, 16384), st.data())
def test_the_record_is_the_smallest_and_of_equals_the_one_with_more_low_bits(elements: int, data: Any) -> None:
    count = data.draw(st.integers(1, elements))
    totals = [low * count + count + -(-elements // 2**low) - 1 for low in range(20)]
    low = low_bits(elements, count)
    assert low * count + record_bits(elements, count) == totals[low] == min(totals)
    assert min(totals[low + 1 :]) > totals[low]


@given(st.integers(1, 16384), st.integers(1, 100), st.data())
def test_compact_never_costs_more_than_packed(elements: int, chunks: int, data: Any) -> None:
    count = data.draw(st.integers(1, elements))
    packed, compact = (index_sizes(elements, chunks * count, chunks, form) for form in ("packed", "compact"))
    assert packed == {"indices": -(-chunks * count * index_bits(elements) // 8)}
    assert sum(compact.values()) <= sum(packed.values())
    assert ("high" in compact) == (sum(compact.values()) < sum(packed.values()))


def test_packed_of_two_equals() -> None:
    """6 indices of 12 bits are 9 bytes; 6 of 9 low bits and a record of 13 are 7 and 2."""
    assert index_sizes(4096, 6, 1, "compact") == {"indices": 9}


def test_bits_of_a_compact_chunk() -> None:
    """Of 66 elements 8 are sent: 3 low bits, 9 possible high bits, a record of 16 bits."""
    indices = np.array([0, 1, 7, 8, 30, 31, 40, 65], np.uint16)
    arrays = pack(indices, [8], 66)
    assert {name: array.tolist() for name, array in arrays.items()} == {
        "low": [0b11_001_000, 0b1_110_000_1, 0b001_000_11],
        "high": [0b10010111, 0b10001001],
    }
    highs, wrong = highs_of(arrays["high"], [8], 66)
    assert highs.tolist() == [0, 0, 0, 1, 3, 3, 5, 8]
    assert not wrong.any()


@given(st.integers(65, 700), st.integers(1, 40), st.integers(0, 2**32), st.data())
def test_arrays_are_as_large_as_announced(elements: int, chunks: int, seed: int, data: Any) -> None:
    most = data.draw(st.integers(1, elements))
    counts = data.draw(st.lists(st.integers(0, most), min_size=chunks, max_size=chunks))
    indices = ascending(counts, elements, seed)
    for form in ("packed", "compact"):
        sizes = {name: size for name, size in index_sizes(elements, sum(counts), chunks, form).items() if size}
        packed = pack(indices, counts, elements, form)
        assert {name: array.size for name, array in packed.items() if array.size} == sizes


@pytest.mark.parametrize("tile_bits", [1, 200, 1 << 18])
def test_records_of_different_lengths(tile_bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles begin within a byte; chunks without indices have records, too."""
    monkeypatch.setattr("algorithms.indices.TILE_BITS", tile_bits)
    counts = [0, 3, 17, 0, 0, 1, 40, 5, 0]
    indices = ascending(counts, 700, 1)
    arrays = pack(indices, counts, 700)
    low = low_bits(700, sum(counts), len(counts))
    bits = np.unpackbits(arrays["high"], bitorder="little").tolist()
    place = first = 0
    for count in counts:
        record = [0] * (count + 699 // 2**low)
        for number, index in enumerate(indices[first : first + count].tolist()):
            record[index // 2**low + number] = 1
        assert bits[place : place + len(record)] == record
        place, first = place + len(record), first + count
    assert not any(bits[place:])
    highs, wrong = highs_of(arrays["high"], counts, 700)
    assert np.array_equal(highs, indices >> low)
    assert not wrong.any()


@pytest.mark.parametrize("tile_bits", [1, 128, 1 << 18])
def test_every_possible_record(tile_bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All 2^16 bit strings: those with eight ones are read and packed again, the others are named, in tiles or not."""
    monkeypatch.setattr("algorithms.indices.TILE_BITS", tile_bits)
    data = np.arange(1 << 16, dtype="<u2")
    ones = np.unpackbits(data.view(np.uint8)).reshape(-1, 16).sum(axis=1)
    _, wrong = highs_of(data.view(np.uint8), [8] * data.size, 66)
    assert np.array_equal(wrong, ones != 8)
    right = data[~wrong].view(np.uint8)
    counts = [8] * (right.size // 2)
    highs, wrong = highs_of(right, counts, 66)
    assert not wrong.any()
    expected = [np.subtract(places, range(8)).tolist() for places in combinations(range(16), 8)]
    assert sorted(highs.reshape(-1, 8).tolist()) == sorted(expected)
    low = np.tile(np.arange(8, dtype=np.uint16), len(counts))
    assert np.array_equal(pack(highs * np.uint16(8) + low, counts, 66)["high"], right)


def test_records_that_have_the_right_number_of_ones_only_together() -> None:
    data = np.array([0xFF, 0x01, 0x7F, 0x00, 0xFF, 0x00], np.uint8)
    _, wrong = highs_of(data, [8, 8, 8], 66)
    assert wrong.tolist() == [True, True, False]


def test_size_and_unused_bits_of_records() -> None:
    counts = [8, 8, 8]
    arrays = pack(ascending(counts, 4096, 0), counts, 4096)
    assert arrays["high"].size == 6
    with pytest.raises(ValueError, match="45 values of 1 bits take 6 bytes, got 7"):
        highs_of(np.append(arrays["high"], arrays["high"][:1]), counts, 4096)
    arrays["high"][-1] |= 0x80
    with pytest.raises(ValueError, match="unused bits"):
        highs_of(arrays["high"], counts, 4096)


def test_dense_chunks_have_no_indices() -> None:
    assert pack(np.arange(64, dtype=np.uint16), [64], 64) == {}
    assert sum(index_sizes(64, 320, 5, "compact").values()) == 0


def test_unknown_form() -> None:
    with pytest.raises(ValueError, match=r"indices must be one of .*'compact'.*, got 'rice'"):
        check_indices("rice")
