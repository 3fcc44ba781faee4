import hashlib
import subprocess
import sys
import warnings
from dataclasses import fields
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
from torch import nn

from algorithms import DeMo, Settings, preset
from algorithms.aggregate import aggregate
from algorithms.codec import pack_contribution
from algorithms.settings import PRESETS, SettingsDict
from tests.unit.algorithms.sites import step_together


def test_keyword_arguments_are_the_settings() -> None:
    assert get_type_hints(SettingsDict) == get_type_hints(Settings)
    optimizer = DeMo([("w", nn.Parameter(torch.zeros(3)))], 1.0, k=8, codec="int8")
    assert optimizer.settings == Settings(k=8, codec="int8")
    with pytest.raises(TypeError, match="momentum"):
        DeMo([("w", nn.Parameter(torch.zeros(3)))], 1.0, momentum=0.9)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"transform": "fft"}, "transform must be one of dct, hadamard, random, identity, got 'fft'"),
        ({"chunk": 60}, "chunk must be one of 32, 64, 128, got 60"),
        ({"chunk": 64.0}, "chunk must be .* got 64.0"),
        ({"k": 0}, "k must be 1 to 4096 .* got 0"),
        ({"k": 1025, "chunk": 32}, "k must be 1 to 1024 .* got 1025"),
        ({"k": 0.5}, "k must be an integer, got 0.5"),
        ({"codec": "fp8"}, "codec must be one of sign, .* got 'fp8'"),
        ({"indices": "rice"}, "indices must be one of packed, compact, got 'rice'"),
        ({"beta": 1.0}, "beta must be at least 0 and below 1, got 1.0"),
        ({"beta": float("nan")}, "beta must be .* got nan"),
        ({"beta": "0.9"}, "beta must be .* got '0.9'"),
        ({"alpha": 2.0}, "alpha must be 0 to 1, got 2.0"),
        ({"alpha": None}, "alpha must be 0 to 1, got None"),
        ({"subtract": "both"}, "subtract must be one of local, aggregate, got 'both'"),
        ({"average": "mean"}, "average must be one of contributors, sites, tokens, median, got 'mean'"),
        ({"largest": 0}, "largest must be an integer from 1, or None to keep all, got 0"),
        ({"largest": 2.5}, "largest must be .* got 2.5"),
        ({"outliers": True}, "outliers must be one of halve, keep, got True"),
        ({"base_update": "adamw"}, "base_update must be one of signum, sgd, adam, muon, got 'adamw'"),
        ({"beta2": -0.1}, "beta2 must be at least 0 and below 1, got -0.1"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**settings)
    with pytest.raises(ValueError, match=message):
        DeMo([("w", nn.Parameter(torch.zeros(3)))], lr=1.0, **settings)


def test_presets() -> None:
    assert Settings(**preset("paper")) == Settings(subtract="aggregate", alpha=0.2, beta=0.999)
    assert Settings(**preset("reference")) == Settings(subtract="local", alpha=1.0, beta=0.999)
    assert Settings(**preset("default")) == Settings()
    optimizer = DeMo([("w", nn.Parameter(torch.zeros(3)))], lr=1.0, **preset("paper"), k=8)
    assert (optimizer.settings.k, optimizer.settings.alpha) == (8, 0.2)
    preset("paper")["alpha"] = 1.0
    assert PRESETS["paper"]["alpha"] == 0.2
    with pytest.raises(ValueError, match="preset must be one of paper, reference, default, got 'best'"):
        preset("best")


def test_settings_need_no_torch() -> None:
    code = "import sys, algorithms; algorithms.Settings(**algorithms.preset('paper')); print('torch' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed == "False\n"


def sites(count: int, **settings: Any) -> list[DeMo]:
    """Sites of one small model, each with gradients of its own; the last one's are a hundred times larger."""
    optimizers = []
    for site in range(count):
        shapes = {"matrix": (70, 64), "vector": (40,), "conv": (8, 4, 3, 3)}
        parameters = {name: nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()}
        generator = torch.Generator().manual_seed(site)
        for parameter in parameters.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator) * (100 if site == count - 1 else 1)
        optimizers.append(DeMo(list(parameters.items()), lr=2.0**-6, **settings))
    return optimizers


