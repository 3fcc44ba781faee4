"""Base updates: the same bits however an update is computed, and the directions that their formulas say."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from algorithms.apply import apply_update
from algorithms.base_updates import BASE_UPDATES, orthogonal
from algorithms.layout import CHUNKS, ParameterLayout, TensorSpec, is_dense
from algorithms.settings import INEXACT_BASE_UPDATES
from algorithms.transforms import TRANSFORMS, Transform
from algorithms.updates import AggregateUpdate, UpdateCoefficients

EXACT = [name for name, base_update in BASE_UPDATES.items() if base_update.exact]
CPU = torch.device("cpu")


def layout_of(*shapes: tuple[int, ...], chunk: int = 64, transform: Transform = "dct") -> ParameterLayout:
    return ParameterLayout([TensorSpec(str(i), shape, 0) for i, shape in enumerate(shapes)], chunk, transform=transform)


def random_update(
    layout: ParameterLayout, density: float, seed: int, limit: int = 127, absent: frozenset[int] = frozenset()
) -> AggregateUpdate:
    """Integers of all magnitudes at random places; some chunks have none."""
    rng = np.random.default_rng(seed)
    shapes = {}
    for shape in layout.shapes:
        elements = shape[0] * shape[1]
        numbers = layout.select(shape, absent)
        if not numbers.size:
            continue
        values = rng.integers(-limit, limit + 1, (numbers.size, elements))
        values[rng.random(values.shape) >= density] = 0
        values[rng.random(numbers.size) < 0.2] = 0
        sent = np.full(values.shape, True) if is_dense(elements) else values != 0
        shapes[shape] = UpdateCoefficients(
            chunks=numbers,
            counts=np.count_nonzero(sent, axis=1),
            indices=np.nonzero(sent)[1].astype(np.uint16),
            values=values[sent].astype(np.int8),
            exponents=rng.integers(-20, 5, numbers.size).astype(np.int16),
            bits=np.full(numbers.size, 8, np.uint8),
        )
    return AggregateUpdate(shapes, absent)


def random_parameters(layout: ParameterLayout, seed: int = 0) -> dict[int, torch.Tensor]:
    """A third of the elements are 0 or -0, so that the last bit of a small movement shows."""
    generator = torch.Generator().manual_seed(seed)
    parameters = {}
    for index, tensor in enumerate(layout.tensors):
        flat = torch.randn(tensor.elements, generator=generator)
        flat[::3] = 0.0
        flat[3::6] = -0.0
        parameters[index] = flat
    return parameters


def moved(update: AggregateUpdate, layout: ParameterLayout, base_update: Any, exact: bool = True) -> list[bytes]:
    """The bytes of parameters and state after two entries."""
    parameters = random_parameters(layout)
    state: dict[int, dict[str, torch.Tensor]] = {index: {} for index in parameters}
    for step in (5, 6):
        apply_update(
            update,
            layout,
            parameters,
            [0.03125],
            [0.875],
            lambda _: exact,
            base_update=base_update,
            beta2=0.95,
            state=state,
            step=step,
        )
    tensors = [*parameters.values(), *(value for own in state.values() for value in own.values())]
    return [tensor.numpy().tobytes() for tensor in tensors]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from([(130, 97), (300, 64), (64, 300), (3, 70, 50), (1000,), (5, 3, 3, 3), (128, 128), (2, 2)]),
    st.sampled_from(CHUNKS),
    st.sampled_from(TRANSFORMS),
    st.sampled_from(EXACT),
    st.sampled_from([0.01, 0.03, 0.5, 1.0]),
    st.integers(0, 2**32),
)
def test_bits_do_not_depend_on_threads_forms_and_tiles(
    shape: tuple[int, ...], chunk: int, transform: Transform, base_update: str, density: float, seed: int
) -> None:
    layout = layout_of(shape, chunk=chunk, transform=transform)
    update = random_update(layout, density, seed)
    expected = moved(update, layout, base_update)
    assert moved(update, layout, base_update, exact=False) == expected
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("algorithms.decode.EXACT_LIMIT", 0)  # never a single pass
        assert moved(update, layout, base_update) == expected
    for tile in (1, 3 * chunk * chunk, 2**40):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("algorithms.tensor_update.CPU_TILE", tile)
            assert moved(update, layout, base_update) == expected
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3 - min(threads, 2))
        assert moved(update, layout, base_update) == expected
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("base_update", EXACT)
def test_bits_of_many_sites_over_many_tiles(base_update: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of all coefficients, as 64 sites send them."""
    layout = layout_of((700, 650), (1300,))
    update = random_update(layout, 0.5, 0)
    expected = moved(update, layout, base_update, exact=False)
    assert moved(update, layout, base_update) == expected
    monkeypatch.setattr("algorithms.tensor_update.CPU_TILE", 5 * 64 * 64)
    assert moved(update, layout, base_update) == expected


