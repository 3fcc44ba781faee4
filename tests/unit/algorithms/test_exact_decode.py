from collections.abc import Iterator

import numpy as np
import pytest
import torch

from algorithms.decode import SINGLE_PASS_L1, Method, decode, known_answer, signs
from algorithms.sparsify import forward
from algorithms.transforms import basis

SHAPES = [(1, 1), (1, 64), (7, 64), (44, 43), (64, 64), (32, 17), (127, 65), (128, 128), (128, 64)]


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def oracle(values: np.ndarray) -> np.ndarray:
    left, right = (basis("dct", length).integers.astype(np.int64) for length in values.shape[1:])
    return left.T @ values @ right


def worst_chunks(rows: int, cols: int) -> np.ndarray:
    """Fully dense chunks: equal signs, signs aligned with every corner of the inverse, and random ones."""
    left, right = (basis("dct", length).integers.astype(np.int64) for length in (rows, cols))
    corners = [np.sign(np.outer(left[:, x], right[:, y])) for x in (0, rows - 1) for y in (0, cols - 1)]
    random = np.random.default_rng(0).integers(-127, 128, (3, rows, cols))
    return np.concatenate([np.full((1, rows, cols), 127), 127 * np.stack(corners), random])


@pytest.mark.parametrize("method", ["auto", "split", "float64"])
@pytest.mark.parametrize("shape", SHAPES)
def test_dense_worst_cases_are_exact(shape: tuple[int, int], method: Method, threads: int) -> None:
    chunks = worst_chunks(*shape)
    answer = oracle(chunks)
    values = torch.from_numpy(chunks).float()
    assert np.array_equal(decode(values, method).numpy(), answer)
    assert np.array_equal(signs(values, method).numpy(), np.sign(answer))


@pytest.mark.parametrize("method", ["auto", "single", "split", "float64"])
@pytest.mark.parametrize("shape", SHAPES)
def test_sparse_chunks_are_exact(shape: tuple[int, int], method: Method, threads: int) -> None:
    rng = np.random.default_rng(1)
    chunks = np.zeros((20, shape[0] * shape[1]), np.int64)
    for chunk in chunks:
        places = rng.permutation(chunk.size)[:148]
        chunk[places] = rng.integers(-7, 8, places.size)
    chunks = chunks.reshape(20, *shape)
    assert np.abs(chunks).sum(axis=(1, 2)).max() <= SINGLE_PASS_L1
    values = torch.from_numpy(chunks).float()
    assert np.array_equal(decode(values, method).numpy(), oracle(chunks))
    assert np.array_equal(signs(values, method).numpy(), np.sign(oracle(chunks)))


def test_a_single_pass_of_a_dense_chunk_would_not_be_exact() -> None:
    chunks = worst_chunks(64, 64)
    assert not np.array_equal(decode(torch.from_numpy(chunks).float(), "single").numpy(), oracle(chunks))


def test_sign_of_zero_is_positive_zero() -> None:
    zeros = torch.zeros(1, 64, 64)
    for method in ("single", "split", "float64"):
        assert not torch.signbit(signs(-zeros, method)).any()


def test_autocast_does_not_reach_the_products() -> None:
    chunks = worst_chunks(64, 64)
    with torch.autocast("cpu", torch.bfloat16):
        assert np.array_equal(decode(torch.from_numpy(chunks).float()).numpy(), oracle(chunks))
        assert forward(torch.ones(1, 64, 64), "dct").dtype == torch.float32


def test_known_answer_holds_here_and_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    assert known_answer(torch.device("cpu"), SHAPES)
    monkeypatch.setattr("algorithms.decode.decode", lambda values, method: decode(values, method) + 1)
    assert not known_answer(torch.device("cpu"), [(64, 64)])


def test_decode_inverts_the_forward_transform() -> None:
    chunks = torch.randn(5, 40, 33, generator=torch.Generator().manual_seed(0))
    coefficients = forward(chunks, "dct").view(5, 40, 33)
    step = coefficients.abs().max() / 127
    quantised = (coefficients / step).round()
    again = decode(quantised) * step / (basis("dct", 40).scale * basis("dct", 33).scale)
    assert torch.nn.functional.cosine_similarity(again.flatten(), chunks.double().flatten(), dim=0) > 0.999
