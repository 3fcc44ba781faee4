import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from algorithms import DeMo, StepEntry
from algorithms.aggregate import aggregate
from algorithms.base_updates import signum
from algorithms.codec import SparseUpdate, merge, pack_contribution, parameters_digest, unpack_contribution
from tests.unit.algorithms.sites import backward, odd, same, step_together, values


@pytest.mark.parametrize("options", [{}, {"codec": "int8"}, {"subtract": "aggregate", "alpha": 0.2}, {"chunk": 32}])
def test_odd_parameters_train(options: dict[str, Any]) -> None:
    model, optimizer = odd(weight_decay=0.1, **options)
    before = values(model)
    for seed in range(3):
        backward(model, seed)
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        for name, parameter in model.named_parameters():
            assert parameter.grad is None or torch.equal(parameter.grad, gradients[name])
    after = values(model)
    untouched = {"unused.weight", "unused.bias", "frozen", "empty"}
    assert {name for name in before if torch.equal(before[name], after[name])} == untouched
    assert model.head.weight is model.embedding.weight
    names = [tensor.name for tensor in optimizer.layout.tensors]
    assert names.count("embedding.weight") == 1
    assert "head.weight" not in names
    for parameter in model.parameters():
        assert ("momentum" in optimizer.state.get(parameter, {})) == (parameter.grad is not None)
    assert all(state["momentum"].dtype == torch.float32 for state in optimizer.state.values() if "momentum" in state)
    assert (optimizer.steps, optimizer.skipped_steps, optimizer.applied_lr) == (3, 0, (2.0**-8,))


def test_step_moves_every_element_by_lr_or_nothing() -> None:
    parameter = nn.Parameter(torch.randn(100, 70))
    before = parameter.detach().clone()
    optimizer = DeMo([("w", parameter)], lr=0.25, weight_decay=0.5)
    parameter.grad = torch.randn(100, 70)
    optimizer.step()
    moved = parameter.detach() - before * 0.875
    signs = moved.div(0.25).round()
    assert set(signs.unique().tolist()) <= {-1.0, 0.0, 1.0}
    assert (signs != 0).float().mean() > 0.99
    assert torch.allclose(moved, signs * 0.25, atol=1e-6)
    assert (moved * parameter.grad).sum() < 0


def test_sending_everything_follows_the_gradient() -> None:
    parameter = nn.Parameter(torch.zeros(5, 12))
    optimizer = DeMo([("w", parameter)], lr=0.5, codec="int8")
    parameter.grad = torch.where(torch.arange(60).view(5, 12) % 3 == 0, -3.0, 2.0)
    optimizer.step()
    assert torch.equal(parameter, -0.5 * parameter.grad.sign())


def test_signum_keeps_negative_zero() -> None:
    parameter = torch.full((3,), -0.0)
    signum(parameter, torch.tensor([0.0, 1.0, -1.0]), 0.5, 0.75)
    assert parameter.tolist() == [0.0, -0.5, 0.5]
    assert torch.signbit(parameter).tolist() == [True, True, False]


def test_local_subtraction_removes_what_was_sent_and_only_if_listed() -> None:
    updates: list[SparseUpdate] = []

    def exchange(_: DeMo, sent: SparseUpdate | None) -> StepEntry:
        assert sent is not None
        updates.append(sent)
        return StepEntry(aggregate([sent], optimizer.layout, [0]), (0.0,), (1.0,), listed=len(updates) == 2)

    momenta = []
    for _ in range(2):
        parameter = nn.Parameter(torch.zeros(64, 64))
        optimizer = DeMo([("w", parameter)], lr=1.0, codec="int8", exchange=exchange)
        parameter.grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
        optimizer.step()
        momenta.append(optimizer.state[parameter]["momentum"].clone())
    part = updates[1].shapes[64, 64]
    sent = np.zeros(4096, np.float32)
    sent[part.indices[0]] = part.values[0] * part.scales[0]
    assert np.count_nonzero(sent) == 32
    assert np.array_equal(momenta[1].numpy(), momenta[0].numpy() - sent)


def test_aggregate_subtraction_applies_to_entries_of_others() -> None:
    def fresh() -> tuple[nn.Parameter, DeMo]:
        parameter = nn.Parameter(torch.zeros(64, 64))
        parameter.grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
        return parameter, DeMo([("w", parameter)], lr=1.0, subtract="aggregate", alpha=0.25, codec="int8")

    parameter, optimizer = fresh()
    optimizer.step()
    before = optimizer.state[parameter]["momentum"].clone()
    _, sender = fresh()
    update = aggregate([sender._contribution()], sender.layout, [0])
    optimizer.apply(StepEntry(update, (0.5,), (1.0,), listed=False))
    part = update.shapes[64, 64]
    expected = before.clone()
    expected[part.indices.astype(np.int64)] -= torch.from_numpy(0.25 * part.values.astype(np.float32)) * 2.0 ** int(
        part.exponents[0]
    )
    assert torch.equal(optimizer.state[parameter]["momentum"], expected)
    assert not torch.equal(before, expected)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 1e38])
