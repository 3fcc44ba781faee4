"""`isthmus bench quality`: the table of held-out losses and bytes sent, as Markdown and JSON."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pydantic import Field
from pydantic_settings import BaseSettings, CliApp, SettingsConfigDict

from site_agent.bench_quality.report import markdown, summary, sweep_markdown
from site_agent.bench_quality.runs import outcomes
from site_agent.bench_quality.table import YARDSTICK, Row, choose
from site_agent.bench_quality.task import Task
from site_agent.bench_quality.train import Run, check

__all__ = ["main"]

_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Of a row's learning rate, in a sweep."""


class Quality(BaseSettings):
    """Trains examples/tiny_lm by each method and compares what it learns with what it sends.

    All methods start from the same weights and draw the same sequences, seed by seed. The loss is in nats per byte.
    """

    model_config = SettingsConfigDict(
        cli_prog_name="isthmus bench quality", cli_kebab_case=True, cli_hide_none_type=True
    )

    methods: str = Field(default="", description="rows of the table, separated by commas; empty: all")
    sites: int = Field(default=4, ge=1, le=16)
    steps: int = Field(default=400, ge=2)
    seeds: int = Field(default=3, ge=1)
    batch: int = Field(default=4, ge=1, description="sequences per site and step")
    context: int = Field(default=64, ge=1, description="bytes per sequence")
    jobs: int = Field(default=2, ge=1, description="runs at a time, one core each; PowerSGD takes one per site")
    sweep: bool = Field(default=False, description="try learning rates around those of the table, on one seed")
    results: Path | None = Field(default=None, description="file that keeps finished runs; they are not run again")
    json_: Path | None = Field(default=None, alias="json", description="write the table to this file as JSON")

    def cli_cmd(self) -> None:
        try:
            rows = choose([name.strip() for name in self.methods.split(",") if name.strip()])
            for row in rows:
                check(row)
        except ValueError as error:
            raise SystemExit(f"isthmus bench quality: {error}") from error
        (self._sweep if self.sweep else self._compare)(rows)

    def _compare(self, rows: Sequence[Row]) -> None:
        found = self._outcomes(rows, self.seeds)
        names = [row.name for row in rows]
        yardstick = found[names.index(YARDSTICK)] if YARDSTICK in names else []
        table = [summary(row.name, row.lr, own, yardstick) for row, own in zip(rows, found, strict=True)]
        self._write([asdict(row) for row in table])
        sys.stdout.write(markdown(table))

    def _sweep(self, rows: Sequence[Row]) -> None:
        tried = [replace(row, lr=row.lr * factor) for row in rows for factor in _FACTORS]
        losses: dict[str, dict[float, float]] = {row.name: {} for row in rows}
        for row, (outcome,) in zip(tried, self._outcomes(tried, 1), strict=True):
            losses[row.name][row.lr] = outcome.loss
        self._write([{"method": name, "losses": sorted(by_rate.items())} for name, by_rate in losses.items()])
        sys.stdout.write(sweep_markdown(losses))

    def _outcomes(self, rows: Sequence[Row], seeds: int) -> list[Any]:
        """Per row those of all seeds."""
        task = Task(batch=self.batch, context=self.context)
        runs = [Run(row, seed, task, self.sites, self.steps) for row in rows for seed in range(seeds)]
        flat = outcomes(runs, self.jobs, self.results)
        return [flat[start : start + seeds] for start in range(0, len(flat), seeds)]

    def _write(self, table: list[dict[str, Any]]) -> None:
        if self.json_ is not None:
            figures = {"sites": self.sites, "steps": self.steps, "seeds": self.seeds, "rows": table}
            self.json_.write_text(json.dumps(figures, indent=2) + "\n")


def main() -> None:
    CliApp.run(Quality)


if __name__ == "__main__":
    main()
