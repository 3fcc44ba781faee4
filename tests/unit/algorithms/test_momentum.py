"""Encode and the subtractions, for every transform, against the slow reference in float64."""

import io
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from algorithms.aggregate import aggregate
from algorithms.layout import CHUNKS, ParameterLayout, TensorSpec
from algorithms.momentum import Ownership, Picks, encode, pick, subtract_sent, subtract_update
from algorithms.sparsify import forward
from algorithms.transforms import TRANSFORMS, Transform
from algorithms.updates import AggregateUpdate, SparseUpdate, UpdateCoefficients
from tests import reference

quick = settings(
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
transforms = st.sampled_from(TRANSFORMS)
shapes = st.one_of(
    st.just(()),
    st.just((0, 5)),
    st.tuples(st.sampled_from([5, 64, 70, 300, 4096])),
    st.tuples(st.sampled_from([1, 31, 64, 70, 130]), st.sampled_from([7, 33, 64, 65, 128])),
    st.just((6, 64 * 9)),  # nine chunks in a row of the grid
    st.just((20, 8, 3, 3)),
    st.just((3, 40, 33)),
)

Momentum = dict[int, Tensor]


@st.composite
def layouts(draw: Any) -> ParameterLayout:
    tensors = [TensorSpec(str(number), draw(shapes), 0) for number in range(draw(st.integers(1, 3)))]
    return ParameterLayout(tensors, draw(st.sampled_from(CHUNKS)), transform=draw(transforms))


def matrix_layout(transform: Transform, shape: tuple[int, ...] = (130, 9 * 64), chunk: int = 64) -> ParameterLayout:
    return ParameterLayout([TensorSpec("w", shape, 0), TensorSpec("b", (70,), 0)], chunk, transform=transform)


def owned(layout: ParameterLayout, rank: int = 0, ranks: int = 1) -> tuple[Ownership, Momentum]:
    ownership = Ownership(layout, layout.shard(rank, ranks))
    return ownership, {index: torch.zeros(size) for index, size in enumerate(ownership.sizes)}


def random_gradients(layout: ParameterLayout, seed: int) -> dict[int, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {index: torch.randn(tensor.shape, generator=generator) for index, tensor in enumerate(layout.tensors)}


def by_chunk(picked: dict[tuple[int, int], Picks], layout: ParameterLayout) -> list[dict[int, float] | None]:
    chunks: list[dict[int, float] | None] = [None] * layout.chunk_count
    for picks in picked.values():
        for chunk, indices, values in zip(*picks, strict=True):
            chunks[chunk] = dict(zip(indices.tolist(), values.tolist(), strict=True))
    return chunks


def assert_close(found: list[dict[int, float] | None], expected: list[dict[int, float] | None], atol: float) -> None:
    """The same magnitudes; ties, and what rounding makes of them, may go either way."""
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is None or other is None:
            continue
        assert list(one) == sorted(one)
        magnitudes = [sorted(map(abs, values.values())) for values in (one, other)]
        np.testing.assert_allclose(*magnitudes, atol=atol)
        both = sorted(one.keys() & other.keys())
        np.testing.assert_allclose([one[i] for i in both], [other[i] for i in both], atol=atol)


def coefficients(ownership: Ownership, momentum: Momentum, step: int) -> dict[int, np.ndarray]:
    """Chunk number -> its coefficients in a momentum, whichever domain that is in."""
    found = {}
    for block in ownership.blocks:
        rows = block.rows(momentum)
        if ownership.holds_elements and ownership.sides(block.block.shape, step, rows.device) is not None:
            rows = forward(rows.view(-1, *block.block.shape), ownership.layout.transform, step)
        numbers = block.block.chunks[block.start : block.stop]
        found |= dict(zip(numbers.tolist(), rows.numpy().copy(), strict=True))
    return found


def everything(sent: SparseUpdate, layout: ParameterLayout) -> AggregateUpdate:
    """An update in which nothing of a contribution is zero."""
    parts = {
        shape: UpdateCoefficients(
            chunks=part.chunks,
            counts=np.full(part.chunks.size, part.indices.shape[1]),
            indices=part.indices.reshape(-1),
            values=np.ones(part.indices.size, np.int8),
            exponents=np.zeros(part.chunks.size, np.int16),
            bits=np.full(part.chunks.size, 8, np.uint8),
        )
        for shape, part in sent.shapes.items()
    }
    return AggregateUpdate(parts, sent.absent)


# --- encode -----------------------------------------------------------------------------------------------------------


@quick
@given(layouts(), st.sampled_from([1, 8, 32, 1024]), st.sampled_from([0.0, 0.5, 0.99]), st.integers(0, 2**32))
def test_picks_are_those_of_the_reference(layout: ParameterLayout, k: int, beta: float, seed: int) -> None:
    """Two steps; after the first a tensor may miss its gradient, or have its first one."""
    rng = np.random.default_rng(seed)
    tensors = [(tensor.name, tensor.shape) for tensor in layout.tensors]
    ownership, zeros = owned(layout)
    momentum: Momentum = {}
    truth: dict[int, np.ndarray] = {}
    for step in (3, 4):
        present = [index for index in range(len(tensors)) if rng.random() < 0.7]
        gradients = {index: rng.standard_normal(tensors[index][1]).astype(np.float32) for index in present}
        for index in present:
            momentum.setdefault(index, zeros[index])
        for index in momentum:
            before = truth.get(index, np.zeros(tensors[index][1]))
            truth[index] = beta * before + (1 - beta) * 4 * gradients.get(index, np.zeros(tensors[index][1]))
        given = {index: torch.from_numpy(np.asarray(gradient)) for index, gradient in gradients.items()}
        picked = pick(ownership, momentum, given, beta=beta, k=k, unscale=4.0, step=step)
        expected = reference.pick(truth, tensors, layout.chunk, k, layout.transform, step)
        assert_close(by_chunk(picked, layout), expected, atol=1e-4)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_gradients_of_any_dtype_enter_as_float32(transform: Transform, dtype: torch.dtype) -> None:
    layout = matrix_layout(transform)
    gradients = {index: gradient.to(dtype) for index, gradient in random_gradients(layout, 0).items()}
    momenta = []
    for given_ in (gradients, {index: gradient.float() for index, gradient in gradients.items()}):
        ownership, momentum = owned(layout)
        pick(ownership, momentum, given_, beta=0.9, k=8, unscale=0.3, step=1)
        assert all(value.dtype == torch.float32 for value in momentum.values())
        momenta.append(momentum)
    for index in momenta[0]:
        assert torch.allclose(momenta[0][index], momenta[1][index], atol=1e-6)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_gradients_of_any_strides(transform: Transform) -> None:
    layout = ParameterLayout(
        [TensorSpec("conv", (40, 8, 3, 3), 0), TensorSpec("matrix", (130, 576), 0)], transform=transform
    )
    plain = random_gradients(layout, 0)
    strided = {0: plain[0].to(memory_format=torch.channels_last), 1: plain[1].T.contiguous().T}
    assert not any(gradient.is_contiguous() for gradient in strided.values())
    momenta = []
    for gradients in (plain, strided):
        ownership, momentum = owned(layout)
        encode(ownership, momentum, gradients, beta=0.9, k=8, codec="sign", step=1)
        momenta.append(momentum)
    assert all(torch.equal(momenta[0][index], momenta[1][index]) for index in momenta[0])


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_tiles_and_lines_do_not_matter(transform: Transform, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = matrix_layout(transform, (300, 9 * 64 + 1))
    found = []
    for tile, line in ((1 << 20, 8), (1 << 20, 100), (3 * 4096, 1), (1, 1)):
        monkeypatch.setattr("algorithms.ownership.TILE_ELEMENTS", max(tile, layout.chunk**2))
        monkeypatch.setattr("algorithms.momentum.LINE", line)
        ownership, momentum = owned(layout)
        for seed in range(2):
            picked = pick(ownership, momentum, random_gradients(layout, seed), beta=0.9, k=32, step=seed)
        found.append(by_chunk(picked, layout))
    for other in found[1:]:
        assert_close(other, found[0], atol=1e-5)


def test_every_transform_picks_something_else() -> None:
    gradients = random_gradients(matrix_layout("dct"), 0)
    picked = []
    for transform, step in (("dct", 1), ("hadamard", 1), ("identity", 1), ("random", 1), ("random", 2)):
        ownership, momentum = owned(matrix_layout(transform))
        picked.append(pick(ownership, momentum, gradients, beta=0.9, k=8, step=step))
    for number, one in enumerate(picked):
        for other in picked[:number]:
            assert np.mean(one[44, 64].indices == other[44, 64].indices) < 0.1
            assert np.array_equal(one[1, 6].values, other[1, 6].values)  # dense: not transformed


@pytest.mark.parametrize("transform", ["dct", "hadamard", "identity"])
def test_the_step_matters_to_random_only(transform: Transform) -> None:
    gradients = random_gradients(matrix_layout(transform), 0)
    picked = [pick(*owned(matrix_layout(transform)), gradients, beta=0.9, k=8, step=step) for step in (1, 2)]
    for shape, picks in picked[0].items():
        assert all(np.array_equal(*arrays) for arrays in zip(picks, picked[1][shape], strict=True))


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_pick_what_one_would(transform: Transform, ranks: int) -> None:
    layout = ParameterLayout([TensorSpec("a", (300, 577), 0), TensorSpec("b", (200, 70), 0)], transform=transform)
    shards = [owned(layout, rank, ranks) for rank in range(ranks)]
    whole = owned(layout)
    for seed in range(2):
        gradients = random_gradients(layout, seed)
        alone = by_chunk(pick(*whole, gradients, beta=0.9, k=32, step=seed), layout)
        parts = [by_chunk(pick(*shard, gradients, beta=0.9, k=32, step=seed), layout) for shard in shards]
    joined = [next(filter(None, column)) for column in zip(*parts, strict=True)]
    assert_close(joined, alone, atol=1e-6)
    assert np.mean([one == other for one, other in zip(joined, alone, strict=True)]) > 0.9


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(1)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_saved_and_loaded_it_gives_the_same_bits(transform: Transform) -> None:
    layout = matrix_layout(transform, (700, 9 * 64))
    ownership, momentum = owned(layout)
    for seed in range(2):
        pick(ownership, momentum, random_gradients(layout, seed), beta=0.9, k=8, step=seed)
    file = io.BytesIO()
    torch.save(momentum, file)
    file.seek(0)
    loaded = torch.load(file)
    one, other = (
        encode(ownership, state, random_gradients(layout, 9), beta=0.9, k=8, codec="int8", step=9)
        for state in (momentum, loaded)
    )
    for shape, part in one.shapes.items():
        for name, array in vars(part).items():
            assert array.tobytes() == vars(other.shapes[shape])[name].tobytes()
    assert all(torch.equal(momentum[index], loaded[index]) for index in momentum)


def test_a_tensor_without_momentum_is_absent() -> None:
    layout = matrix_layout("dct")
    ownership, momentum = owned(layout)
    del momentum[0]
    sent = encode(ownership, momentum, {1: torch.ones(130, 576)}, beta=0.9, k=8, codec="sign")
    assert sent.absent == {0}
    numbers = np.concatenate([part.chunks for part in sent.shapes.values()])
    assert set(numbers.tolist()) == set(range(*layout.tensor_chunks[1]))


def test_k_out_of_range() -> None:
    layout = matrix_layout("dct")
    with pytest.raises(ValueError, match="k must be 1 to 4096"):
        pick(*owned(layout), random_gradients(layout, 0), beta=0.9, k=4097)


# --- subtraction ------------------------------------------------------------------------------------------------------


@quick
@given(layouts(), st.sampled_from(["sign", "int8"]), st.sampled_from([1.0, 0.25]), st.integers(0, 2**32))
def test_what_was_sent_and_is_listed_is_subtracted(
    layout: ParameterLayout, codec: Any, alpha: float, seed: int
) -> None:
    """The update comes of two sites, with zeros in dense chunks, and lacks the tensors and coefficients it dropped."""
    ownership, momentum = owned(layout)
    sent = encode(ownership, momentum, random_gradients(layout, seed % 1000), beta=0.5, k=16, codec=codec, step=5)
    other = encode(*owned(layout), random_gradients(layout, seed % 999 + 1), beta=0.5, k=16, codec=codec, step=5)
    update = aggregate([sent, other], layout, [6, 0])
    listed = {
        (int(chunk), int(index))
        for part in update.shapes.values()
        for chunk, index, value in zip(np.repeat(part.chunks, part.counts), part.indices, part.values, strict=True)
        if value
    }
    expected = coefficients(ownership, momentum, 5)
    for part in sent.shapes.values():
        for chunk, indices, values, scale in zip(*vars(part).values(), strict=True):
            for index, value in zip(indices.tolist(), values, strict=True):
                if (int(chunk), index) in listed:
                    expected[int(chunk)][index] -= np.float32(alpha) * (value * scale)
    subtract_sent(ownership, momentum, sent, update, alpha, step=5)
    found = coefficients(ownership, momentum, 5)
    for chunk, values in expected.items():
        if ownership.holds_elements:
            np.testing.assert_allclose(found[chunk], values, atol=1e-5)
        else:
            assert np.array_equal(found[chunk], values)


@pytest.mark.parametrize("marks", [1, 1 << 20])
def test_a_contribution_meets_an_update_of_other_chunks(marks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All chunks pick alike. The update has chunks that this rank does not own, and lacks some of its coefficients."""
    monkeypatch.setattr("algorithms.momentum.MARKS", marks)
    layout = ParameterLayout([TensorSpec("w", (64 * 7, 64), 0)])
    gradients = {0: torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).repeat(7, 1)}
    full = everything(encode(*owned(layout), gradients, beta=0.0, k=8, codec="sign"), layout).shapes[64, 64]
    ours = full.indices[:8].tolist()
    assert full.indices.tolist() == 7 * ours
    expected = dict.fromkeys(range(7), ours) | {3: [], 5: ours[4:], 6: ours[2:]}
    listed = np.full(56, True)
    listed[24:32] = False  # nothing of chunk 3, which is not in the update at all
    listed[40:44] = False  # half of chunk 5
    values = full.values.copy()
    values[48:50] = 0  # two of chunk 6
    chunks = np.arange(7) != 3
    part = UpdateCoefficients(
        full.chunks[chunks],
        listed.reshape(7, 8).sum(axis=1)[chunks],
        full.indices[listed],
        values[listed],
        full.exponents[chunks],
        full.bits[chunks],
    )
    ownership, momentum = owned(layout, 1, 2)
    sent = encode(ownership, momentum, gradients, beta=0.0, k=8, codec="int8")
    before = coefficients(ownership, momentum, 0)
    subtract_sent(ownership, momentum, sent, AggregateUpdate({(64, 64): part}, frozenset()), 1.0)
    after = coefficients(ownership, momentum, 0)
    assert {3, 4, 5, 6} <= set(after) < set(range(7))
    for chunk, values_after in after.items():
        assert np.flatnonzero(values_after != before[chunk]).tolist() == expected[chunk]


@quick
@given(layouts(), st.integers(0, 1000))
def test_an_update_is_subtracted_where_there_is_a_momentum(layout: ParameterLayout, seed: int) -> None:
    ownership, momentum = owned(layout)
    sent = [
        encode(*owned(layout), random_gradients(layout, seed + site), beta=0.0, k=16, codec="int8", step=2)
        for site in range(2)
    ]
    update = aggregate(sent, layout, [0, 0])
    del momentum[0]
    mine = Ownership(layout, range(layout.chunk_count))
    pick(mine, momentum, {index: random_gradients(layout, 7)[index] for index in momentum}, beta=0.5, k=1, step=1)
    zeros = {0: torch.zeros(ownership.sizes[0])}
    expected = coefficients(ownership, zeros | momentum, 2)
    for part in update.shapes.values():
        ends = np.cumsum(part.counts)
        for chunk, end, count, exponent in zip(part.chunks, ends, part.counts, part.exponents, strict=True):
            if chunk >= layout.tensor_chunks[0][1]:
                indices, values = part.indices[end - count : end], part.values[end - count : end]
                expected[int(chunk)][indices] -= np.float32(0.25) * (values * np.float32(2.0 ** int(exponent)))
    subtract_update(ownership, momentum, update, 0.25, step=2)
    found = coefficients(ownership, zeros | momentum, 2)
    assert 0 not in momentum
    for chunk, values in expected.items():
        np.testing.assert_allclose(found[chunk], values, atol=1e-5)


@pytest.mark.parametrize("tile", [4096, 1 << 20])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_all_that_was_sent_and_listed_is_gone(transform: Transform, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a value per coefficient (k = 1) and alpha 1; the others stay as they were, in the basis of the step."""
    monkeypatch.setattr("algorithms.ownership.TILE_ELEMENTS", tile)
    layout = ParameterLayout([TensorSpec("w", (188, 64), 0)], transform=transform)
    ownership, momentum = owned(layout)
    sent = encode(ownership, momentum, random_gradients(layout, 0), beta=0.0, k=1, codec="int8", step=8)
    before = coefficients(ownership, momentum, 8)
    update = everything(sent, layout)
    subtract_sent(ownership, momentum, sent, update, 1.0, step=8)
    after = coefficients(ownership, momentum, 8)
    rows = [row for part in sent.shapes.values() for row in zip(part.chunks, part.indices, part.scales, strict=True)]
    assert len(rows) == 3
    for chunk, (index,), scale in rows:
        assert abs(before[int(chunk)][index]) > 2
        assert abs(after[int(chunk)][index]) <= scale / 2 + 1e-5
        others = np.arange(before[int(chunk)].size) != index
        np.testing.assert_allclose(after[int(chunk)][others], before[int(chunk)][others], atol=1e-5)


def test_random_subtracts_in_the_basis_of_the_contribution() -> None:
    layout = matrix_layout("random")
    ownership, momentum = owned(layout)
    sent = encode(ownership, momentum, random_gradients(layout, 0), beta=0.0, k=32, codec="int8", step=8)
    norms = []
    for step in (8, 9):
        copy = {index: value.clone() for index, value in momentum.items()}
        subtract_sent(ownership, copy, sent, everything(sent, layout), 1.0, step)
        norms.append(math.hypot(*(float(value.norm()) for value in copy.values())))
    start = math.hypot(*(float(value.norm()) for value in momentum.values()))
    assert norms[0] < 0.97 * start < start < norms[1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_cuda_picks_and_subtracts_as_the_cpu(transform: Transform) -> None:
    layout = matrix_layout(transform)
    found = []
    for device in ("cpu", "cuda"):
        ownership, momentum = owned(layout)
        momentum = {index: value.to(device) for index, value in momentum.items()}
        gradients = {index: value.to(device) for index, value in random_gradients(layout, 0).items()}
        sent = encode(ownership, momentum, gradients, beta=0.9, k=8, codec="int8", step=1)
        subtract_sent(ownership, momentum, sent, everything(sent, layout), 1.0, step=1)
        found.append(by_chunk(pick(ownership, momentum, {}, beta=0.9, k=8, step=2), layout))
    assert_close(*found, atol=1e-4)
