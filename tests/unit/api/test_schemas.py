"""The run spec: its settings are those of the algorithms, presets are what one begins with."""

import re
from dataclasses import asdict
from typing import Any

import pytest
from pydantic import ValidationError

from algorithms import Settings, preset
from api.specs import OptimizerSpec, RunSpec


def spec(optimizer: dict[str, Any], outer: dict[str, Any] | None = None) -> RunSpec:
    return RunSpec.model_validate({"name": "a", "task": "b", "steps": 3, "optimizer": optimizer, "outer": outer})


def test_a_run_and_demo_have_the_same_defaults() -> None:
    assert OptimizerSpec().settings() == asdict(Settings())


@pytest.mark.parametrize("name", ["paper", "reference", "default"])
def test_a_preset_is_what_one_begins_with(name: Any) -> None:
    settings = OptimizerSpec(preset=name).settings()
    assert settings == asdict(Settings(**preset(name)))
    own = OptimizerSpec(preset=name, alpha=0.3, k=8)
    assert own.settings() == settings | {"alpha": 0.3, "k": 8}
    assert OptimizerSpec.model_validate_json(own.model_dump_json()) == own


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ({"preset": "papers"}, "preset"),
        ({"transform": "fourier"}, "transform"),
        ({"chunk": 32, "k": 2000}, "k must be 1 to 1024 for chunks of 32 x 32, got 2000"),
        ({"codec": "int3"}, "codec"),
        ({"largest": 0}, "largest"),
        ({"base_update": "muon"}, "muon is not exact"),
    ],
)
def test_bad_settings_are_named(optimizer: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        spec(optimizer)


def test_an_inexact_base_update_needs_outer_steps() -> None:
    assert spec({"base_update": "muon"}, {"every": 2}).optimizer.base_update == "muon"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"optimizer": {"kind": "adamw"}}, 'optimizer.kind = adamw trains without rounds: add "exchange": "none"'),
        ({"optimizer": {"kind": "adamw", "k": 32}}, "kind = adamw has no setting k: leave it out"),
        ({"optimizer": {"betas": [0.9, 0.99]}}, "kind = demo has no setting betas"),
        ({"outer": {"every": 1, "optimizer": "average", "lr": 1}}, "optimizer = average has no setting lr"),
        ({"outer": {"every": 2, "delay": 2}}, "delay must be at least 0 and below 2, the fewest steps between two"),
        ({"outer": {"every": 2, "delay": -1}}, "outer.delay"),
        ({"outer": {"every": 2, "fragments": 2, "stagger": True, "delay": 1}}, "and below 1, the fewest steps"),
        ({"outer": {"every": 2, "delay": 1, "mix": 1.5}}, "outer.mix"),
        ({"outer": {"every": 2, "mix": 0.5}}, "mix = 0.5 without delay"),
        ({"outer": {"every": 2, "stagger": True, "state": "reset"}}, "state = reset with stagger"),
        ({"outer": {"every": 2, "k": 4}}, "codec = fp32 has no setting k"),
        ({"outer": {"every": 2, "codec": "int8", "k": 4}}, "codec = int8 has no setting k"),
        ({"outer": {"every": 2, "codec": "topk", "k": 4097}}, "outer.k = 4097 is more than a chunk has: at most 4096"),
        ({"outer": {"every": 2, "codec": "fp16"}}, "outer.codec"),
        ({"outer": {"every": 2, "delay": 1}, "snapshots": {"every": 2}}, "snapshots.every with outer.stagger or"),
        ({"exchange": "none"}, "exchange = none without `outer`"),
        ({"exchange": "none", "outer": {"every": 1}, "rounds": {"overlap": True}}, "no rounds to overlap"),
        ({"exchange": "none", "outer": {"every": 1}, "rounds": {"min_sites": 2}}, "a region is one site"),
        ({"sites": ["a"], "regions": {"west": ["a"]}}, "not both"),
        ({"regions": {"west": ["a", "b"], "east": ["a"]}}, "regions names a more than once"),
        ({"sites": ["b", "a", "b"]}, "sites names b more than once"),
        ({"regions": {"west": ["a"], "east": ["b"]}}, "regions east, west, which would never meet: add `outer`"),
        ({"regions": {"west": ["a"]}, "rounds": {"min_sites": 2}}, "region west has 1 sites, rounds.min_sites asks"),
        ({"sites": ["a"], "rounds": {"min_sites": 2}}, "rounds.min_sites = 2, and `sites` names 1"),
        (
            {"regions": {"west": ["a", "b"]}, "exchange": "none", "outer": {"every": 1}},
            "with exchange = none a region is one site: give each a region",
        ),
        ({"optimiser": {}}, "there is no 'optimiser': did you mean 'optimizer'?"),
        ({"optimizer": {"weight-decay": 0}}, "did you mean 'weight_decay'?"),
        ({"outer": {"ever": 1}}, "did you mean 'every'?"),
        ({"optimizer": {"kk": 8}}, "there is no 'kk': did you mean 'k'?"),
        ({"surprise": 1}, "Extra inputs are not permitted"),
    ],
)
def test_specs_that_can_never_be_runs(spec, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        RunSpec(name="r", task="t", steps=2, **spec)


@pytest.mark.parametrize(
    ("kind", "state", "forgets"),
    [("demo", None, True), ("adamw", None, False), ("demo", "keep", False), ("sgd", "reset", True)],
)
def test_momentum_of_demo_is_forgotten_at_outer_steps_unless_told_otherwise(kind, state, forgets):
    outer = {"every": 1, "state": state}
    spec = RunSpec(name="r", task="t", steps=2, exchange="none", optimizer={"kind": kind}, outer=outer)
    assert spec.forgets is forgets
    assert not RunSpec(name="r", task="t", steps=2).forgets


@pytest.mark.parametrize("kind", ["demo", "adamw", "muon", "sgd", "custom"])
def test_a_spec_is_read_again_as_it_was_written(kind):
    outer = {"every": 1, "optimizer": "average"}
    spec = RunSpec(name="r", task="t", steps=2, exchange="none", optimizer={"kind": kind, "lr": 0.5}, outer=outer)
    assert RunSpec.model_validate_json(spec.model_dump_json()) == spec
