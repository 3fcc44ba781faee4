"""Saving, loading and copying: state, its dtypes and its meaning."""

import copy
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn

from algorithms import DeMo
from algorithms.optimizer_state import DTYPES
from algorithms.settings import BaseUpdateName
from algorithms.transforms import Transform
from tests.unit.algorithms.sites import Odd, backward, odd, same, values


def train(model: Odd, optimizer: DeMo, seeds: range) -> None:
    for seed in seeds:
        backward(model, seed)
        optimizer.step()


def saved(model: nn.Module, optimizer: DeMo, folder: Path) -> dict[str, Any]:
    """What comes back of a model and its optimizer from a file."""
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "saved")
    loaded: dict[str, Any] = torch.load(folder / "saved", weights_only=True)
    return loaded


def assert_equal(one: Odd, mine: DeMo, other: Odd, theirs: DeMo) -> None:
    assert same(values(one), values(other))
    assert mine.parameters_digest() == theirs.parameters_digest()
    for left, right in zip(one.parameters(), other.parameters(), strict=True):
        assert same(mine.state.get(left, {}), theirs.state.get(right, {}))
    assert (mine.steps, mine.skipped_steps) == (theirs.steps, theirs.skipped_steps)


OTHERS = {"codec": "int8", "subtract": "aggregate", "alpha": 0.5}


@pytest.mark.parametrize(
    ("settings", "transform"), [*(({}, transform) for transform in get_args(Transform)), (OTHERS, "dct")]
)
@pytest.mark.parametrize("base_update", get_args(BaseUpdateName))
def test_save_load_continue_is_bit_equal(
    settings: dict[str, Any], base_update: Any, transform: Any, tmp_path: Path
) -> None:
    settings = {**settings, "base_update": base_update, "transform": transform}
    model, optimizer = odd(weight_decay=0.1, **settings)
    train(model, optimizer, range(3))
    state = saved(model, optimizer, tmp_path)
    other, loaded = odd(seed=9, weight_decay=0.3, **settings)
    train(other, loaded, range(7, 8))
    other.load_state_dict(state["model"])
    loaded.load_state_dict(state["optimizer"])
    assert loaded.steps == 3
    for each, stepper in ((model, optimizer), (other, loaded)):
        train(each, stepper, range(3, 6))
    assert_equal(model, optimizer, other, loaded)
    assert other.head.weight is other.embedding.weight


def test_state_of_an_optimizer_that_has_not_stepped(tmp_path: Path) -> None:
    model, optimizer = odd()
    fresh = saved(model, optimizer, tmp_path)
    other, loaded = odd(seed=9)
    train(other, loaded, range(2))
    other.load_state_dict(fresh["model"])
    loaded.load_state_dict(fresh["optimizer"])
    assert loaded.steps == 0
    assert not any("momentum" in state for state in loaded.state.values())
    for each, stepper in ((model, optimizer), (other, loaded)):
        train(each, stepper, range(2))
    assert_equal(model, optimizer, other, loaded)


def test_state_keeps_its_dtypes_and_is_a_copy(tmp_path: Path) -> None:
    model, optimizer = odd()
    train(model, optimizer, range(1))
    state = saved(model, optimizer, tmp_path)["optimizer"]
    low = model.get_parameter("low")
    key = [id(p) for p in model.parameters()].index(id(low))
    assert key in state["state"]
    optimizer.load_state_dict(state)
    assert low.dtype == torch.bfloat16
    assert {name: value.dtype for name, value in optimizer.state[low].items()} == {
        "momentum": torch.float32,
        "master": torch.float32,
    }
    before = state["state"][key]["momentum"].clone()
    train(model, optimizer, range(1, 2))
    assert torch.equal(state["state"][key]["momentum"], before)
    assert not torch.equal(optimizer.state[low]["momentum"], before)


def test_state_of_adam_is_restored_in_its_dtypes() -> None:
    parameter = nn.Parameter(torch.zeros(6, dtype=torch.bfloat16))
    optimizer = DeMo([("w", parameter)], lr=1.0, base_update="adam")
    state = optimizer.state_dict()
    unseen = torch.tensor(0.99, dtype=torch.float64)
    state["state"] = {0: {"second_moment": torch.full((6,), 0.1), "unseen": unseen}}
    optimizer.load_state_dict(state)
    loaded = optimizer.state[parameter]
    assert {name: value.dtype for name, value in loaded.items()} == {name: DTYPES[name] for name in loaded}
    assert torch.equal(loaded["unseen"], unseen)
    assert torch.equal(loaded["second_moment"], torch.full((6,), 0.1))


