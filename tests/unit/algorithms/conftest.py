from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from algorithms import kernels
from algorithms.codec import Codec, Coefficients, SparseUpdate, quantise
from algorithms.layout import ParameterLayout, TensorSpec, kept

ODD_SHAPES = {
    "scalar": (),
    "empty": (0, 5),
    "vector": (50257,),
    "short": (7,),
    "prime": (127, 131),
    "tall": (32003, 64),
    "conv1": (16, 24, 3),
    "conv2": (40, 8, 3, 3),
    "conv3": (8, 4, 3, 3, 3),
    "per_channel": (96, 1, 1),
    "experts": (5, 70, 65),
    "expert_rows": (3, 1, 300),
    "row": (1, 300),
    "column": (300, 1),
    "stacks": (2, 3, 33, 40),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors on a shared machine: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["compiled", "numpy"], scope="module")
def loops(request: pytest.FixtureRequest) -> Iterator[None]:
    """Both ways of doing what `kernels` compiles."""
    if request.param == "compiled" and kernels.compiled is None:
        pytest.skip("the loops are not compiled: install with a C compiler")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "numpy":
            patch.setattr(kernels, "compiled", None)
        yield


@pytest.fixture(params=[32, 64, 128])
def odd_layout(request: pytest.FixtureRequest) -> ParameterLayout:
    return ParameterLayout([TensorSpec(name, shape, 0) for name, shape in ODD_SHAPES.items()], request.param)


@pytest.fixture
def small_layout() -> ParameterLayout:
    shapes = {"a": (100, 70), "b": (70,), "c": (), "d": (40, 8, 3, 3)}
    return ParameterLayout([TensorSpec(name, shape, number % 2) for number, (name, shape) in enumerate(shapes.items())])


@pytest.fixture
def contribute() -> Callable[..., SparseUpdate]:
    def build(
        layout: ParameterLayout, k: int, codec: Codec, seed: int, absent: frozenset[int] = frozenset()
    ) -> SparseUpdate:
        """Random coefficients, the k largest of each chunk; every seventh chunk of a shape is zero."""
        rng = np.random.default_rng(seed)
        shapes = {}
        for shape in layout.shapes:
            elements = shape[0] * shape[1]
            numbers = layout.select(shape, absent)
            count = kept(k, elements, layout.chunk)
            full = rng.standard_normal((numbers.size, elements)).astype(np.float32)
            full[6::7] = 0
            indices = np.sort(np.argsort(-np.abs(full), axis=1)[:, :count], axis=1)
            values, scales = quantise(np.take_along_axis(full, indices, 1), codec)
            if numbers.size:
                shapes[shape] = Coefficients(numbers, indices.astype(np.uint16), values, scales)
        return SparseUpdate(shapes, absent, codec)

    return build
