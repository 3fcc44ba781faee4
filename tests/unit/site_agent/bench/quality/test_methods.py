"""The methods against what can be said of them without the methods: numpy, scipy, torch, or one another."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import scipy.fft
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from algorithms.layout import ParameterLayout
from algorithms.traffic import contribution_bytes
from site_agent.bench.quality.averaging import Averaging, adamw, muon_and_adamw
from site_agent.bench.quality.demo_sites import DeMoSites
from site_agent.bench.quality.float32 import Float32DeMo, layout_of
from site_agent.bench.quality.local_steps import SparseLoCo
from site_agent.bench.quality.method import Method, Sites
from site_agent.bench.quality.streaming import DiLoCo

SITES = 3


def linear(rows: int = 64, cols: int = 64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(cols, rows, bias=False)


def product(model: nn.Module, batch: Tensor) -> Tensor:
    """Its gradient is the batch itself, if the batch is as large as the weight; not clipped, being small."""
    (weight,) = model.parameters()
    return (weight * batch).sum()


def sites_of(model: nn.Module, steps: int = 2) -> Sites:
    return Sites(model, product, SITES, steps)


def small_gradients(rows: int, cols: int, seed: int) -> list[Tensor]:
    """One for each site, of norm 0.5."""
    generator = torch.Generator().manual_seed(seed)
    gradients = torch.randn(SITES, rows, cols, generator=generator)
    return list(gradients / gradients.flatten(1).norm(dim=1)[:, None, None] / 2)


def weight(model: nn.Module) -> np.ndarray:
    (parameter,) = model.parameters()
    values: np.ndarray = parameter.detach().numpy().copy()
    return values


# --- DeMo -------------------------------------------------------------------------------------------------------------


def test_float32_demo_is_the_papers_algorithm() -> None:
    """Two steps of one chunk, in numpy and scipy."""
    model, k, beta, lr = linear(), 40, 0.9, 2.0**-7
    method = Float32DeMo(sites_of(model), k=k, beta=beta)
    expected = weight(model)
    momenta = np.zeros((SITES, 64, 64))
    for step in range(2):
        gradients = small_gradients(64, 64, step)
        sums, counts = np.zeros(4096), np.zeros(4096)
        for momentum, gradient in zip(momenta, gradients, strict=True):
            momentum *= beta
            momentum += (1 - beta) * gradient.numpy()
            coefficients = scipy.fft.dctn(momentum, norm="ortho").reshape(-1)
            picked = np.argsort(-np.abs(coefficients))[:k]
            sent = np.zeros(4096)
            sent[picked] = coefficients[picked]
            momentum -= scipy.fft.idctn(sent.reshape(64, 64), norm="ortho")
            sums += sent
            counts[picked] += 1
        mean = scipy.fft.idctn((sums / np.maximum(counts, 1)).reshape(64, 64), norm="ortho")
        expected -= lr * np.sign(mean)
        method.step(gradients, lr)
    assert np.mean(np.abs(weight(model) - expected) < lr / 1000) > 0.999  # but where the mean is nearly zero
    assert method.sent == 2 * (k * 12 // 8 + 4 * k)


def test_demo_in_many_bits_moves_as_in_float32() -> None:
    """The same picks and, but for the values' 8 bits, the same directions."""
    one, other = linear(130, 70), linear(130, 70)
    methods: list[Method] = [Float32DeMo(sites_of(one), k=32), DeMoSites(sites_of(other), k=32, codec="int8")]
    before = weight(one)
    for method in methods:
        for step in range(2):
            method.step(small_gradients(130, 70, step), 2.0**-7)
    assert np.mean(np.abs(weight(one) - before) > 2.0**-8) > 0.2
    assert np.mean(np.abs(weight(one) - weight(other)) < 2.0**-8) > 0.94
    assert methods[1].sent < methods[0].sent


