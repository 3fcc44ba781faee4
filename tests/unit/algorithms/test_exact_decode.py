"""The inverse transform: exact in every form, for every transform, with any number of threads."""

from collections.abc import Iterator
from decimal import Decimal, localcontext
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from algorithms import decode as module
from algorithms.decode import Inverse, Method, decode, known_answer, signs, values
from algorithms.layout import is_dense
from algorithms.sparsify import forward
from algorithms.transforms import MAX_LENGTH, TRANSFORMS, Transform, basis
from algorithms.updates import UpdateCoefficients

SHAPES = [(1, 1), (7, 64), (44, 43), (64, 64), (32, 17), (127, 65), (128, 128), (128, 64), (1, 100)]
SINGLE_PASS_L1 = 1056
"""Largest L1 norm for which the single pass is exact with DCT bases."""


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def part_of(chunks: np.ndarray, exponents: np.ndarray | None = None) -> UpdateCoefficients:
    """Chunks of integers (m, rows, cols) as an update has them: zeros are left out, except of dense chunks."""
    flat = chunks.reshape(len(chunks), -1)
    sent = np.full(flat.shape, True) if is_dense(flat.shape[1]) else flat != 0
    return UpdateCoefficients(
        chunks=np.arange(len(flat)),
        counts=np.count_nonzero(sent, axis=1),
        indices=np.nonzero(sent)[1].astype(np.uint16),
        values=flat[sent].astype(np.int8),
        exponents=np.zeros(len(flat), np.int16) if exponents is None else exponents.astype(np.int16),
        bits=np.full(len(flat), 8, np.uint8),
    )


def oracle(chunks: np.ndarray, transform: Transform = "dct", step: int = 0) -> np.ndarray:
    """The inverse in int64, in the order (rows, m, cols)."""
    rows, cols = chunks.shape[1:]
    if is_dense(rows * cols):
        return chunks.transpose(1, 0, 2)
    left, right = (basis(transform, length, step).integers.astype(np.int64) for length in (rows, cols))
    return (left.T @ chunks @ right).transpose(1, 0, 2)


def assert_exact(chunks: np.ndarray, inverse: Inverse, answer: np.ndarray | None = None) -> None:
    part, shape = part_of(chunks), chunks.shape[1:]
    if answer is None:
        answer = oracle(chunks, inverse.transform, inverse.step)
    for found, right in (
        (decode(part, shape, inverse), answer),
        (signs(part, shape, inverse), np.sign(answer)),
    ):
        array = found.numpy()
        assert np.array_equal(array, right)
        assert not np.signbit(array[right == 0]).any()


@cache
def worst_case(shape: tuple[int, int], transform: Transform) -> tuple[np.ndarray, np.ndarray]:
    """Chunks, and what they are decoded to."""
    chunks = worst_chunks(*shape, transform)
    return chunks, oracle(chunks, transform)


def worst_chunks(rows: int, cols: int, transform: Transform = "dct") -> np.ndarray:
    """Full chunks: equal signs, signs aligned with every corner of the inverse, and random ones; and an empty one."""
    left, right = (basis(transform, length).integers.astype(np.int64) for length in (rows, cols))
    corners = [np.sign(np.outer(left[:, x], right[:, y])) for x in (0, rows - 1) for y in (0, cols - 1)]
    random = np.random.default_rng(0).integers(-127, 128, (3, rows, cols))
    full = np.full((1, rows, cols), 127)
    return np.concatenate([full, 127 * np.stack(corners), random, np.zeros_like(full), -full])


@pytest.mark.parametrize(
    ("method", "threads"), [("auto", 1), ("auto", 2), ("split", 2), ("float64", 2)], indirect=["threads"]
)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_full_worst_cases_are_exact(shape: tuple[int, int], transform: Transform, method: Method, threads: int) -> None:
    chunks, answer = worst_case(shape, transform)
    assert_exact(chunks, Inverse(transform, method=method), answer)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_single_pass_is_exact_up_to_its_bound(shape: tuple[int, int], threads: int) -> None:
    """Coefficients of one sign and of the signs of a corner, with L1 norms of exactly the bound."""
    magnitudes = np.clip(SINGLE_PASS_L1 - 127 * np.arange(shape[0] * shape[1]), 0, 127)
    places = np.random.default_rng(0).permutation(magnitudes.size)
    chunk = magnitudes[places].reshape(1, *shape)
    chunks = np.concatenate([chunk, chunk * np.sign(worst_chunks(*shape))])
    assert np.abs(chunks).sum(axis=(1, 2)).max() <= SINGLE_PASS_L1
    assert_exact(chunks, Inverse(method="single"))


