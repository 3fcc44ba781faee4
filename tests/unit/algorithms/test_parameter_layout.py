from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from algorithms.layout import ParameterLayout, TensorSpec, canonical_name, is_dense, kept


def one(shape: tuple[int, ...], chunk: int = 64) -> ParameterLayout:
    return ParameterLayout([TensorSpec("w", shape, 0)], chunk)


def covered(layout: ParameterLayout, tensor: int) -> np.ndarray:
    """How often each element of a tensor lies in a chunk."""
    counts = np.zeros(layout.tensors[tensor].elements, np.int64)
    for block in layout.tensor_blocks[tensor]:
        strides = [8 * stride for stride in block.strides]
        np.lib.stride_tricks.as_strided(counts[block.offset :], block.size, strides)[...] += 1
    return counts


def test_every_element_is_in_exactly_one_chunk(odd_layout: ParameterLayout) -> None:
    for tensor in range(len(odd_layout.tensors)):
        assert (covered(odd_layout, tensor) == 1).all()
        ids = [block.chunks for block in odd_layout.tensor_blocks[tensor]]
        start, stop = odd_layout.tensor_chunks[tensor]
        assert sorted(np.concatenate([[], *ids])) == list(range(start, stop))
    assert odd_layout.tensor_chunks[-1][1] == odd_layout.chunk_count


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 140), max_size=3).map(tuple), st.sampled_from([32, 64, 128]))
def test_any_shape_is_covered_once(shape: tuple[int, ...], chunk: int) -> None:
    layout = one(shape, chunk)
    assert (covered(layout, 0) == 1).all()
    assert all(max(block.shape) <= chunk for block in layout.blocks)
    assert len(layout.blocks) <= 4


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ((), {(1, 1): 1}),
        ((0, 5), {}),
        ((768,), {(12, 64): 1}),
        ((50257,), {(61, 64): 5, (60, 64): 8, (1, 17): 1}),
        ((131, 64), {(44, 64): 2, (43, 64): 1}),
        ((127, 131), {(64, 44): 2, (64, 43): 1, (63, 44): 2, (63, 43): 1}),
        ((40, 8, 3, 3), {(40, 36): 2}),
        ((96, 1, 1), {(1, 64): 1, (1, 32): 1}),
        ((5, 70, 65), {(35, 33): 10, (35, 32): 10}),
        ((3, 1, 300), {(4, 64): 3, (1, 44): 3}),
    ],
)
def test_chunk_shapes(shape: tuple[int, ...], sizes: dict[tuple[int, int], int]) -> None:
    assert {key: sum(map(len, blocks)) for key, blocks in one(shape).shapes.items()} == sizes


def test_chunks_are_numbered_row_major() -> None:
    blocks = {block.shape: block.chunks.tolist() for block in one((127, 131)).blocks}
    assert blocks == {(64, 44): [0, 1], (64, 43): [2], (63, 44): [3, 4], (63, 43): [5]}
    vectors = {block.shape: block.chunks.tolist() for block in one((3, 1, 300)).blocks}
    assert vectors == {(4, 64): [0, 2, 4], (1, 44): [1, 3, 5]}


def test_chunk_numbers_of_a_shape_ascend(odd_layout: ParameterLayout) -> None:
    for shape in odd_layout.shapes:
        assert (np.diff(odd_layout.select(shape)) > 0).all()