def test_what_gives_state_its_meaning_must_agree() -> None:
    model, optimizer = odd()
    train(model, optimizer, range(1))
    state = optimizer.state_dict()
    for settings, message in (
        ({"chunk": 32}, r"has layout '[0-9a-f]{64}' \(names, shapes, groups, chunk and transform\), ours is"),
        ({"transform": "identity"}, "has layout .* ours is"),
        ({"base_update": "adam"}, "has base_update 'signum', ours is 'adam'"),
    ):
        other, refusing = odd(seed=9, **settings)
        before = refusing.state_dict()
        with pytest.raises(ValueError, match=message):
            refusing.load_state_dict(state)
        assert refusing.state_dict() == before
    _, different = odd(seed=9, k=7, codec="int8", beta=0.5, alpha=0.25, subtract="aggregate", outliers="keep")
    different.load_state_dict(state)
    assert different.steps == 1
    assert different.settings.k == 7
    other = nn.Linear(3, 2)
    adam = torch.optim.AdamW(other.parameters())
    with pytest.raises(ValueError, match="not of a DeMo optimizer"):
        DeMo(other.parameters(), lr=1.0).load_state_dict(adam.state_dict())


def test_load_refuses_other_tensors() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    one, two = DeMo([("a", parameter)], lr=1.0), DeMo([("b", parameter)], lr=1.0)
    with pytest.raises(ValueError, match=r"differ from ours: \['a', 'b'\]"):
        two.load_state_dict(one.state_dict())
    with pytest.raises(ValueError, match=r"saved groups have \[1\] parameters, ours \[2\]"):
        DeMo([parameter, nn.Parameter(torch.zeros(2))], lr=1.0).load_state_dict(one.state_dict())
    with pytest.raises(ValueError, match="has layout"):
        DeMo([("a", nn.Parameter(torch.zeros(4)))], lr=1.0).load_state_dict(one.state_dict())
    parameter.grad = torch.ones(3)
    one.step()
    for field, value, message in (
        ("momentum", torch.zeros(4), r"momentum of 'a' has shape \(4,\), not \(3,\)"),
        ("unseen", torch.zeros(1), r"unseen of 'a' has shape \(1,\), not \(\)"),
        ("exp_avg", torch.zeros(3), "parameter 'a' has unknown state 'exp_avg'"),
    ):
        state = one.state_dict()
        state["state"] = {0: {field: value}}
        with pytest.raises(ValueError, match=message):
            one.load_state_dict(state)
    assert one.state[parameter]["momentum"].shape == (3,)


def test_load_restores_the_groups() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    one = DeMo([("module.a", parameter)], lr=0.5, weight_decay=0.25)
    one.param_groups[0]["lr"] = 0.125
    two = DeMo([("_orig_mod.a", nn.Parameter(torch.zeros(3)))], lr=1.0)
    two.load_state_dict(one.state_dict())
    assert (two.param_groups[0]["lr"], two.param_groups[0]["weight_decay"]) == (0.125, 0.25)


def test_hooks_of_saving_and_loading_run() -> None:
    _, optimizer = odd()
    seen = []
    optimizer.register_state_dict_post_hook(lambda *_: seen.append("saved"))
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["saved", "loaded"]


def test_copies_go_on_alike_and_apart() -> None:
    model, optimizer = odd(weight_decay=0.1)
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)  # attaches to `step`, and must not go along
    train(model, optimizer, range(2))
    other, copied = copy.deepcopy((model, optimizer))
    before = values(other)
    train(model, optimizer, range(2, 3))
    assert same(values(other), before)
    train(other, copied, range(2, 3))
    assert_equal(model, optimizer, other, copied)
    assert not same(values(other), before)
    copied.add_param_group({"params": [("extra", nn.Parameter(torch.zeros(2)))]})
    assert len(copied.layout.tensors) == len(optimizer.layout.tensors) + 1