@pytest.mark.parametrize("transform", ["hadamard", "identity"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_single_pass_without_scale_is_always_exact(shape: tuple[int, int], transform: Transform) -> None:
    chunks, answer = worst_case(shape, transform)
    assert_exact(chunks, Inverse(transform, method="single"), answer)


@pytest.mark.parametrize("norm", [1080, 2000])
def test_chunks_beyond_the_bound_are_split(norm: int) -> None:
    """Coefficients at the largest terms of element (0, 0), some less by one: the single pass gets odd sums wrong."""
    left = basis("dct", 64).integers[:, 0].astype(np.int64)
    terms = np.outer(left, left).reshape(-1)
    order = np.argsort(-np.abs(terms), kind="stable")
    magnitudes = np.clip(norm - 127 * np.arange(terms.size), 0, 127)
    chunks = np.zeros((8, terms.size), np.int64)
    less = np.random.default_rng(0).integers(0, 2, chunks.shape) * (magnitudes > 0)
    chunks[:, order] = (magnitudes - less) * np.sign(terms[order])
    chunks = chunks.reshape(-1, 64, 64)
    assert_exact(chunks, Inverse())
    found = decode(part_of(chunks), (64, 64), Inverse(method="single"))
    assert not np.array_equal(found.numpy(), oracle(chunks))


def test_products_that_give_negative_zeros_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of another library may."""
    chunks = np.zeros((3, 64, 64), np.int64)
    chunks[1, 3, 5] = 7
    product = torch.mm
    monkeypatch.setattr("algorithms.decode.torch.mm", lambda x, y: torch.where(product(x, y) == 0, -0.0, product(x, y)))
    for method in ("auto", "split", "float64"):
        assert_exact(chunks, Inverse("hadamard", method=method))


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.tuples(st.integers(1, MAX_LENGTH), st.integers(1, MAX_LENGTH)),
    st.sampled_from(TRANSFORMS),
    st.integers(0, 2**40),
    st.floats(0, 1),
    st.sampled_from([1, 7, 31, 127]),
    st.integers(0, 2**32),
)
def test_any_chunks_are_exact(
    shape: tuple[int, int], transform: Transform, step: int, density: float, limit: int, seed: int
) -> None:
    """From empty chunks to full ones, what one site sends or 64 do."""
    rng = np.random.default_rng(seed)
    chunks = rng.integers(-limit, limit + 1, (3, *shape)) * (rng.random((3, *shape)) < density)
    for method in ("auto", "split", "float64"):
        assert_exact(chunks, Inverse(transform, step, method=method))


@given(st.sampled_from(TRANSFORMS), st.sampled_from(SHAPES), st.integers(-1000, 120), st.integers(0, 2**32))
def test_values_are_the_integers_times_one_factor(
    transform: Transform, shape: tuple[int, int], exponent: int, seed: int
) -> None:
    chunks = np.random.default_rng(seed).integers(-127, 128, (2, *shape))
    exponents = np.array([exponent, 0])
    scales = [1.0, 1.0] if is_dense(shape[0] * shape[1]) else [basis(transform, length).scale for length in shape]
    unit = np.float64(np.float32(1 / (scales[0] * scales[1])))
    with np.errstate(over="ignore"):
        expected = (oracle(chunks, transform) * unit * np.ldexp(1.0, exponents)[:, None]).astype(np.float32)
    for method in ("auto", "float64"):
        found = values(part_of(chunks, exponents), shape, Inverse(transform, method=method))
        assert found.numpy().tobytes() == expected.tobytes()


def test_sign_of_zero_is_positive_zero() -> None:
    """What `signs` and the known answer rely on."""
    assert not torch.signbit(torch.sign(torch.full((100,), -0.0))).any()


def test_autocast_does_not_reach_the_products() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert_exact(worst_chunks(64, 64), Inverse())
        assert forward(torch.ones(1, 64, 64), "dct").dtype == torch.float32


# --- known answer -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_known_answer_holds_here(transform: Transform) -> None:
    assert known_answer(torch.device("cpu"), SHAPES, transform)


@pytest.mark.parametrize("transform", ["dct", "hadamard", "random"])
def test_known_answer_finds_products_of_fewer_digits(transform: Transform, monkeypatch: pytest.MonkeyPatch) -> None:
    """As TF32 or bfloat16 products are."""

    def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return (left.double() @ right.bfloat16().double()).to(right.dtype)

    monkeypatch.setattr("algorithms.decode.torch.mm", product)
    assert not known_answer(torch.device("cpu"), [(64, 64)], transform)


def test_known_answer_finds_wrong_signs_and_quotients(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    with monkeypatch.context() as patch:
        patch.setattr("algorithms.decode.signs", lambda *args: signs(*args).neg_())  # of zero, too
        assert not known_answer(device, [(7, 9)])
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "__truediv__", lambda x, y: x * y.reciprocal())
        assert not known_answer(device, [])
    assert known_answer(device, [(7, 9)])


@pytest.mark.parametrize("transform", ["dct", "random"])
@pytest.mark.parametrize("shape", [(64, 64), (128, 128), (44, 100)])
def test_known_answer_asks_for_the_worst_case(shape: tuple[int, int], transform: Transform) -> None:
    """The single pass comes within two coefficients of its bound, and the split pass has no coefficient below 126."""
    limits = [basis(transform, length).limit for length in shape]
    _, answer = module._question(shape, transform, "single")
    if limits == [126, 126]:
        assert 2**24 * 0.97 <= answer.max() < 2**24
    part, _ = module._question(shape, transform, "split")
    assert np.abs(part.values[: shape[0] * shape[1]]).min() == 126


# --- bases ------------------------------------------------------------------------------------------------------------


def test_random_bases_of_old_steps_are_let_go() -> None:
    chunk = part_of(np.ones((1, 64, 64), np.int64))
    for step in range(50):
        signs(chunk, (64, 64), Inverse("random", step))
    assert module._random_matrix.cache_info().currsize <= 8


PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459")


def exact_scale(length: int) -> Decimal:
    """`126 / max abs dct` to 50 digits.

    The maximum is 1 for n = 1, else `sqrt(2 / n)` times the largest cosine of `(2j + 1) i * pi / 2n`: that of 1 * 1 if
    n is a power of two, else that of n's odd divisor times 2n over it, which is of a whole number of half turns.
    """
    if length == 1:
        return Decimal(126)
    angle = PI / (2 * length) if length.bit_count() == 1 else Decimal(0)
    term = cosine = Decimal(1)
    for k in range(1, 40):
        term *= -angle * angle / ((2 * k - 1) * (2 * k))
        cosine += term
    return 126 / ((Decimal(2) / length).sqrt() * cosine)


def test_no_factor_of_the_values_is_near_a_rounding_tie() -> None:
    """So a libm that is wrong in the last digits of a cosine or a root gives the same float32 number.

    Every product of the scales of two lengths, DCT or Hadamard: its inverse is at least 2^-44 of itself from the
    middle of two float32 numbers, while a computation in float64 is within 2^-50.
    """
    with localcontext(prec=60):
        scales = {("dct", length): exact_scale(length) for length in range(1, MAX_LENGTH + 1)}
        scales |= {("hadamard", 2**power): Decimal(2**power).sqrt() for power in range(8)}
        closest = Decimal(1)
        for (left_kind, left), one in scales.items():
            for (right_kind, right), other in scales.items():
                factor = 1 / (one * other)
                rounded = np.float32(1 / (basis(left_kind, left).scale * basis(right_kind, right).scale))
                around = [Decimal(float(np.nextafter(rounded, np.float32(end)))) for end in (0, 2)]
                middles = [(Decimal(float(rounded)) + neighbour) / 2 for neighbour in around]
                assert middles[0] < factor < middles[1]
                closest = min(closest, *(abs(factor / middle - 1) for middle in middles))
    assert closest > Decimal(2) ** -44


def test_decode_inverts_the_forward_transform() -> None:
    chunks = torch.randn(5, 40, 33, generator=torch.Generator().manual_seed(0))
    coefficients = forward(chunks, "dct").view(5, 40, 33)
    step = coefficients.abs().max() / 127
    quantised = (coefficients / step).round().long().numpy()
    again = values(part_of(quantised), (40, 33), Inverse()).transpose(0, 1) * step
    error = (again - chunks).square().mean().sqrt()
    assert error < 0.02  # of values with deviation 1
