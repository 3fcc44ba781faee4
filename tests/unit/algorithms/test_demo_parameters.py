"""Every kind of parameter that broke somebody's optimizer, one by one."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from algorithms import DeMo
from tests.unit.algorithms.sites import momentum, with_gradient

SHAPES: dict[str, tuple[int, ...]] = {
    "scalar": (),
    "empty": (0, 4),
    "one": (1,),
    "vector": (50,),
    "prime vector": (521,),
    "prime": (127, 131),
    "row": (1, 300),
    "per channel": (96, 1, 1),
    "conv 1-D": (16, 24, 3),
    "conv 2-D": (40, 8, 3, 3),
    "conv 3-D": (8, 4, 3, 3, 3),
    "experts": (3, 40, 65),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_every_shape_moves_against_its_gradient(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    parameter = with_gradient(nn.Parameter(torch.zeros(shape, dtype=dtype)))
    optimizer = DeMo([("w", parameter)], lr=2.0**-6, k=4096, codec="int8")
    optimizer.step()
    assert parameter.dtype == dtype
    assert momentum(optimizer, parameter).numel() == parameter.numel()
    assert set(parameter.detach().unique().tolist()) <= {-(2.0**-6), 0.0, 2.0**-6}
    agrees = parameter.detach().sign() == -parameter.grad.sign()
    assert agrees.float().sum() >= 0.97 * agrees.numel()


def transposed(values: torch.Tensor) -> torch.Tensor:
    return values.transpose(0, 1).contiguous().transpose(0, 1)


def every_second(values: torch.Tensor) -> torch.Tensor:
    wide = torch.zeros(*values.shape[:-1], 2 * values.shape[-1])
    wide[..., ::2] = values
    return wide[..., ::2]


def channels_last(values: torch.Tensor) -> torch.Tensor:
    return values.to(memory_format=torch.channels_last)


@pytest.mark.parametrize("arrange", [transposed, every_second, channels_last])
def test_memory_order_does_not_matter(arrange: Callable[[torch.Tensor], torch.Tensor]) -> None:
    start = torch.randn((12, 10, 3, 3), generator=torch.Generator().manual_seed(1))
    plain, arranged = nn.Parameter(start.clone()), nn.Parameter(arrange(start))
    strides = arranged.stride()
    assert not arranged.is_contiguous()
    optimizers = [DeMo([("w", parameter)], lr=0.01, weight_decay=0.1) for parameter in (plain, arranged)]
    for seed in range(3):
        for parameter, optimizer in zip((plain, arranged), optimizers, strict=True):
            with_gradient(parameter, seed)
            optimizer.step()
    assert torch.equal(plain, arranged)
    assert arranged.stride() == strides
    assert np.array_equal(*(optimizer.read_parameters(range(1)) for optimizer in optimizers))


def test_low_precision_needs_the_master() -> None:
    """In bfloat16 alone 0.1 - 2e-4 is 0.1 again, for ever."""
    assert torch.tensor(0.1, dtype=torch.bfloat16) - 2e-4 == torch.tensor(0.1, dtype=torch.bfloat16)
    parameter = nn.Parameter(torch.full((8, 8), 0.1, dtype=torch.bfloat16))
    optimizer = DeMo([("w", parameter)], lr=2e-4, codec="int8")
    for _ in range(100):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    master = optimizer.state[parameter]["master"]
    assert torch.allclose(master, torch.tensor(0.1 - 100 * 2e-4), atol=1e-3)
    assert torch.equal(parameter.flatten(), master.bfloat16())


def test_a_tensor_that_is_there_twice_is_stepped_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = DeMo(model.named_parameters(remove_duplicate=False), lr=0.5, codec="int8")
    assert [tensor.name for tensor in optimizer.layout.tensors] == ["0.weight"]
    before = model[0].weight.detach().clone()
    with_gradient(model[0].weight)
    optimizer.step()
    assert torch.equal((model[1].weight - before).abs(), torch.full((4, 4), 0.5))
    optimizer.load_state_dict(optimizer.state_dict())
    assert model[1].weight is model[0].weight


def test_freezing_and_unfreezing() -> None:
    first, second = (with_gradient(nn.Parameter(torch.zeros(64, 64))) for _ in range(2))
    optimizer = DeMo([("a", first), ("b", second)], lr=1.0)
    second.requires_grad_(False)
    optimizer.step()
    assert first.any()
    assert not second.any()
    assert second not in optimizer.state
    second.requires_grad_(True)
    first.requires_grad_(False)
    before, held = first.detach().clone(), momentum(optimizer, first).clone()
    optimizer.step()
    assert torch.equal(first, before)
    assert torch.equal(momentum(optimizer, first), held)
    assert second.any()
    first.requires_grad_(True)
    optimizer.step()
    assert not torch.equal(first, before)


def test_the_update_enters_a_momentum_that_was_not_there() -> None:
    sender, receiver = ([nn.Parameter(torch.zeros(64, 64)) for _ in range(2)] for _ in range(2))
    receiver[1].requires_grad_(False)
    one, two = (
        DeMo([("a", a), ("b", b)], lr=1.0, codec="int8", subtract="aggregate", alpha=0.25)
        for a, b in (sender, receiver)
    )
    for parameter in sender:
        with_gradient(parameter)
    sent = one._contribution()
    assert sent is not None
    entry = one.entry([sent], listed=False)
    two.apply(entry)
    assert entry.update is not None
    part = entry.update.shapes[64, 64]
    first = slice(0, part.counts[0])
    expected = torch.zeros(4096)
    used = torch.from_numpy(part.values[first].astype("float32")) * 2.0 ** int(part.exponents[0])
    expected[part.indices[first].astype("int64")] = -0.25 * used
    assert expected.count_nonzero() == 32
    assert torch.equal(momentum(two, receiver[0]), expected)
    assert "momentum" not in two.state.get(receiver[1], {})
    local = DeMo([("a", receiver[0]), ("b", receiver[1])], lr=1.0)
    local.apply(entry)
    assert not any("momentum" in state for state in local.state.values())


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.bool])
def test_parameters_must_be_real_floating_point(dtype: torch.dtype) -> None:
    parameter = nn.Parameter(torch.zeros(3, dtype=dtype), requires_grad=False)
    with pytest.raises(ValueError, match=f"'w' is {dtype}, not real floating point"):
        DeMo([("w", parameter)], lr=1.0)


def test_sparse_gradients_are_refused_by_name() -> None:
    table = nn.Embedding(5, 3, sparse=True)
    before = table.weight.detach().clone()
    optimizer = DeMo(table.named_parameters(), lr=1.0)
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(
        ValueError, match=r"'weight' has a sparse gradient, make it dense \(an embedding: sparse=False\)"
    ):
        optimizer.step()
    assert torch.equal(table.weight, before)
