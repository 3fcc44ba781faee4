"""Momentum from one attempt of a rank to the next: written and read as it was, and used only when it is right."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from algorithms import DeMo
from algorithms.codec import pack_contribution
from algorithms.updates import SparseUpdate
from site_agent.saved_momentum import OnItsWay, SavedMomentum, load_momentum, save_momentum

EMPTY = SparseUpdate({}, frozenset())


def trained(owned: tuple[int, int] = (0, 1), width: int = 40) -> tuple[DeMo, list[SparseUpdate]]:
    """An optimizer after one step, of whose four parameters one had no gradient; and what it has sent."""
    torch.manual_seed(width)
    model = nn.Sequential(nn.Linear(70, width), nn.Linear(width, 6))
    sent: list[SparseUpdate] = []

    def exchange(optimizer: DeMo, contribution: SparseUpdate | None) -> Any:
        assert contribution is not None
        sent.append(contribution)
        return optimizer.entry([], listed=False)

    optimizer = DeMo(model.named_parameters(), lr=0.1, exchange=exchange, owned=owned)
    model[0](torch.randn(3, 70)).square().sum().backward()
    model[1].weight.grad = torch.randn(6, width)
    optimizer.step()
    return optimizer, sent


@pytest.mark.parametrize("owned", [(0, 1), (0, 2), (1, 2)])
@pytest.mark.parametrize("waiting", [True, False])
def test_a_file_holds_all_of_it(tmp_path: Path, owned: tuple[int, int], waiting: bool) -> None:
    optimizer, sent = trained(owned)
    way = OnItsWay(8, "d" * 64, sent[0]) if waiting else None
    path = tmp_path / "momentum"
    save_momentum(path, optimizer, SavedMomentum(optimizer.momentum(), seq=9, listed=7, on_its_way=way))
    assert list(tmp_path.iterdir()) == [path]
    fresh = trained(owned)[0]
    fresh.reset_momentum()
    fresh.settings = replace(fresh.settings, k=7)  # that of the spec, which was changed for what was sent
    saved = load_momentum(path, fresh)
    assert saved is not None
    assert (saved.seq, saved.listed) == (9, 7)
    fresh.set_momentum(saved.momentum)
    ours, theirs = optimizer.momentum(), fresh.momentum()
    assert ours.keys() == theirs.keys() == {"0.weight", "0.bias", "1.weight"}
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    if not waiting:
        assert saved.on_its_way is None
        return
    assert saved.on_its_way is not None
    assert (saved.on_its_way.step, saved.on_its_way.digest) == (8, "d" * 64)
    before, after = (pack_contribution(each, optimizer.layout, "sign") for each in (sent[0], saved.on_its_way.sent))
    assert {name: array.tobytes() for name, array in before.items()} == {
        name: array.tobytes() for name, array in after.items()
    }


def test_what_is_not_ours_is_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "momentum"
    assert load_momentum(path, trained()[0]) is None
    optimizer, _ = trained((0, 2))
    save_momentum(path, optimizer, SavedMomentum(optimizer.momentum(), 1, 1, None))
    assert load_momentum(path, trained((0, 2))[0]) is not None
    assert load_momentum(path, trained((1, 2))[0]) is None
    assert load_momentum(path, trained((0, 1))[0]) is None
    assert load_momentum(path, trained((0, 2), width=41)[0]) is None
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="momentum is damaged"):
        load_momentum(path, optimizer)


def test_another_model_refuses_the_momentum() -> None:
    optimizer, _ = trained()
    before = {name: values.clone() for name, values in optimizer.momentum().items()}
    with pytest.raises(ValueError, match=r"0\.weight"):
        trained(width=41)[0].set_momentum(before)
    with pytest.raises(ValueError, match="other"):
        optimizer.set_momentum({**before, "other": before["0.bias"]})
    assert all(torch.equal(before[name], values) for name, values in optimizer.momentum().items())
    optimizer.set_momentum({"0.bias": before["0.bias"]})
    assert optimizer.momentum().keys() == {"0.bias"}


@pytest.mark.parametrize(
    ("listed", "enters", "subtract", "good"),
    [
        (7, 0, "local", True),
        (7, 9, "local", True),
        (7, 20, "local", True),  # what the entries in between hold of others does not matter
        (7, 0, "aggregate", True),
        (7, 9, "aggregate", True),
        (7, 20, "aggregate", False),  # the updates in between would have been subtracted
        (6, 0, "local", False),
        (9, 0, "local", False),
        (0, 0, "local", False),
    ],
)
def test_it_is_good_if_the_log_has_listed_nothing_since(listed: int, enters: int, subtract: str, good: bool) -> None:
    saved = SavedMomentum({}, seq=9, listed=7, on_its_way=None)
    assert saved.is_good(listed=listed, enters=enters, subtract=subtract) is good


@pytest.mark.parametrize(
    ("listed", "enters", "good"),
    [(7, 0, True), (7, 20, True), (8, 0, True), (8, 9, True), (8, 10, False), (9, 0, False)],
)
def test_what_was_on_its_way_must_be_seen_in_the_log_if_it_was_listed(listed: int, enters: int, good: bool) -> None:
    saved = SavedMomentum({}, seq=9, listed=7, on_its_way=OnItsWay(8, "d" * 64, EMPTY))
    assert saved.is_good(listed=listed, enters=enters, subtract="local") is good