@pytest.mark.parametrize("base_update", BASE_UPDATES)
def test_chunks_without_coefficients_are_decayed_and_absent_tensors_are_not(base_update: str) -> None:
    layout = layout_of((64, 128), (64, 64), (70,))
    update = random_update(layout, 0.1, 0, absent=frozenset({1}))
    part = update.shapes[64, 64]
    first = int(part.counts[0])
    one = UpdateCoefficients(
        part.chunks, np.array([first, 0]), part.indices[:first], part.values[:first], part.exponents, part.bits
    )
    update.shapes[64, 64] = one  # type: ignore[index]
    assert first > 0
    parameters = random_parameters(layout)
    before = {index: flat.clone() for index, flat in parameters.items()}
    state: dict[int, dict[str, torch.Tensor]] = {index: {} for index in parameters}
    apply_update(update, layout, parameters, [0.5], [0.75], lambda _: True, base_update=base_update, state=state)
    halves, were = (flat[0].view(64, 128).split(64, dim=1) for flat in (parameters, before))
    assert not torch.equal(halves[0], were[0] * 0.75)
    if base_update != "muon":  # which works on whole matrices
        assert halves[1].numpy().tobytes() == (were[1] * 0.75).numpy().tobytes()
    assert parameters[1].numpy().tobytes() == before[1].numpy().tobytes()
    assert state[1] == {}
    assert bool(state[0]) == (base_update == "adam")


def test_adam_is_the_formula_bit_by_bit() -> None:
    """Against numpy in float32, where every operation is correctly rounded; u is that of sgd."""
    layout = layout_of((200, 190))
    moment, unseen = np.zeros(200 * 190, np.float32), 1.0
    parameters = {0: torch.zeros(200 * 190)}
    state: dict[int, dict[str, torch.Tensor]] = {0: {}}
    beta2, lr = np.float32(0.99), np.float32(0.001)
    for seed in range(4):
        update = random_update(layout, 0.05, seed)
        minus_u = {0: torch.zeros(200 * 190)}
        apply_update(update, layout, minus_u, [1.0], [1.0], lambda _: True, base_update="sgd")
        u = -minus_u[0].numpy()
        expected = parameters[0].numpy().copy()
        moment = beta2 * moment + ((np.float32(1) - beta2) * u) * u
        unseen *= float(beta2)
        denominator = np.sqrt(moment / np.float32(1 - unseen)) + np.float32(1e-8)
        expected -= u / denominator * lr
        apply_update(update, layout, parameters, [float(lr)], [1.0], lambda _: True, base_update="adam", state=state)
        assert np.array_equal(parameters[0].numpy(), expected)
        assert np.array_equal(state[0]["second_moment"].numpy(), moment)
        assert state[0]["unseen"].item() == unseen
    assert state[0]["second_moment"].dtype == torch.float32
    assert state[0]["unseen"].dtype == torch.float64


def test_adam_moves_by_the_learning_rate_at_first() -> None:
    layout = layout_of((64, 64))
    parameters, state = {0: torch.zeros(4096)}, {0: dict[str, torch.Tensor]()}
    update = random_update(layout, 1.0, 0)
    apply_update(update, layout, parameters, [0.25], [1.0], lambda _: True, base_update="adam", state=state)
    signs = {0: torch.zeros(4096)}
    apply_update(update, layout, signs, [0.25], [1.0], lambda _: True)
    torch.testing.assert_close(parameters[0], signs[0], rtol=1e-5, atol=0)


# --- muon -------------------------------------------------------------------------------------------------------------

SIDES = st.integers(2, 60)


