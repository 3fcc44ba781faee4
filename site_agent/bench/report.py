"""The figures of `isthmus bench algorithms` as tables."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["print_report"]

HEADLINES = {
    "encode_speedup_k8": "encode, k 8: times as fast as the textbook",
    "encode_speedup_k32": "encode, k 32",
    "decode_speedup_k32_n4": "decode and apply, k 32, 4 sites, 4 bits per value",
    "decode_speedup_k32_n4_8bit": "decode and apply, k 32, 4 sites, 8 bits per value",
    "aggregate_speedup_n4_k8": "aggregate, k 8, 4 sites",
    "aggregate_extra_mb_n4_k8": "aggregate, k 8, 4 sites: MB in addition",
    "aggregate_textbook_extra_mb_n4_k8": "the textbook's",
    "bytes_per_coefficient_default": "bytes per coefficient, as sent, k 32",
    "bytes_per_coefficient_compact": "the same with compact indices",
    "bytes_per_coefficient_compact_k8": "the same, k 8",
    "encode_over_floor_k8": "encode, k 8: times as long as its matrix products",
    "decode_over_floor_k32": "decode and apply, k 32: times as long as its matrix products",
}


def print_report(figures: Mapping[str, Any], console: Console) -> None:
    headlines = Table("what", "figure", title="Headlines")
    for name, text in HEADLINES.items():
        headlines.add_row(text, _number(figures[name]))
    times = Table("piece", "", "median", "lowest", "highest", title="CPU time, ms per million parameters")
    _add_times(times, {f"encode {k}": part for k, part in figures["encode"].items()})
    _add_times(times, {f"aggregate {case}": part for case, part in figures["aggregate"].items()})
    _add_times(times, {"decode and apply": figures["decode_and_apply"]})
    sizes = Table("k", "values", "indices", "bytes", title="Bytes per coefficient, whole messages")
    for k, codecs in figures["bytes"]["per_coefficient"].items():
        for codec, forms in codecs.items():
            for form, size in forms.items():
                sizes.add_row(k, codec, form, _number(size))
    growth = Table("grows", "to", "encode", "aggregate", "decode and apply", title="Growth, CPU ms in all")
    for what, rows in figures["growth"].items():
        for to, costs in rows.items():
            growth.add_row(what, to, *map(_number, costs.values()))
    for table in (times, sizes, growth, headlines):
        console.print(table)
    console.print(", ".join(f"{name} {value}" for name, value in figures["environment"].items()), highlight=False)


def _add_times(table: Table, cases: Mapping[str, Any]) -> None:
    for case, part in cases.items():
        for name, time in part["ms_per_million"].items():
            table.add_row(case, name, *(_number(time[key]) for key in ("median", "low", "high")))


def _number(value: float) -> str:
    return f"{value:.4g}"