@pytest.mark.parametrize("settings", [{"k": 8}, {"codec": "int8"}, {"subtract": "aggregate", "alpha": 0.2}])
def test_sites_of_demo_stay_equal_and_count_their_bytes(settings: dict[str, Any]) -> None:
    model = linear(130, 70)
    method = DeMoSites(sites_of(model, steps=3), **settings)
    for step in range(3):
        method.step(small_gradients(130, 70, step), 1e-3)
    layout: ParameterLayout = layout_of(model)
    expected = contribution_bytes(layout, settings.get("k", 32), settings.get("codec", "sign"))
    assert method.sent == 3 * expected
    (parameter,) = method._replicas[1].parameters()
    parameter.data[0, 0] += 1
    with pytest.raises(RuntimeError, match="replicas differ after step 3"):
        method._compare()


def test_an_error_at_one_site_ends_all_of_them() -> None:
    method = DeMoSites(sites_of(linear()))
    with pytest.raises(RuntimeError, match="must match"):
        method.step([torch.ones(64, 64), torch.ones(63, 64), torch.ones(64, 64)], 1e-3)


def test_round_lists_those_who_contribute() -> None:
    """A site without finite gradients follows the others."""
    model = linear()
    method = DeMoSites(sites_of(model))
    gradients = small_gradients(64, 64, 0)
    gradients[1] = torch.full((64, 64), torch.inf)
    before = weight(model)
    method.step(gradients, 1e-3)
    method._compare()
    assert [optimizer.skipped_steps for optimizer in method._optimizers] == [0, 1, 0]
    assert np.any(weight(model) != before)


# --- averaging --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizers", [adamw, muon_and_adamw])
def test_averaging_is_torchs_optimizer_on_the_mean(optimizers: Callable[[nn.Module], list[torch.optim.Optimizer]]):
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    other, before = copy.deepcopy(model), parameters_to_vector(model.parameters()).detach()
    batches = list(torch.randn(SITES, 40, 64, generator=torch.Generator().manual_seed(1)))
    method = Averaging(Sites(model, loss, SITES, 2), optimizers)
    alone = optimizers(other)
    for _ in range(2):
        method.step(batches, 1e-2)
        other.zero_grad()
        for batch in batches:
            (loss(other, batch) / SITES).backward()
        nn.utils.clip_grad_norm_(other.parameters(), 1.0)
        for optimizer in alone:
            optimizer.param_groups[0]["lr"] = 1e-2
            optimizer.step()
    ours, theirs = (parameters_to_vector(either.parameters()).detach() for either in (model, other))
    moved = (theirs - before).abs().mean()
    assert (ours - theirs).abs().mean() < moved / 20  # gradients in bfloat16
    assert moved > 1e-3
    assert method.sent == 2 * 2 * (64 * 64 + 64)


def test_muon_takes_the_matrices_inside_and_adamw_all_else() -> None:
    model = nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 4), nn.LayerNorm(4))
    muon, others = muon_and_adamw(model)
    assert muon.param_groups[0]["params"] == [model[1].weight]
    assert len(others.param_groups[0]["params"]) == 4


# --- local steps ------------------------------------------------------------------------------------------------------


class Alone:
    """The sites of a method, each training by itself."""

    def __init__(self) -> None:
        self.replicas = [linear() for _ in range(SITES)]
        self._optimizers = [adamw(replica)[0] for replica in self.replicas]

    def step(self, gradients: list[Tensor], lr: float) -> None:
        for replica, optimizer, gradient in zip(self.replicas, self._optimizers, gradients, strict=True):
            replica.zero_grad()
            product(replica, gradient).backward()
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()

    def go_on_from(self, values: np.ndarray) -> None:
        for replica in self.replicas:
            next(replica.parameters()).data.copy_(torch.from_numpy(values))


def test_diloco_without_an_outer_optimizer_is_the_mean_of_sites_that_train_alone() -> None:
    model, alone = linear(), Alone()
    method = DiLoCo(sites_of(model, steps=3), every=2, outer_lr=1.0, outer_momentum=0.0, codec="bf16")
    for step in range(3):
        gradients = small_gradients(64, 64, step)
        method.step(gradients, 1e-2)
        alone.step(gradients, 1e-2)
        if step in (1, 2):  # every 2, and at the end
            alone.go_on_from(np.mean([weight(replica) for replica in alone.replicas], axis=0))
    np.testing.assert_allclose(weight(model), weight(alone.replicas[0]), atol=3e-4)  # bfloat16 of 0.02
    assert np.abs(weight(model) - weight(linear())).mean() > 3e-3
    assert method.sent == 2 * (2 * 64 * 64)