def test_non_finite_gradients_are_skipped(poison: float) -> None:
    model, optimizer = odd(weight_decay=0.1)
    backward(model, 0)
    optimizer.step()
    before, momenta = values(model), copy.deepcopy(optimizer.state_dict()["state"])
    backward(model, 1)
    model.conv.weight.grad.view(-1)[5] = poison
    optimizer.step()
    assert same(values(model), before)
    for key, state in optimizer.state_dict()["state"].items():
        assert same(state, momenta[key])
    assert optimizer.skipped_steps == 1
    backward(model, 2)
    optimizer.step()
    assert not same(values(model), before)


def test_a_rank_that_abstains_still_applies_the_entry() -> None:
    model, optimizer = odd()
    backward(model, 0)
    entry = StepEntry(aggregate([optimizer._contribution()], optimizer.layout, [0]), (0.25,), (1.0,), listed=False)
    asked: list[SparseUpdate | None] = []
    other, receiver = odd(exchange=lambda _, sent: asked.append(sent) or entry)
    backward(other, 0)
    other.scale.grad.fill_(float("nan"))
    receiver.step()
    assert asked == [None]
    optimizer.apply(entry)
    assert optimizer.parameters_digest() == receiver.parameters_digest()
    assert receiver.applied_lr == (0.25,)
    assert receiver.param_groups[0]["lr"] == 2.0**-8


def test_empty_entry_changes_nothing() -> None:
    _, optimizer = odd(weight_decay=0.5)
    before = optimizer.parameters_digest()
    optimizer.apply(StepEntry(None, (0.5,), (0.5,), listed=False))
    assert optimizer.parameters_digest() == before
    with pytest.raises(ValueError, match="2 rates, 1 decays, 1 groups"):
        optimizer.apply(StepEntry(None, (0.5, 0.5), (0.5,), listed=False))


@pytest.mark.parametrize("codec", ["sign", "int8"])
def test_ranks_share_the_momentum(codec: Any) -> None:
    """Two ranks with half of the chunks each end where one rank with all of them does."""
    outbox: list[SparseUpdate] = []
    entries: list[StepEntry] = []

    def collect(_: DeMo, sent: SparseUpdate | None) -> StepEntry:
        assert sent is not None
        outbox.append(sent)
        return StepEntry(None, (0.0,), (1.0,), listed=False)

    whole_model, whole = odd(codec=codec, exchange=lambda *_: entries[-1])
    ranks = [odd(codec=codec, owned=(rank, 2), exchange=collect) for rank in range(2)]
    for seed in range(3):
        outbox.clear()
        for model, optimizer in ranks:
            backward(model, seed)
            optimizer._exchange = collect
            outbox.append(optimizer._contribution())
        backward(whole_model, seed)
        alone = whole._contribution()
        layout = whole.layout
        absent = [layout.tensors[tensor].name for tensor in alone.absent]
        read = [
            unpack_contribution(
                pack_contribution(sent, layout, codec),
                layout,
                codec=codec,
                k=32,
                absent=absent,
                chunks=layout.shard(r, 2),
            )
            for r, sent in enumerate(outbox)
        ]
        merged = merge(read)
        for shape, part in alone.shapes.items():
            assert np.array_equal(merged.shapes[shape].chunks, part.chunks)
            assert np.mean(merged.shapes[shape].indices == part.indices) > 0.99
        update = aggregate([merged], layout, [0])
        entry = StepEntry(update, (2.0**-8,), (1.0,), listed=True)
        for _, optimizer in ranks:
            optimizer.apply(entry)
        whole.apply(entry)
    digests = {optimizer.parameters_digest() for optimizer in (whole, ranks[0][1], ranks[1][1])}
    assert len(digests) == 1
    owned = [sum(s["momentum"].numel() for s in optimizer.state.values() if "momentum" in s) for _, optimizer in ranks]
    assert sum(owned) == sum(p.numel() for p in whole_model.parameters() if p.grad is not None)
    assert min(owned) > 0


def test_sharded_step_subtracts_its_own_part() -> None:
    parameter = nn.Parameter(torch.zeros(128, 64))
    gradient = torch.randn(128, 64, generator=torch.Generator().manual_seed(0))
    momenta = []
    for owned in ((0, 2), (1, 2), (0, 1)):
        each = nn.Parameter(parameter.detach().clone())
        helper = DeMo([("w", each)], lr=1.0)
        each.grad = gradient
        update = aggregate([helper._contribution()], helper.layout, [0])
        entry = StepEntry(update, (0.5,), (1.0,), listed=True)
        optimizer = DeMo([("w", each)], lr=1.0, owned=owned, exchange=lambda *_, entry=entry: entry)
        optimizer.step()
        momenta.append(optimizer.state[each]["momentum"])
    assert torch.allclose(torch.cat(momenta[:2]), momenta[2], atol=1e-7)


