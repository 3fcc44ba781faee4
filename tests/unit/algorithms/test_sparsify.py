"""The float transform against products in float64 and scipy, and the exact top-k against a sort."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.fft import dctn

from algorithms.sparsify import add_forward, add_inverse, candidates, forward, largest, sides
from algorithms.transforms import TRANSFORMS, Transform, basis

CPU = torch.device("cpu")
lengths = st.sampled_from([1, 2, 3, 7, 16, 31, 32, 33, 43, 44, 63, 64, 65, 127, 128])
seeds = st.integers(0, 2**32)


def draw_chunks(count: int, rows: int, cols: int, seed: int) -> np.ndarray:
    """Float32 of very different magnitudes."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((count, rows, cols)) * 10.0 ** rng.integers(-6, 6, (count, 1, 1))).astype(np.float32)


def error_bound(chunks: np.ndarray) -> np.ndarray:
    """Of each chunk: a sum of n products errs by n units in the last place of the sum of magnitudes, which, the rows
    of a basis being of length 1, is at most the norm of the chunk. Four more for the rounding of the bases."""
    _, rows, cols = chunks.shape
    norms = np.sqrt(np.square(chunks.astype(np.float64)).sum(axis=(1, 2)))
    bound: np.ndarray = (rows + cols + 4) * 2.0**-24 * norms
    return bound[:, None, None]


@settings(deadline=None)
@given(st.sampled_from(TRANSFORMS), lengths, lengths, st.integers(0, 5), seeds)
def test_forward_is_the_product_with_the_bases(
    transform: Transform, rows: int, cols: int, step: int, seed: int
) -> None:
    chunks = draw_chunks(3, rows, cols, seed)
    left, right = (basis(transform, length, step).orthonormal for length in (rows, cols))
    expected = left @ chunks.astype(np.float64) @ right.T
    found = forward(torch.from_numpy(chunks), transform, step).view(3, rows, cols).numpy()
    assert (np.abs(found - expected) <= error_bound(chunks)).all()


@settings(deadline=None)
@given(lengths, lengths, seeds)
def test_dct_is_that_of_scipy(rows: int, cols: int, seed: int) -> None:
    chunks = draw_chunks(2, rows, cols, seed)
    expected = dctn(chunks.astype(np.float64), type=2, norm="ortho", axes=(1, 2))
    found = forward(torch.from_numpy(chunks), "dct").view(2, rows, cols).numpy()
    assert (np.abs(found - expected) <= error_bound(chunks)).all()


@pytest.mark.parametrize("transform", [transform for transform in TRANSFORMS if transform != "identity"])
def test_products_are_added_where_they_belong(transform: Transform) -> None:
    """A forward transform of a strided view, then its inverse, on top of what is there."""
    matrix, total, half = torch.randn(32, 5 * 43), torch.randn(10, 16, 43), torch.empty(10, 16, 43)
    lines = matrix.view(2, 16, 5, 43).transpose(1, 2)
    both = sides(transform, 16, 43, 7, CPU)
    assert both is not None
    chunks = lines.reshape(10, 16, 43)
    expected = 0.75 * total + 0.5 * forward(chunks, transform, 7).view(10, 16, 43)
    add_forward(total, lines, both, half, beta=0.75, alpha=0.5)
    assert torch.allclose(total, expected, atol=1e-5)
    coefficients = forward(chunks, transform, 7).view(1, 10, 16, 43)
    again = torch.ones(10, 16, 43)
    add_inverse(again, coefficients, both, half, alpha=-2.0)
    assert torch.allclose(again, 1 - 2 * chunks, atol=1e-5)


def test_without_beta_what_was_there_does_not_matter() -> None:
    total = torch.full((1, 8, 9), float("nan"))
    both = sides("dct", 8, 9, 0, CPU)
    assert both is not None
    add_forward(total, torch.ones(1, 1, 8, 9), both, torch.empty(1, 8, 9), beta=0.0, alpha=1.0)
    assert total.isfinite().all()


def top_k(values: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    coefficients = torch.from_numpy(values)
    return largest(*candidates(coefficients, k, torch.empty_like(coefficients)), coefficients.shape, k)


def check(values: np.ndarray, k: int, indices: np.ndarray, picked: np.ndarray) -> None:
    """k ascending positions per row, with their values, none left out that is larger."""
    assert indices.dtype == np.uint16
    assert indices.shape == (len(values), k)
    assert (np.diff(indices.astype(int), axis=1) > 0).all()
    assert np.array_equal(picked, np.take_along_axis(values, indices.astype(np.int64), 1))
    assert np.array_equal(np.sort(np.abs(picked), axis=1), np.sort(np.abs(values), axis=1)[:, -k:])


@settings(deadline=None)
@given(
    st.integers(1, 9),
    st.sampled_from([65, 66, 100, 127, 128, 700, 1892, 4096, 5000]),
    st.integers(1, 70),
    st.sampled_from([1, 2, 20, 1000, 10**9]),
    seeds,
)
def test_top_k_is_exact(count: int, elements: int, k: int, distinct: int, seed: int) -> None:
    """Also where few values are distinct, so that many are equal, and in rows of zeros."""
    k = min(k, elements)
    rng = np.random.default_rng(seed)
    values = rng.integers(-distinct, distinct, (count, elements)).astype(np.float32)
    values[rng.random(count) < 0.2] = 0
    check(values, k, *top_k(values, k))


@pytest.mark.parametrize("k", [1, 32, 512, 1024, 2048, 4095, 4096])
def test_top_k_of_many(k: int) -> None:
    values = np.random.default_rng(k).standard_normal((40, 4096)).astype(np.float32)
    check(values, k, *top_k(values, k))


@pytest.mark.parametrize("k", [1, 8, 32, 128])
def test_candidates_are_few_more_than_needed(k: int) -> None:
    values = torch.randn(64, 4096, generator=torch.Generator().manual_seed(k))
    places, found = candidates(values, k, torch.empty_like(values))
    assert 64 * k <= places.size < 1.2 * 64 * k + 1
    assert (np.diff(places) > 0).all()
    assert np.array_equal(found, values.view(-1).numpy()[places])


def test_candidates_of_equal_values_are_not_all_of_them() -> None:
    places, _ = candidates(torch.zeros(5, 4096), 8, torch.empty(5, 4096))
    assert places.size == 40


@given(st.data(), st.integers(1, 4), seeds)
def test_largest_of_ragged_candidates(data: st.DataObject, k: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = data.draw(st.lists(st.integers(k, 9), min_size=1, max_size=5))
    columns = [np.sort(rng.permutation(50)[:size]) for size in sizes]
    values = [rng.integers(-3, 4, size).astype(np.float32) for size in sizes]
    places = np.concatenate([row * 50 + column for row, column in enumerate(columns)])
    indices, picked = largest(places, np.concatenate(values), (len(sizes), 50), k)
    full = np.zeros((len(sizes), 50), np.float32)
    for row, (column, value) in enumerate(zip(columns, values, strict=True)):
        full[row, column] = value
        assert set(indices[row].tolist()) <= set(column.tolist())
    check(full, k, indices, picked)