def newton_schulz(matrix: np.ndarray) -> np.ndarray:
    """The singular values through the polynomial five times, in float64, then root mean square 1."""
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    values = values / np.sqrt(np.square(values).sum())
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    product = (left * values) @ right
    return product / np.sqrt(np.square(product).mean())


@settings(deadline=None)
@given(SIDES, SIDES, st.integers(0, 2**32), st.sampled_from([1e-30, 1e-6, 1.0, 1e30]))
def test_orthogonal_is_the_newton_schulz_iteration(rows: int, cols: int, seed: int, size: float) -> None:
    matrix = np.random.default_rng(seed).standard_normal((rows, cols)) * size
    found = orthogonal(torch.from_numpy(matrix).float()).numpy()
    assert np.abs(found - newton_schulz(matrix.astype(np.float32).astype(np.float64))).max() < 1e-3


@pytest.mark.parametrize("shape", [(64, 64), (30, 80), (80, 30)])
def test_orthogonal_is_near_the_polar_factor(shape: tuple[int, int]) -> None:
    """`U V'` but for the singular values: those of condition 10 come out within 0.7 to 1.2 before they are scaled."""
    generator = torch.Generator().manual_seed(0)
    left, _, right = torch.linalg.svd(torch.randn(shape, generator=generator), full_matrices=False)
    matrix = left * torch.linspace(0.1, 1, min(shape)) @ right
    found = orthogonal(matrix)
    assert found.square().mean().item() == pytest.approx(1, rel=1e-5)
    polar = left @ right * max(shape) ** 0.5
    values = torch.linalg.svdvals(found)
    assert values.max() / values.min() < 1.2 / 0.7
    assert torch.nn.functional.cosine_similarity(found.flatten(), polar.flatten(), dim=0) > 0.98


def test_orthogonal_of_zero_is_zero() -> None:
    assert torch.equal(orthogonal(torch.zeros(5, 7)), torch.zeros(5, 7))


def decoded(update: AggregateUpdate, layout: ParameterLayout) -> dict[int, torch.Tensor]:
    """u, by way of sgd."""
    parameters = {index: torch.zeros(tensor.elements) for index, tensor in enumerate(layout.tensors)}
    apply_update(update, layout, parameters, [1.0], [1.0], lambda _: True, base_update="sgd")
    return {index: -flat for index, flat in parameters.items()}


def test_muon_takes_the_matrices_of_the_layout_and_signs_of_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("algorithms.tensor_update.CPU_TILE", 64 * 64)
    matrices = {0: (1, 130, 97), 1: (3, 20, 70), 2: (1, 6, 27)}
    layout = layout_of((130, 97), (3, 20, 70), (6, 3, 3, 3), (500,), (1, 300), ())
    update = random_update(layout, 1.0, 3, limit=9)
    parameters = random_parameters(layout)
    before = {index: flat.clone() for index, flat in parameters.items()}
    apply_update(update, layout, parameters, [0.125], [0.5], lambda _: True, base_update="muon")
    for index, u in decoded(update, layout).items():
        direction = torch.sign(u)
        if index in matrices:
            items = u.double().view(matrices[index]).numpy()
            direction = torch.from_numpy(np.stack([newton_schulz(item) for item in items])).float().flatten()
        torch.testing.assert_close(parameters[index], before[index] * 0.5 - direction * 0.125, rtol=0, atol=1e-3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("base_update", EXACT)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_gpu_gives_the_bits_of_a_cpu(base_update: str, transform: Transform) -> None:
    layout = layout_of((300, 200), (1000,), (5,), transform=transform)
    update = random_update(layout, 0.05, 0)
    results = []
    for device in (CPU, torch.device("cuda")):
        parameters = {index: flat.to(device) for index, flat in random_parameters(layout).items()}
        state: dict[int, dict[str, torch.Tensor]] = {index: {} for index in parameters}
        for step in range(3):
            apply_update(
                update,
                layout,
                parameters,
                [0.03125],
                [0.875],
                lambda _: True,
                base_update=base_update,
                state=state,
                step=step,
            )
        results.append([flat.cpu().numpy().tobytes() for flat in parameters.values()])
    assert results[0] == results[1]


def test_settings_know_which_base_updates_are_not_exact() -> None:
    assert {name for name, base_update in BASE_UPDATES.items() if not base_update.exact} == INEXACT_BASE_UPDATES