@pytest.mark.parametrize("limit", [1, 3, 10, 100000])
def test_tiles_cut_a_block_in_order(limit: int) -> None:
    for block in (*one((127, 131)).blocks, *one((20, 70, 200)).blocks, *one((50257,)).blocks):
        flat = np.arange(20 * 70 * 200)
        strides = [8 * stride for stride in block.strides]
        whole = np.lib.stride_tricks.as_strided(flat[block.offset :], block.size, strides).reshape(-1, *block.shape)
        for start, stop in ((0, len(block)), (len(block) // 3, len(block) - 1)):
            position = start
            for tile in block.tiles(start, stop, limit):
                assert tile.start == position < tile.stop <= position + limit
                position = tile.stop
                view = np.lib.stride_tricks.as_strided(flat[tile.offset :], tile.size, strides)
                assert np.array_equal(view.reshape(-1, *block.shape), whole[tile.start : tile.stop])
            assert position == max(stop, start)


@pytest.mark.parametrize(
    ("k", "elements", "expected"),
    [(32, 4096, 32), (32, 64, 64), (32, 65, 1), (32, 192, 2), (32, 320, 2), (4096, 100, 100), (1, 4096, 1)],
)
def test_kept(k: int, elements: int, expected: int) -> None:
    assert kept(k, elements, 64) == expected
    assert is_dense(elements) == (elements <= 64)


@pytest.mark.parametrize("k", [0, -1, 4097])
def test_kept_refuses(k: int) -> None:
    with pytest.raises(ValueError, match="k must be 1 to 4096"):
        kept(k, 4096, 64)


@pytest.mark.parametrize(
    "name", ["module.a.weight", "_orig_mod.a.weight", "module._orig_mod.a.weight", "a._orig_mod.weight", "a.weight"]
)
def test_canonical_name(name: str) -> None:
    assert canonical_name(name) == "a.weight"


def test_a_leaf_called_module_keeps_its_name() -> None:
    assert canonical_name("a.module") == "a.module"


def test_digest_is_identity() -> None:
    specs = [TensorSpec("b", (3, 4), 0), TensorSpec("module.a", (5,), 1)]
    digest = ParameterLayout(specs).digest
    assert ParameterLayout([TensorSpec("a", (5,), 1), TensorSpec("b", (3, 4), 0)]).digest == digest
    others = [
        ParameterLayout([TensorSpec("b", (4, 3), 0), specs[1]]),
        ParameterLayout([TensorSpec("b", (3, 4), 1), specs[1]]),
        ParameterLayout([TensorSpec("c", (3, 4), 0), specs[1]]),
        ParameterLayout(specs, 32),
        ParameterLayout(specs, groups=("x", "y")),
        *(ParameterLayout(specs, transform=transform) for transform in ("hadamard", "random", "identity")),
    ]
    assert len({digest, *(other.digest for other in others)}) == 9


def test_digest_is_pinned() -> None:
    assert one((127, 131)).digest == "b45bb4dd598c251b46947615f3a11284d2c838a5ee779944e79e6a4ed8a52f48"


@pytest.mark.parametrize(
    ("specs", "arguments", "message"),
    [
        ([TensorSpec("a", (1,), 0), TensorSpec("module.a", (2,), 0)], {}, "canonical name 'a'"),
        ([TensorSpec("a", (1,), 2)], {}, "group 2 of 2"),
        ([TensorSpec("a", (-1,), 0)], {}, "negative size"),
        ([], {"chunk": 48}, "chunk must be one of"),
        ([], {"transform": "fourier"}, "transform must be one of"),
        ([], {"groups": ("x", "x")}, "must differ"),
    ],
)
def test_layout_refuses(specs: list[TensorSpec], arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParameterLayout(specs, **arguments)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_shards_cover_all_chunks_evenly(odd_layout: ParameterLayout, ranks: int) -> None:
    shards = [odd_layout.shard(rank, ranks) for rank in range(ranks)]
    assert [chunk for shard in shards for chunk in shard] == list(range(odd_layout.chunk_count))
    sizes = np.zeros(odd_layout.chunk_count)
    for block in odd_layout.blocks:
        sizes[block.chunks] = block.elements
    for shard in shards:
        assert abs(sizes[list(shard)].sum() - odd_layout.parameter_count / ranks) <= odd_layout.chunk**2


def test_fragments_are_whole_tensors(odd_layout: ParameterLayout) -> None:
    for count in range(1, len(odd_layout.tensors) + 1):
        fragments = odd_layout.fragments(count)
        assert [tensor for part in fragments for tensor in part] == list(range(len(odd_layout.tensors)))
        assert all(fragments)
        assert len(fragments) == count
    equal = ParameterLayout([TensorSpec(f"t{number}", (10,), 0) for number in range(8)])
    assert [equal.fragment_elements(part) for part in equal.fragments(4)] == [20] * 4
    with pytest.raises(ValueError, match="cannot cut 8 tensors into 9"):
        equal.fragments(9)


def test_json_round_trip(odd_layout: ParameterLayout) -> None:
    again = ParameterLayout.from_json(odd_layout.to_json())
    assert (again.digest, again.offsets, again.blocks) == (odd_layout.digest, odd_layout.offsets, odd_layout.blocks)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 1}, "version 1"),
        ({"chunk": True}, "chunk"),
        ({"chunk": "64"}, "chunk"),
        ({"basis": "00"}, "other integer bases"),
        ({"transform": "fourier"}, "transform must be one of"),
        ({"transform": ["dct"]}, "transform must be one of"),
        ({"groups": "ab"}, "groups"),
        ({"groups": [1]}, "groups"),
        ({"extra": 1}, "a layout has"),
        ({"tensors": {}}, "tensors must be a list"),
        ({"tensors": [["w", [1]]]}, "a tensor is"),
        ({"tensors": [[7, [1], 0]]}, "a tensor is"),
        ({"tensors": [["w", [1.0], 0]]}, "'w': bad shape"),
        ({"tensors": [["w", [-1], 0]]}, "'w': bad shape"),
        ({"tensors": [["w", [1] * 9, 0]]}, "'w': bad shape"),
        ({"tensors": [["w", [2**64], 0]]}, "'w': bad shape"),
        ({"tensors": [["w", [2**30, 2**30], 0]]}, "'w': more than"),
        ({"tensors": [["w", [2**40, 1, 17], 0]]}, "'w': more than"),
        ({"tensors": [["w", [2**39, 1, 17], 0]]}, "chunks are more than"),
        ({"tensors": [["w", [1], True]]}, "'w': bad group"),
        ({"tensors": [["w", [1], 5]]}, "'w': group 5"),
    ],
)
def test_from_json_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParameterLayout.from_json({**one((3, 4)).to_json(), **change})
