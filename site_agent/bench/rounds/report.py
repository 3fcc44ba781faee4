"""The figures of `isthmus bench rounds` as a table."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["print_report"]

_COLUMNS = (
    "rounds_per_s",
    "round_p50_ms",
    "round_p99_ms",
    "gloo_p50_ms",
    "sockets_p50_ms",
    "round_over_gloo",
    "cpu_ms",
    "redis_cpu_ms",
    "peak_mb",
    "redis_received_mb",
)


def print_report(figures: Mapping[str, Any], console: Console) -> None:
    rows = Table("sites, size", "fsync", *_COLUMNS, title="Rounds")
    splits = Table("sites, size", "fsync", "piece", "ms", title="The coordinator's part of a round")
    for name, row in figures["rows"].items():
        for fsync in ("everysec", "always"):
            rows.add_row(name, fsync, *(f"{row[fsync][column]:.4g}" for column in _COLUMNS))
            for piece, time in row[fsync]["split_ms"].items():
                splits.add_row(name, fsync, piece, f"{time:.4g}")
    headlines = Table("what", "figure", title="Headlines")
    for name, value in figures.items():
        if isinstance(value, float):
            headlines.add_row(name, f"{value:.4g}")
    for table in (rows, splits, headlines):
        console.print(table)
    for name, why in figures["skipped"].items():
        console.print(f"{name}: skipped, {why}", highlight=False)
    console.print(", ".join(f"{name} {value}" for name, value in figures["environment"].items()), highlight=False)