def test_a_delayed_anchor_keeps_what_was_done_meanwhile() -> None:
    """Of gradients that are the same at all sites, nothing is lost if the anchor is their mean."""
    model, undelayed = linear(), linear()
    plain = {"every": 2, "outer_lr": 1.0, "outer_momentum": 0.0}
    methods = [DiLoCo(sites_of(undelayed, steps=5), **plain), DiLoCo(sites_of(model, steps=5), **plain, delay=1)]
    for step in range(5):
        for method in methods:
            method.step(small_gradients(64, 64, step)[:1] * SITES, 1e-2)
    np.testing.assert_allclose(weight(model), weight(undelayed), atol=1e-6)
    assert np.abs(weight(model) - weight(linear())).mean() > 3e-3


def test_with_mix_0_a_delayed_anchor_forgets_what_was_done_meanwhile() -> None:
    model = linear()
    method = DiLoCo(sites_of(model, steps=9), every=4, outer_lr=1.0, outer_momentum=0.0, delay=2, mix=0.0)
    for step in range(6):
        method.step(small_gradients(64, 64, step)[:1] * SITES, 1e-2)
        if step == 3:
            copy = weight(model)
        elif step == 4:
            assert np.abs(weight(model) - copy).max() > 1e-3
    assert np.array_equal(weight(model), copy)


def test_sparseloco_sends_the_largest_and_keeps_the_rest() -> None:
    model, alone, k, beta = linear(), Alone(), 100, 0.5
    method = SparseLoCo(sites_of(model, steps=6), every=3, k=k, codec="int8", beta=beta)
    anchor, errors = weight(model), np.zeros((SITES, 64, 64))
    for step in range(6):
        gradients = small_gradients(64, 64, step)
        method.step(gradients, 1e-2)
        alone.step(gradients, 1e-2)
        if step in (2, 5):
            for error, replica in zip(errors, alone.replicas, strict=True):
                error *= beta
                error += anchor - weight(replica)
            sent = np.where(np.abs(errors) >= np.sort(np.abs(errors).reshape(SITES, -1))[:, -k, None, None], errors, 0)
            errors -= sent
            anchor = (anchor - sent.mean(axis=0)).astype(np.float32)
            alone.go_on_from(anchor)
    assert k <= np.count_nonzero(weight(model) != weight(linear())) <= 2 * SITES * k
    assert np.mean(np.abs(weight(model) - anchor) < 3e-4) > 0.99  # 8 bits of 0.03, for each of two rounds
    assert method.sent == 2 * (k * 12 // 8 + k + 2)


METHODS: list[Callable[[Sites], Method]] = [
    partial(Averaging, optimizers=adamw),
    partial(Averaging, optimizers=muon_and_adamw),
    DiLoCo,
    partial(DiLoCo, every=6, fragments=2, stagger=True, delay=2, codec="topk", k=300),
    partial(SparseLoCo, codec="sign", every=5),
    Float32DeMo,
    DeMoSites,
]


@pytest.mark.parametrize("build", METHODS)
def test_every_method_learns_a_linear_map(build: Callable[[Sites], Method]) -> None:
    """From data of which each site sees a part."""
    torch.manual_seed(3)
    target = torch.randn(24, 24)
    model = nn.Linear(24, 24)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return (model(batch) - batch @ target).square().mean()

    method = build(Sites(model, loss, SITES, 60))
    held_out = torch.randn(50, 24)
    before = loss(model, held_out).item()
    for step in range(1, 61):
        method.step(list(torch.randn(SITES, 16, 24)), 0.03 if step < 40 else 0.01)
    assert loss(model, held_out).item() < 0.75 * before
    assert method.sent > 0
