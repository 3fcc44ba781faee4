"""What people do with a torch optimizer, done with DeMo: the contracts of `torch.optim.Optimizer`."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler

from algorithms import DeMo, StepEntry
from algorithms.updates import SparseUpdate
from tests.unit.algorithms.sites import backward, momentum, odd, same, values, with_gradient

# --- groups and rates -------------------------------------------------------------------------------------------------


def test_groups_have_their_own_rates_and_may_come_later() -> None:
    first, second = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.ones(4))
    optimizer = DeMo([{"params": [("b", first)], "name": "bias"}], lr=0.5, codec="int8")
    first.grad = torch.ones(4)
    optimizer.step()
    held = momentum(optimizer, first).clone()
    optimizer.add_param_group({"params": [("module.a", second)], "lr": 0.25, "weight_decay": 1.0})
    assert optimizer.layout.groups == ("bias", "1")
    assert [tensor.name for tensor in optimizer.layout.tensors] == ["a", "b"]
    assert torch.equal(momentum(optimizer, first), held)
    second.grad = torch.ones(4)
    optimizer.step()
    assert torch.equal(first, torch.full((4,), -1.0))
    assert torch.equal(second, torch.full((4,), 0.75 - 0.25))
    assert optimizer.applied_lr == (0.5, 0.25)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"params": [("b", nn.Parameter(torch.ones(4)))], "lr": -1.0}, "lr must be finite and not negative, got -1.0"),
        ({"params": [("b", nn.Parameter(torch.ones(4)))], "weight_decay": float("nan")}, "weight_decay must be"),
        ({"params": [("module.a", nn.Parameter(torch.ones(4)))]}, "canonical name 'a'"),
        ({"params": [("b", nn.Parameter(torch.ones(4)))], "name": "0"}, "group names must differ"),
    ],
)
def test_a_group_that_is_refused_is_not_added(group: dict[str, Any], message: str) -> None:
    parameter = with_gradient(nn.Parameter(torch.ones(4)))
    optimizer = DeMo([("a", parameter)], lr=0.5)
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1
    optimizer.step()
    assert not torch.equal(parameter, torch.ones(4))


def test_sharded_momentum_takes_no_more_groups() -> None:
    parameter = with_gradient(nn.Parameter(torch.ones(4)))
    optimizer = DeMo(
        [("a", parameter)], lr=1.0, owned=(0, 2), exchange=lambda *_: StepEntry(None, (1.0,), (1.0,), True)
    )
    optimizer.step()
    with pytest.raises(ValueError, match="before the first step"):
        optimizer.add_param_group({"params": [("b", nn.Parameter(torch.ones(4)))]})


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=[0.5, 0.25], total_steps=8, cycle_momentum=False),
        lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 8),
        lambda optimizer: lr_scheduler.SequentialLR(
            optimizer,
            [lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 2), lr_scheduler.ExponentialLR(optimizer, 0.5)],
            [2],
        ),
    ],
)
def test_schedules_take_effect(schedule: Callable[[DeMo], lr_scheduler.LRScheduler]) -> None:
    """A single element moves by exactly the rate of the step."""
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups = [{"params": [("a", parameters[0])]}, {"params": [("b", parameters[1])], "lr": 0.25}]
    optimizer = DeMo(groups, lr=0.5, codec="int8")
    scheduler = schedule(optimizer)
    rates = []
    for _ in range(6):
        rates.append([group["lr"] for group in optimizer.param_groups])
        before = [parameter.item() for parameter in parameters]
        for parameter in parameters:
            parameter.grad = torch.ones(1)
        optimizer.step()
        scheduler.step()
        assert [old - new.item() for old, new in zip(before, parameters, strict=True)] == pytest.approx(rates[-1])
        assert optimizer.applied_lr == pytest.approx(rates[-1])
    assert len({lr for lr, _ in rates}) > 3


def test_the_rate_may_be_a_tensor() -> None:
    parameter = with_gradient(nn.Parameter(torch.zeros(1)))
    DeMo([("a", parameter)], lr=torch.tensor(0.5)).step()  # type: ignore[arg-type]
    assert parameter.abs().item() == 0.5


# --- the training loop ------------------------------------------------------------------------------------------------


def test_closure_is_evaluated_first_and_with_gradients() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = DeMo([parameter], lr=0.5, codec="int8")
    assert optimizer.layout.tensors[0].name == "0.0"

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3.0
    assert parameter.tolist() == [0.5] * 3


@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad(to_none: bool) -> None:
    parameter = with_gradient(nn.Parameter(torch.zeros(64, 64)))
    optimizer = DeMo([("w", parameter)], lr=1.0, alpha=0.0, beta=0.5)
    optimizer.step()
    held = momentum(optimizer, parameter).clone()
    optimizer.zero_grad(set_to_none=to_none)
    assert (parameter.grad is None) == to_none
    optimizer.step()
    assert torch.equal(momentum(optimizer, parameter), held * 0.5)


def test_gradients_accumulate_over_micro_batches() -> None:
    """An expert that only the first micro-batch uses counts in full."""
    torch.manual_seed(0)
    experts = nn.ModuleList(nn.Linear(5, 3, bias=False) for _ in range(3))
    optimizer = DeMo(experts.named_parameters(), lr=0.5, alpha=0.0, beta=0.0, codec="int8")
    inputs = torch.rand(4, 5) + 0.5
    for used in ((0, 1), (1,)):
        for expert in used:
            (experts[expert](inputs).sum() / 2).backward()
    gradients = [expert.weight.grad for expert in experts]
    before = values(experts)
    optimizer.step()
    for expert, gradient in zip(experts[:2], gradients[:2], strict=True):
        assert torch.equal(momentum(optimizer, expert.weight).view(3, 5), gradient)
    assert torch.equal(experts[0].weight, before["0.weight"] - 0.5 * gradients[0].sign())
    assert torch.equal(experts[2].weight, before["2.weight"])
    assert experts[2].weight not in optimizer.state


def test_clipped_gradients_enter_the_momentum() -> None:
    parameter = nn.Parameter(torch.zeros(10, 6))
    optimizer = DeMo([("w", parameter)], lr=1.0, alpha=0.0, beta=0.0)
    parameter.grad = torch.full((10, 6), 1e4)
    nn.utils.clip_grad_norm_([parameter], 0.5)
    optimizer.step()
    assert momentum(optimizer, parameter).norm().item() == pytest.approx(0.5)


def test_hooks_around_the_step() -> None:
    parameter = with_gradient(nn.Parameter(torch.zeros(3)))
    optimizer = DeMo([("w", parameter)], lr=1.0)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(parameter.any().item()))
    optimizer.register_step_post_hook(lambda *_: seen.append(parameter.any().item()))
    optimizer.step()
    assert seen == [False, True]


# --- mixed precision --------------------------------------------------------------------------------------------------


def scaled_step(scaler: torch.amp.GradScaler, optimizer: DeMo, parameter: nn.Parameter, loss_scale: float) -> None:
    """The loss is linear, so that its gradient, without the scaler, is 0 to 63 times `loss_scale`."""
    optimizer.zero_grad()
    loss = (parameter * torch.arange(64.0).view(8, 8)).sum() * loss_scale
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def test_gradients_are_unscaled_into_the_momentum_only() -> None:
    plain, parameter = nn.Parameter(torch.zeros(8, 8)), nn.Parameter(torch.zeros(8, 8))
    expected, optimizer = (DeMo([("w", each)], lr=1.0, alpha=0.0) for each in (plain, parameter))
    plain.grad = torch.arange(64.0).view(8, 8)
    expected.step()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaled_step(scaler, optimizer, parameter, 1.0)
    assert torch.equal(parameter.grad, 1024 * plain.grad)
    assert torch.equal(momentum(optimizer, parameter), momentum(expected, plain))
    assert torch.equal(parameter, plain)
    assert optimizer.skipped_steps == 0


def test_clipping_between_unscaling_and_the_step() -> None:
    parameter = nn.Parameter(torch.zeros(8, 8))
    optimizer = DeMo([("w", parameter)], lr=1.0, alpha=0.0, beta=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale((parameter * 3).sum()).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_([parameter], 0.5)
    scaler.step(optimizer)
    assert momentum(optimizer, parameter).norm().item() == pytest.approx(0.5)


def test_overflow_is_an_abstention_and_halves_the_scale() -> None:
    parameter = nn.Parameter(torch.zeros(8, 8))
    optimizer = DeMo([("w", parameter)], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaled_step(scaler, optimizer, parameter, 1e38)
    assert (optimizer.skipped_steps, scaler.get_scale()) == (1, 512.0)
    assert not parameter.any()
    assert parameter not in optimizer.state
    asked: list[SparseUpdate | None] = []
    others = DeMo([("w", with_gradient(nn.Parameter(torch.zeros(8, 8))))], lr=1.0)
    entry = others.entry([others._contribution()], listed=False)
    optimizer._exchange = lambda _, sent: asked.append(sent) or entry
    scaled_step(scaler, optimizer, parameter, 1e38)
    assert (asked, optimizer.skipped_steps, scaler.get_scale()) == ([None], 2, 256.0)
    assert parameter.any()
    optimizer._exchange = None
    scaled_step(scaler, optimizer, parameter, 1.0)
    assert (optimizer.steps, optimizer.skipped_steps, scaler.get_scale()) == (3, 2, 256.0)
    assert "momentum" in optimizer.state[parameter]


# --- wrapped models ---------------------------------------------------------------------------------------------------


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def averaged(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, find_unused_parameters=True)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    "wrap", [compiled, averaged, lambda model: compiled(averaged(model)), lambda model: averaged(compiled(model))]
)
def test_wrapped_models_are_the_same_run(wrap: Callable[[nn.Module], nn.Module]) -> None:
    (plain, optimizer), (inner, _) = odd(), odd()
    wrapped = wrap(inner)
    names = [name for name, _ in wrapped.named_parameters()]
    assert all(name.startswith(("module.", "_orig_mod.")) for name in names)
    other = DeMo(wrapped.named_parameters(), lr=2.0**-8)
    assert other.layout.digest == optimizer.layout.digest
    for seed in range(2):
        backward(plain, seed)
        optimizer.step()
        wrapped.zero_grad()
        wrapped(torch.randint(37, (4, 9), generator=torch.Generator().manual_seed(seed))).backward()
        for one, two in zip(plain.parameters(), inner.parameters(), strict=True):
            assert (one.grad is None) == (two.grad is None)
            if one.grad is not None:
                assert torch.allclose(one.grad, two.grad)
                two.grad.copy_(one.grad)
        other.step()
    assert same(values(inner), values(plain))
    optimizer.load_state_dict(other.state_dict())
    assert optimizer.steps == 2