def test_threads_do_not_matter_for_apply() -> None:
    digests = set()
    for threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        model, optimizer = odd()
        layout = optimizer.layout
        rng = np.random.default_rng(0)
        torch.manual_seed(0)
        backward(model, 0)
        sent = optimizer._contribution()
        fixed = {
            shape: type(part)(
                part.chunks,
                part.indices * 0 + np.arange(part.indices.shape[1], dtype=np.uint16),
                rng.choice(np.array([-1, 1], np.int8), part.values.shape),
                np.ones_like(part.scales),
            )
            for shape, part in sent.shapes.items()
        }
        optimizer.apply(StepEntry(aggregate([SparseUpdate(fixed, sent.absent)], layout, [0]), (0.1,), (0.9,), True))
        digests.add(optimizer.parameters_digest())
        torch.set_num_threads(before)
    assert len(digests) == 1


def test_float64_fallback_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    digests = []
    for answer in (True, False):
        monkeypatch.setattr("algorithms.demo.known_answer", lambda *_, answer=answer: answer)
        model, optimizer = odd(k=4096)
        backward(model, 0)
        optimizer.step()
        assert optimizer.float32_is_exact == {torch.device("cpu"): answer}
        digests.append(optimizer.parameters_digest())
    assert digests[0] == digests[1]


def test_read_and_write_parameters() -> None:
    model, optimizer = odd()
    everything = range(len(optimizer.layout.tensors))
    data = optimizer.read_parameters(everything)
    assert parameters_digest([data]) == optimizer.parameters_digest()
    for start in (0, 1, 4 * data.size - 1, 4 * data.size):
        assert b"".join(optimizer.blocks(everything, start)) == data.tobytes()[start:]
    assert data.size == optimizer.layout.parameter_count == sum(values.size for values in optimizer.values(everything))
    changed = (data + 1).astype(np.float32)
    optimizer.write_parameters(everything, changed)
    assert np.array_equal(optimizer.read_parameters(everything), changed)
    other, copied = odd(seed=3)
    for fragment in copied.layout.fragments(4):
        start = copied.layout.offsets[fragment.start]
        copied.write_parameters(fragment, changed[start : start + copied.layout.fragment_elements(fragment)])
    assert same(values(other), values(model))
    assert copied.parameters_digest() == optimizer.parameters_digest()
    with pytest.raises(ValueError, match="float32 elements"):
        optimizer.write_parameters(everything, changed[1:])


def test_missing_gradient_counts_as_zero() -> None:
    parameter = nn.Parameter(torch.zeros(64, 64))
    optimizer = DeMo([("w", parameter)], lr=1.0, alpha=0.0, beta=0.5)
    parameter.grad = torch.randn(64, 64)
    optimizer.step()
    before = optimizer.state[parameter]["momentum"].clone()
    parameter.grad = None
    optimizer.step()
    assert torch.equal(optimizer.state[parameter]["momentum"], before * 0.5)


def train(sites: int, make: Callable[[nn.Module], DeMo], steps: int) -> tuple[float, float, set[str]]:
    """Sites on different batches of one regression, joined by an exchange in memory; first and last loss, digests."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(16, 96), nn.Tanh(), nn.Linear(96, 2))
    models = [copy.deepcopy(base) for _ in range(sites)]
    optimizers = [make(model) for model in models]
    inputs = torch.randn(512, 16)
    targets = torch.stack([inputs[:, 0] - inputs[:, 1], inputs[:, 2].sin()], 1)
    losses = []
    for step in range(steps):
        losses.append((base if step == 0 else models[0])(inputs).sub(targets).square().mean().item())
        for rank, model in enumerate(models):
            part = slice(rank * 512 // sites, (rank + 1) * 512 // sites)
            model.zero_grad()
            model(inputs[part]).sub(targets[part]).square().mean().backward()
        step_together(optimizers)
    return losses[0], losses[-1], {optimizer.parameters_digest() for optimizer in optimizers}


@pytest.mark.parametrize("codec", ["sign", "int8"])
def test_sites_learn_together_and_stay_equal(codec: Any) -> None:
    first, last, digests = train(3, lambda model: DeMo(model.named_parameters(), lr=2.0**-7, k=64, codec=codec), 40)
    assert last < 0.1 * first
    assert len(digests) == 1


def test_alone_it_is_a_drop_in_optimizer() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 96), nn.Tanh(), nn.Linear(96, 1))
    inputs = torch.randn(256, 16)
    optimizer = DeMo(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 60)
    losses = []
    for _ in range(60):
        loss = (model(inputs).squeeze(1) - inputs[:, 0] + inputs[:, 1].sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert optimizer.applied_lr[0] == pytest.approx(optimizer.param_groups[0]["lr"], rel=0.2)
