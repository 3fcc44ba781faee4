from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from algorithms.codec import pack_contribution
from algorithms.layout import ParameterLayout, TensorSpec, kept
from algorithms.traffic import coefficients, contribution_bytes, ddp_bytes, parameters_bytes
from algorithms.updates import CODEC_LIMITS, Codec, Coefficients, Indices, SparseUpdate
from tests.unit.algorithms.test_against_reference import layouts, thorough

CODECS = get_args(Codec)
FORMS = get_args(Indices)


def spread(layout: ParameterLayout, k: int, codec: Codec) -> SparseUpdate:
    """A contribution of about evenly spaced coefficients, all of the codec's largest value."""
    rng = np.random.default_rng(0)
    shapes = {}
    for shape in layout.shapes:
        elements = shape[0] * shape[1]
        numbers, count = layout.select(shape), kept(k, elements, layout.chunk)
        gap = elements // count
        indices = np.arange(count) * gap + rng.integers(0, gap, (numbers.size, count))
        values = np.full(indices.shape, CODEC_LIMITS[codec], np.int16 if codec == "int16" else np.int8)
        scales = np.ones(numbers.size, np.float32)
        shapes[shape] = Coefficients(numbers, indices.astype(np.uint16), values, scales)
    return SparseUpdate(shapes, frozenset(), codec)


@thorough
@given(layouts(), st.sampled_from(CODECS), st.sampled_from(FORMS), st.data())
def test_formula_is_the_size_of_what_is_packed(layout: ParameterLayout, codec: Any, form: Any, data: Any) -> None:
    k = data.draw(st.integers(1, layout.chunk**2))
    update = spread(layout, k, codec)
    arrays = pack_contribution(update, layout, codec, form)
    assert sum(array.nbytes for array in arrays.values()) == contribution_bytes(layout, k, codec, form)
    assert sum(part.values.size for part in update.shapes.values()) == coefficients(layout, k)


@thorough
@given(layouts(), st.sampled_from(CODECS), st.sampled_from(FORMS), st.data())
def test_no_tensor_takes_more_than_in_float32(layout: ParameterLayout, codec: Any, form: Any, data: Any) -> None:
    k = data.draw(st.integers(1, layout.chunk**2))
    for tensor in layout.tensors:
        alone = ParameterLayout([tensor], layout.chunk)
        assert contribution_bytes(alone, k, codec, form) <= parameters_bytes(alone)
        assert contribution_bytes(alone, k, codec, "compact") <= contribution_bytes(alone, k, codec)


def transformer(width: int, mlp: tuple[int, int], layers: int, chunk: int) -> ParameterLayout:
    """The matrices of an OLMo model: `mlp` is the width after the first product, and that before the second."""
    embedding = TensorSpec("embedding", (50304, width), 0)
    blocks = {"qkv": (width, 3 * width), "out": (width, width), "mlp_in": (width, mlp[0]), "mlp_out": (mlp[1], width)}
    matrices = [TensorSpec(f"{layer}.{name}", shape, 0) for layer in range(layers) for name, shape in blocks.items()]
    return ParameterLayout([embedding, *matrices], chunk)


@pytest.mark.parametrize(
    ("width", "mlp", "chunk", "k", "megabytes"),
    [
        (1024, (8192, 4096), 64, 1, "0.937"),
        (1024, (8192, 4096), 64, 8, "7.499"),
        (1024, (8192, 4096), 64, 32, "29.995"),
        (1024, (8192, 4096), 128, 32, "7.499"),
        (2048, (16384, 8192), 64, 8, "27.58"),
        (2048, (16384, 8192), 64, 16, "55.16"),
    ],
)
def test_figures_of_the_paper(width: int, mlp: tuple[int, int], chunk: int, k: int, megabytes: str) -> None:
    """DeMo (arXiv 2411.19870): MB sent per step by OLMo-300M and OLMo-1B, of 10^6 bytes.

    A coefficient is an int64 index and a float32 value there.
    """
    layout = transformer(width, mlp, 16, chunk)
    digits = len(megabytes.split(".")[1])
    assert f"{12 * coefficients(layout, k) / 1e6:.{digits}f}" == megabytes


@pytest.mark.parametrize(
    ("k", "packed", "compact"),
    [(32, 1.70, 1.33), (8, 1.88, 1.74)],
)
def test_bytes_per_coefficient_of_a_model(k: int, packed: float, compact: float) -> None:
    """Ten million parameters in matrices and vectors, signs, all arrays counted."""
    matrices = [TensorSpec(f"w{i}", shape, 0) for i, shape in enumerate([(1024, 4096), (4096, 1024), (1024, 2048)])]
    vectors = [TensorSpec(f"v{i}", (1024,), 0) for i in range(8)]
    layout = ParameterLayout([*matrices, *vectors])
    assert layout.parameter_count > 10_000_000
    update = spread(layout, k, "sign")
    for form, most in zip(FORMS, (packed, compact), strict=True):
        size = sum(array.nbytes for array in pack_contribution(update, layout, "sign", form).values())
        assert size <= most * coefficients(layout, k)


def test_bytes_of_known_sizes() -> None:
    layout = ParameterLayout([TensorSpec("w", (768, 768), 0)])
    assert contribution_bytes(layout, 32, "sign") == 144 * (32 * 12 // 8 + 32 // 8 + 2)
    assert contribution_bytes(layout, 32, "sign", "compact") == 144 * (32 * 7 + 63) // 8 + 144 * (32 // 8 + 2)
    assert contribution_bytes(layout, 32, "int2") == 144 * (32 * 12 // 8 + 32 // 4 + 2)
    assert contribution_bytes(layout, 32, "int4") == 144 * (32 * 12 // 8 + 32 // 2 + 2)
    assert contribution_bytes(layout, 32, "int8") == 144 * (32 * 12 // 8 + 32 + 2)
    assert contribution_bytes(layout, 32, "int16") == 144 * (32 * 12 // 8 + 64 + 2)
    assert coefficients(layout, 32) == 144 * 32
    assert (ddp_bytes(layout), parameters_bytes(layout)) == (2 * 768**2, 4 * 768**2)
