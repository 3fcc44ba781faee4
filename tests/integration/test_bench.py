"""`isthmus bench algorithms --quick` as a user runs it: the command, its processes, and figures that are real."""

import json
import math
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import get_args

import pytest
from rich.console import Console

from algorithms.updates import Codec
from site_agent.bench.report import print_report

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-c", "from api.cli import main; main()", "bench"]
HEADLINES = [
    "encode_speedup_k8",
    "encode_speedup_k32",
    "decode_speedup_k32_n4",
    "decode_speedup_k32_n4_8bit",
    "aggregate_speedup_n4_k8",
    "aggregate_extra_mb_n4_k8",
    "aggregate_textbook_extra_mb_n4_k8",
    "bytes_per_coefficient_default",
    "bytes_per_coefficient_compact",
    "bytes_per_coefficient_compact_k8",
    "encode_over_floor_k8",
    "decode_over_floor_k32",
]


@pytest.fixture(scope="module")
def result() -> subprocess.CompletedProcess[str]:
    words = ["algorithms", "--quick", "--json"]
    return subprocess.run([*COMMAND, *words], cwd=ROOT, capture_output=True, text=True, timeout=240, check=True)


@pytest.fixture(scope="module")
def figures(result) -> dict:
    return json.loads(result.stdout)


def numbers(value) -> list[float]:
    """All numbers in nested objects."""
    if isinstance(value, dict):
        return [number for part in value.values() for number in numbers(part)]
    return [value] if isinstance(value, int | float) else []


def test_stdout_is_json_and_progress_goes_to_stderr(result, figures):
    assert "measuring: memory" in result.stderr
    assert list(figures)[: len(HEADLINES)] == sorted(HEADLINES, key=list(figures).index)


def test_every_figure_is_finite_and_positive(figures):
    found = numbers(figures)
    assert len(found) > 150
    assert all(math.isfinite(number) and number > 0 for number in found)


def test_both_sides_did_the_same_work(figures):
    assert all(part["equal_picks"] > 0.999 for part in figures["encode"].values())
    assert all(share > 0.97 for share in figures["decode_and_apply"]["equal_directions"].values())


def test_ratios_agree_with_the_times(figures):
    parts = [*figures["encode"].values(), *figures["aggregate"].values(), figures["decode_and_apply"]]
    for part in parts:
        times = part["ms_per_million"]
        for name, ratio in part["speedup"].items():
            assert times[name]["low"] / times["ours"]["high"] <= ratio["low"] * 1.001
            assert ratio["low"] <= ratio["median"] <= ratio["high"]
            assert ratio["high"] <= times[name]["high"] / times["ours"]["low"] * 1.001
    assert figures["encode_speedup_k8"] == figures["encode"]["k8"]["speedup"]["textbook"]["median"]
    assert figures["decode_speedup_k32_n4"] == figures["decode_and_apply"]["speedup"]["textbook"]["median"]
    assert figures["aggregate_speedup_n4_k8"] == figures["aggregate"]["n4_k8"]["speedup"]["textbook"]["median"]


def test_memory_is_that_of_the_arrays(figures):
    """The dense mean of all tensors is one float32 per parameter; that of the largest is nearly half of them here."""
    memory = figures["memory"]
    whole = memory["parameters"] * 4 / 1e6
    extra = memory["extra_mb_n4_k8"]
    assert extra["textbook_whole"] > whole
    assert 0.5 * whole < extra["textbook"] < extra["textbook_whole"]
    assert extra["ours"] == figures["aggregate_extra_mb_n4_k8"] < extra["textbook"]


def test_bytes_are_given_for_every_codec(figures):
    for sizes in (figures["bytes"]["per_coefficient"][k] for k in ("k8", "k32")):
        assert set(sizes) == set(get_args(Codec))
        assert all(size > 1.2 for forms in sizes.values() for size in forms.values())


def test_growth_has_every_direction(figures):
    assert set(figures["growth"]) == {"k", "sites", "parameters"}
    for rows in figures["growth"].values():
        assert len(rows) >= 2
        assert all(set(costs) == {"encode", "aggregate", "decode_and_apply"} for costs in rows.values())


def test_tables_have_the_same_figures(figures):
    console = Console(file=StringIO(), width=120)
    print_report(figures, console)
    text = console.file.getvalue()
    for words in ("aggregate n4_k8", "sign", "packed", figures["environment"]["torch"]):
        assert words in text
    for name in HEADLINES:
        assert f"{figures[name]:.4g}" in text
