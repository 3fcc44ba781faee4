"""The command: which rows, from how many seeds, printed as Markdown or JSON."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from site_agent.bench.quality.report import markdown, summary, sweep_markdown
from site_agent.bench.quality.runs import outcomes
from site_agent.bench.quality.table import YARDSTICK, Row, choose
from site_agent.bench.quality.task import Task
from site_agent.bench.quality.train import Outcome, Run, check

__all__ = ["quality"]

_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Of a row's learning rate, in a sweep."""


def quality(
    methods: Annotated[str, typer.Option(help="rows of the table, separated by commas; empty: all")] = "",
    sites: Annotated[int, typer.Option(min=1, max=16)] = 4,
    steps: Annotated[int, typer.Option(min=2)] = 400,
    seeds: Annotated[int, typer.Option(min=1)] = 3,
    batch: Annotated[int, typer.Option(min=1, help="sequences per site and step")] = 4,
    context: Annotated[int, typer.Option(min=1, help="bytes per sequence")] = 64,
    jobs: Annotated[int, typer.Option(min=1, help="runs at a time, a core each; PowerSGD takes one per site")] = 2,
    sweep: Annotated[bool, typer.Option("--sweep", help="try other learning rates instead, on one seed")] = False,
    results: Annotated[Path | None, typer.Option(help="file that keeps finished runs: they are not run again")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of Markdown")] = False,
) -> None:
    """Train examples/tiny_lm by each method; compare what it has learnt (held-out loss, nats per byte) and sent.

    All methods start from the same weights and draw the same sequences, seed by seed.
    """
    try:
        rows = choose([name.strip() for name in methods.split(",") if name.strip()])
        for row in rows:
            check(row)
    except ValueError as error:
        raise SystemExit(f"isthmus bench quality: {error}") from error
    task = Task(batch=batch, context=context)
    if sweep:
        rows, seeds = [replace(row, lr=row.lr * factor) for row in rows for factor in _FACTORS], 1
    runs = [Run(row, seed, task, sites, steps) for row in rows for seed in range(seeds)]
    flat = outcomes(runs, jobs, results)
    found = [flat[start : start + seeds] for start in range(0, len(flat), seeds)]
    table, text = (_sweep if sweep else _compare)(rows, found)
    figures = {"sites": sites, "steps": steps, "seeds": seeds, **asdict(task), "rows": table}
    sys.stdout.write(json.dumps(figures, indent=2, allow_nan=False) + "\n" if as_json else text)


def _compare(rows: Sequence[Row], found: Sequence[Sequence[Outcome]]) -> tuple[list[dict[str, Any]], str]:
    """The rows as JSON and as Markdown, given the outcomes of all seeds for each."""
    yardstick = next((own for row, own in zip(rows, found, strict=True) if row.name == YARDSTICK), [])
    table = [summary(row.name, row.lr, own, yardstick) for row, own in zip(rows, found, strict=True)]
    return [asdict(row) for row in table], markdown(table)


def _sweep(rows: Sequence[Row], found: Sequence[Sequence[Outcome]]) -> tuple[list[dict[str, Any]], str]:
    losses: dict[str, dict[float, float]] = {}
    for row, (outcome,) in zip(rows, found, strict=True):
        losses.setdefault(row.name, {})[row.lr] = outcome.loss
    table = [summary(row.name, row.lr, own, []) for row, own in zip(rows, found, strict=True)]
    return [asdict(row) for row in table], sweep_markdown(losses)
