"""The quality benchmark as users run it, but very short: real training, PowerSGD in two real processes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from algorithms.traffic import contribution_bytes, ddp_bytes
from site_agent.bench.quality.command import quality
from site_agent.bench.quality.float32 import layout_of
from site_agent.bench.quality.task import Task
from tests.conftest import ROOT

STEPS = 20
pytestmark = pytest.mark.timeout(900)  # for a machine that has much else to do

ROWS = "adamw-ddp,powersgd rank 4,demo float32,demo sign"
TASK = Task(batch=2, context=32)
COMMAND = ["--sites", "2", "--steps", str(STEPS), "--batch", "2", "--context", "32"]
COMMAND += ["--seeds", "1", "--jobs", "1", "--methods", ROWS]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The file of results and the table."""
    results = tmp_path_factory.mktemp("quality") / "results"
    command = [sys.executable, "-m", "site_agent.bench", "quality", *COMMAND, "--results", str(results), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return results, json.loads(done.stdout)


@pytest.fixture(scope="module")
def rows(finished: tuple[Path, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    _, table = finished
    assert (table["sites"], table["steps"], table["seeds"], table["context"]) == (2, STEPS, 1, 32)
    return {row["method"]: row for row in table["rows"]}


def run_here(*options: str) -> Any:
    app = typer.Typer()
    app.command()(quality)
    return CliRunner().invoke(app, options)


@pytest.mark.slow
def test_every_method_learns(rows: dict[str, dict[str, Any]]) -> None:
    nothing_learned = TASK.held_out_loss(TASK.model(seed=0))
    assert rows.keys() == set(ROWS.split(","))
    for row in rows.values():
        assert 2.0 < row["loss"] < nothing_learned - 1.5
        assert row["difference"] == row["loss"] - rows["demo float32"]["loss"]
        assert (row["spread"], row["standard_errors"]) == (None, None)
    assert abs(rows["powersgd rank 4"]["loss"] - rows["adamw-ddp"]["loss"]) < 0.2


@pytest.mark.slow
def test_bytes_are_what_is_sent(rows: dict[str, dict[str, Any]]) -> None:
    model = TASK.model(seed=0)
    layout = layout_of(model)
    sent = {name: row["sent_kb"] * 1000 for name, row in rows.items()}
    assert sent["adamw-ddp"] == STEPS * ddp_bytes(layout)
    assert sent["demo sign"] == STEPS * contribution_bytes(layout, 32, "sign")
    assert 60 * sent["demo sign"] < sent["adamw-ddp"]
    factors = 0
    for parameter in model.parameters():
        rows_and_cols = sum(parameter.shape)
        compressed = parameter.ndim == 2 and 2 * 4 * rows_and_cols < parameter.numel()
        factors += 4 * rows_and_cols if compressed else parameter.numel()
    assert sent["powersgd rank 4"] == pytest.approx(4 * (10 * layout.parameter_count + (STEPS - 10) * factors))


@pytest.mark.slow
def test_a_table_goes_on_where_it_stopped(finished: tuple[Path, dict[str, Any]]) -> None:
    results, table = finished
    again = run_here(*COMMAND, "--results", str(results), "--json")
    assert again.exit_code == 0
    assert json.loads(again.stdout) == table
    assert "4 runs, of which 4 are known" in again.stderr
    assert len(results.read_text().splitlines()) == 4
    text = run_here(*COMMAND, "--results", str(results)).stdout
    assert [line.split(" | ")[0] for line in text.splitlines()[2:]] == [
        "| powersgd rank 4",  # for ten steps it sends twice as much as DDP
        "| adamw-ddp",
        "| demo float32",
        "| demo sign",
    ]


def test_mistakes_are_said_before_anything_runs() -> None:
    done = run_here("--methods", "demo sign,demo 9 bits")
    assert done.exit_code == 1
    assert done.output.startswith("isthmus bench quality: no rows demo 9 bits; there are adamw-ddp, ")
