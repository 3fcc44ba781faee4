"""A step whose entry is taken one step later does the same with the same gradients."""

from typing import Any

import pytest
import torch

from algorithms import DeMo, StepEntry
from algorithms.updates import SparseUpdate
from tests.unit.algorithms.sites import backward, odd, same, values


class Later:
    """An exchange of one site alone that answers when asked for the entry; `listed` says which steps list it."""

    def __init__(self, *, waits: bool, unlisted: frozenset[int] = frozenset()) -> None:
        self.waits = waits
        self.unlisted = unlisted
        self.asked: list[int] = []
        self.given: list[int] = []

    def __call__(self, optimizer: DeMo, sent: SparseUpdate | None) -> Any:
        step = len(self.asked)
        self.asked.append(step)
        listed = sent is not None and step not in self.unlisted
        entry = optimizer.entry([sent] if sent is not None and listed else [], listed)

        def receive() -> StepEntry:
            self.given.append(step)
            return entry

        return receive() if self.waits else receive


@pytest.mark.parametrize("options", [{}, {"subtract": "aggregate", "alpha": 0.2}, {"transform": "random"}])
def test_the_same_gradients_give_the_same_bits(options: dict[str, Any]) -> None:
    ends = []
    for waits in (True, False):
        model, optimizer = odd(exchange=Later(waits=waits, unlisted=frozenset({1})), weight_decay=0.1, **options)
        for seed in range(4):
            torch.manual_seed(seed)
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter) if parameter.requires_grad else None
            optimizer.step()
        optimizer.settle()
        momenta = [state["momentum"] for state in optimizer.state.values() if "momentum" in state]
        ends.append((values(model), momenta, optimizer.steps))
    assert same(ends[0][0], ends[1][0])
    assert all(torch.equal(one, other) for one, other in zip(ends[0][1], ends[1][1], strict=True))
    assert ends[0][2] == ends[1][2] == 4


def test_the_entry_is_taken_after_the_next_gradients_and_before_they_are_used() -> None:
    exchange = Later(waits=False)
    model, optimizer = odd(exchange=exchange)
    before = values(model)
    backward(model, 0)
    optimizer.step()
    assert same(values(model), before)
    assert not optimizer.settled
    seen = []

    def closure() -> None:
        seen.append((same(values(model), before), list(exchange.given)))
        backward(model, 1)

    optimizer.step(closure)
    assert seen == [(True, [])]
    assert (exchange.asked, exchange.given, optimizer.steps) == ([0, 1], [0], 1)
    assert not same(values(model), before)


def test_saving_waits_for_the_entry() -> None:
    model, optimizer = odd(exchange=Later(waits=False))
    backward(model, 0)
    optimizer.step()
    saved = optimizer.state_dict()
    assert optimizer.settled
    assert saved["demo"]["steps"] == 1


def test_nothing_is_on_its_way_without_an_exchange_or_before_a_step() -> None:
    model, optimizer = odd()
    optimizer.settle()
    assert optimizer.settled
    backward(model, 0)
    optimizer.step()
    assert optimizer.settled
    assert optimizer.steps == 1
