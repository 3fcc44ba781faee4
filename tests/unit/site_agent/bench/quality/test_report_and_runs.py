"""The table's arithmetic, and what an interrupted table keeps."""

import json
import math
from pathlib import Path

import pytest

from site_agent.bench.quality import runs
from site_agent.bench.quality.report import markdown, summary, sweep_markdown
from site_agent.bench.quality.runs import outcomes
from site_agent.bench.quality.table import ROWS, YARDSTICK, Row, choose
from site_agent.bench.quality.task import Task
from site_agent.bench.quality.train import METHODS, Outcome, Run, check


def losses(*values: float) -> list[Outcome]:
    return [Outcome(value, 1500) for value in values]


def test_summary_compares_seed_by_seed() -> None:
    row = summary("x", 1e-3, losses(2.0, 2.2, 2.4), losses(1.9, 2.0, 2.1))
    assert (row.sent_kb, row.loss) == (1.5, pytest.approx(2.2))
    assert row.spread == pytest.approx(0.2)
    assert row.difference == pytest.approx(0.2)
    assert row.standard_errors == pytest.approx(0.2 / (0.1 / math.sqrt(3)))


def test_summary_says_what_it_does_not_know() -> None:
    one_seed = summary("x", 1e-3, losses(2.0), losses(1.5))
    assert (one_seed.spread, one_seed.difference, one_seed.standard_errors) == (None, 0.5, None)
    assert summary("x", 1e-3, losses(2.0, 2.1), []).difference is None
    assert summary(YARDSTICK, 1e-3, losses(2.0, 2.1), losses(2.0, 2.1)).standard_errors is None
    assert summary("x", 1e-3, losses(2.0, 2.1), losses(2.0, math.nan)).difference is None
    diverged = summary("x", 1e-3, losses(2.0, math.nan), losses(1.0, 1.0))
    assert (diverged.loss, diverged.difference) == (None, None)


def test_markdown_has_a_line_per_row_and_the_best_rate_in_bold() -> None:
    rows = [summary("few", 1e-3, losses(2.0, 2.2), losses(1.9, 2.0)), summary("bad", 1.0, losses(math.inf), [])]
    assert markdown(rows).splitlines()[2:] == [
        "| few | 0.001 | 2 | 2.100 | 0.141 | +0.150 | +3.0 |",
        "| bad | 1 | 2 | diverged |  |  |  |",
    ]
    assert "1: nan, **2: 1.500**, 4: 1.600" in sweep_markdown({"x": {1: math.nan, 2: 1.5, 4: 1.6}})


def test_rows_are_chosen_by_name() -> None:
    assert choose([]) == list(ROWS)
    assert [row.name for row in choose([YARDSTICK, "diloco"])] == [YARDSTICK, "diloco"]
    with pytest.raises(ValueError, match="no rows demo, 8; there are adamw-ddp, "):
        choose(["demo", "8", "diloco"])
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert {row.method for row in ROWS} == METHODS.keys()


@pytest.mark.parametrize(
    "row",
    [
        Row("it", "no such method", 1.0),
        Row("it", "demo", 1.0, {"speed": 3}),
        Row("it", "demo", 1.0, {"codec": "int3"}),
        Row("it", "sparseloco", 1.0, {"codec": "int3"}),
        Row("it", "powersgd", 1.0, {"ranks": 3}),
        Row("it", "adamw", 1.0, {"k": 3}),
    ],
)
def test_unknown_settings_are_errors(row: Row) -> None:
    with pytest.raises(ValueError, match="row 'it': "):
        check(row)


@pytest.mark.parametrize("row", [Row("it", "demo", 1.0, {"k": 8}), Row("it", "powersgd", 1.0, {"rank": 3})])
def test_known_settings_are_not(row: Row) -> None:
    check(row)


def test_finished_runs_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file from which the last line is cut off half-way, as by a full disk or a kill."""
    trained: list[tuple[int, float]] = []

    def train_all(missing, jobs, finished):
        for number, run in enumerate(missing, 1):
            trained.append((run.seed, run.row.lr))
            finished(number, run, Outcome(math.nan if run.seed == 1 else run.seed, run.seed))

    monkeypatch.setattr(runs, "_train_all", train_all)
    path = tmp_path / "results"
    some = [Run(Row("x", "demo", 1e-3, {"k": 8}), seed, Task(), 4, 400) for seed in range(3)]
    assert [outcome.sent for outcome in outcomes(some, 1, path)] == [0, 1, 2]
    lines = path.read_text().splitlines()
    assert json.loads(lines[2])["run"]["row"] == {"name": "x", "method": "demo", "lr": 1e-3, "settings": {"k": 8}}
    path.write_text("\n".join([*lines[:2], lines[2][:30]]))

    trained.clear()
    again = outcomes(some, 1, path)
    assert trained == [(2, 1e-3)]
    assert math.isnan(again[1].loss)
    assert [outcome.sent for outcome in again] == [0, 1, 2]
    trained.clear()
    outcomes([*some, Run(Row("x", "demo", 2e-3, {"k": 8}), 2, Task(), 4, 400)], 1, path)
    assert trained == [(2, 2e-3)]