def outcome(**settings: Any) -> str:
    """Digest of all that three steps of three sites send and become."""
    digest = hashlib.sha256()
    optimizers = sites(3, **settings)
    for _ in range(3):
        for optimizer, sent in zip(optimizers, step_together(optimizers, tokens=(1, 2, 5)), strict=True):
            packed = pack_contribution(sent, optimizer.layout, optimizer.settings.codec, optimizer.settings.indices)
            for name, array in sorted(packed.items()):
                digest.update(name.encode() + array.tobytes())
    for optimizer in optimizers:
        digest.update(optimizer.parameters_digest().encode())
        for state in optimizer.state.values():
            digest.update(state["momentum"].numpy().tobytes())
    return digest.hexdigest()


WITH: dict[str, dict[str, Any]] = {"beta2": {"base_update": "adam"}}
"""The settings without which another has no meaning."""

VALUES: dict[str, tuple[Any, ...]] = {
    "transform": ("dct", "hadamard", "random", "identity"),
    "chunk": (32, 64, 128),
    "k": (8, 32),
    "codec": ("sign", "int2", "int4", "int8", "int16"),
    "indices": ("packed", "compact"),
    "beta": (0.9, 0.99),
    "alpha": (0.0, 0.5, 1.0),
    "subtract": ("local", "aggregate"),
    "average": ("contributors", "sites", "tokens", "median"),
    "largest": (None, 10, 11),
    "outliers": ("halve", "keep"),
    "base_update": ("signum", "sgd", "adam", "muon"),
    "beta2": (0.9, 0.99),
}


@pytest.mark.parametrize("name", [field.name for field in fields(Settings)])
@pytest.mark.filterwarnings("ignore:alpha = 1.0 with subtract")
def test_every_value_of_every_setting_has_an_effect(name: str) -> None:
    outcomes = [outcome(**WITH.get(name, {}), **{name: value}) for value in VALUES[name]]
    assert len(set(outcomes)) == len(outcomes) > 1
    assert outcome(**WITH.get(name, {}), **{name: VALUES[name][0]}) == outcomes[0]


@pytest.mark.parametrize(
    ("alpha", "subtract", "count", "warns"),
    [
        (1.0, "aggregate", 2, True),
        (0.5, "aggregate", 2, False),
        (1.0, "aggregate", 1, False),
        (0.4, "aggregate", 3, True),
        (1.0, "local", 3, False),
    ],
)
def test_warns_once_of_too_much_subtraction(alpha: float, subtract: Any, count: int, warns: bool) -> None:
    optimizers = sites(count, alpha=alpha, subtract=subtract)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            step_together(optimizers)
    assert len(caught) == warns
    if warns:
        assert f"{count} sites" in str(caught[0].message)
        assert f"alpha at most 1/{count}" in str(caught[0].message)


@pytest.mark.parametrize("outliers", ["halve", "keep"])
def test_entry_follows_the_outlier_rule(outliers: Any) -> None:
    """The third site's gradients are a hundred times larger: halved 6 times they are at most twice the median."""
    optimizers = sites(3, outliers=outliers, codec="int8")
    sent = [optimizer._contribution() for optimizer in optimizers]
    update = optimizers[0].entry(sent, listed=True).update
    expected = aggregate(sent, optimizers[0].layout, [0, 0, 6] if outliers == "halve" else [0, 0, 0])
    assert update is not None
    for shape, part in expected.shapes.items():
        assert np.array_equal(update.shapes[shape].values, part.values)
        assert np.array_equal(update.shapes[shape].exponents, part.exponents)


def test_entry_has_the_rates_of_the_groups() -> None:
    parameters = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    groups = [{"params": [("a", parameters[0])]}, {"params": [("b", parameters[1])], "lr": 0.1, "weight_decay": 0.3}]
    entry = DeMo(groups, lr=0.5, weight_decay=0.25).entry([], listed=False)
    assert entry.update is None
    assert entry.lr == (0.5, float(np.float32(0.1)))
    assert entry.decay == (0.875, float(np.float32(1 - 0.1 * 0.3)))
