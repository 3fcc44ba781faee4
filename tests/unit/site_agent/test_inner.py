"""Inner optimizers: torch's own, at the rates and with the weight decay of the spec."""

import pytest
import torch
from torch import nn

from algorithms.muon import MuonAndAdamW
from api.errors import IsthmusError
from api.specs import OptimizerSpec, OuterSpec, RunSpec
from site_agent.inner import InnerParameters, LocalSteps, inner_optimizer
from site_agent.replica import Replica


def groups_of(model):
    named = list(model.named_parameters())
    return [
        {"name": "decay", "params": [(name, value) for name, value in named if value.ndim >= 2]},
        {"name": "no_decay", "params": [(name, value) for name, value in named if value.ndim < 2]},
    ]


class Alone:
    """A model with its inner optimizer, and the steps of a site around it."""

    def __init__(self, factory=None, **optimizer):
        torch.manual_seed(0)
        self.model = nn.Linear(6, 5)
        spec = OptimizerSpec(lr=0.1, schedule="constant", **optimizer)
        self.optimizer = inner_optimizer(spec, groups_of(self.model), factory)
        self.holder = InnerParameters(groups_of(self.model), self.optimizer, spec)
        run = RunSpec(name="r", task="t", steps=9, exchange="none", optimizer=spec, outer=OuterSpec(every=3))
        self.replica = Replica(self.holder, None, (), "a", None, None)
        self.steps = LocalSteps(run)
        self.steps.attach(self.replica, self.optimizer)

    def step(self, gradient=1.0):
        for value in self.model.parameters():
            value.grad = torch.full_like(value, gradient)
        self.steps.begin()
        self.optimizer.step()
        self.steps.end()
        return self.holder.parameters_digest()


def test_a_change_is_the_peak_of_the_schedule_from_the_next_step_on():
    alone = Alone(kind="sgd", warmup=4)
    alone.step()
    change = {
        "kind": "change",
        "seq": 0,
        "previous": "0" * 64,
        "step": 1,
        "from_step": 2,
        "lr": 0.4,
        "k": 1,
        "every": 7,
    }
    alone.replica.apply_change(change)
    alone.step()
    assert alone.optimizer.param_groups[0]["lr"] == pytest.approx(0.4 * 2 / 4)


def test_adamw_is_torchs_bit_for_bit():
    alone, other = Alone(kind="adamw", weight_decay=0.3, warmup=4), Alone(kind="adamw").model
    decays = [{"params": [other.weight], "weight_decay": 0.3}, {"params": [other.bias], "weight_decay": 0.0}]
    theirs = torch.optim.AdamW(decays, betas=(0.9, 0.999), eps=1e-8)
    for number in range(1, 6):
        alone.step(number)
        for group in theirs.param_groups:
            group["lr"] = alone.optimizer.param_groups[0]["lr"]
        other.weight.grad, other.bias.grad = torch.full_like(other.weight, number), torch.full_like(other.bias, number)
        theirs.step()
    assert alone.optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    assert torch.equal(alone.model.weight, other.weight)
    assert torch.equal(alone.model.bias, other.bias)
    assert (alone.replica.step, alone.holder.steps) == (5, 5)


def custom(groups):
    assert [group["name"] for group in groups] == ["decay", "no_decay"]
    return torch.optim.SGD(groups, lr=99.0, weight_decay=99.0)


@pytest.mark.parametrize("how", [{"kind": "sgd", "momentum": 0}, {"kind": "custom", "factory": custom}])
def test_weight_decay_is_decoupled_and_spares_vectors(how):
    alone = Alone(weight_decay=0.5, **how)
    weight, bias = alone.model.weight.detach().clone(), alone.model.bias.detach().clone()
    alone.step(2.0)
    assert torch.allclose(alone.model.weight, weight * (1 - 0.1 * 0.5) - 0.1 * 2, atol=1e-6)
    assert torch.allclose(alone.model.bias, bias - 0.1 * 2, atol=1e-6)


@pytest.mark.parametrize("kind", ["adamw", "muon", "sgd"])
def test_gradients_that_are_not_finite_change_nothing_and_state_can_be_forgotten(kind):
    alone, fresh = Alone(kind=kind, weight_decay=0.1), Alone(kind=kind, weight_decay=0.1)
    before = alone.holder.parameters_digest()
    assert alone.step(float("nan")) == before
    assert (alone.steps.skipped, alone.replica.step) == (1, 1)
    start = alone.holder.read_parameters(range(2))
    first = alone.step(3.0)
    alone.holder.write_parameters(range(2), start)
    assert alone.step(3.0) != first
    alone.holder.reset_momentum()
    alone.holder.write_parameters(range(2), start)
    assert alone.step(3.0) == first == fresh.step(3.0)


def test_muon_moves_matrices_and_its_state_is_saved_as_one():
    model = nn.Linear(6, 5)
    ours = [MuonAndAdamW([{"params": list(model.parameters())}], lr=0.1) for _ in range(2)]
    assert [len(group["params"]) for group in ours[0].param_groups] == [1, 1]
    model(torch.ones(3, 6)).sum().backward()
    ours[0].step()
    ours[1].load_state_dict(ours[0].state_dict())
    start, ends = [value.detach().clone() for value in model.parameters()], []
    for optimizer in ours:
        for value, was in zip(model.parameters(), start, strict=True):
            value.data.copy_(was)
        optimizer.step()
        ends.append([value.detach().clone() for value in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))
    assert not torch.equal(ends[0][0], start[0])


def test_a_torch_without_muon(monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(IsthmusError, match=r"has no torch.optim.Muon: install torch 2.9 or later"):
        Alone(kind="muon")


def test_what_cannot_be_had():
    with pytest.raises(IsthmusError, match="pass inner= to"):
        Alone(kind="custom")
    with pytest.raises(IsthmusError, match=r"inner= needs optimizer\.kind = custom"):
        Alone(kind="sgd", factory=custom)
    model = nn.Linear(3, 3, dtype=torch.bfloat16)
    with pytest.raises(IsthmusError, match=r"weight \(torch.bfloat16\)"):
        inner_optimizer(OptimizerSpec(kind="sgd"), groups_of(model), None)
