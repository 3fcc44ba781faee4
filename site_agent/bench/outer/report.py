"""The figures of `isthmus bench outer` as tables."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["print_report"]


def print_report(figures: Mapping[str, Any], console: Console) -> None:
    headlines = Table("what", "figure", title="Headlines")
    for name, value in figures.items():
        if not isinstance(value, dict):
            headlines.add_row(name, _text(value))
    rows = figures["rows"]
    details = Table("what", *rows, title="Both runs")
    for name in next(iter(rows.values())):
        details.add_row(name, *(_text(row[name]) for row in rows.values()))
    others = Table("what", "figure", title="Snapshot, and runs that were resumed with the same bits")
    for name, value in (figures["snapshot"] | figures["resume"]).items():
        others.add_row(name, _text(value))
    for table in (headlines, details, others):
        console.print(table)
    for name, why in figures["skipped"].items():
        console.print(f"{name}: skipped, {why}", highlight=False)
    console.print(", ".join(f"{name} {value}" for name, value in figures["environment"].items()), highlight=False)


def _text(value: float | list[float] | str | None) -> str:
    if isinstance(value, str | bool) or value is None:
        return "-" if value is None else str(value)
    return ", ".join(f"{one:.4g}" for one in (value if isinstance(value, list) else [value]))
