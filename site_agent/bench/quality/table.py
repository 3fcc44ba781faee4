"""The rows of the quality table: a method, its settings, and a learning rate swept beforehand."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from algorithms import preset

__all__ = ["ROWS", "YARDSTICK", "Row", "choose"]


@dataclass(frozen=True)
class Row:
    """`settings` are those of the method: for `demo` the keyword arguments of `DeMo(...)`."""

    name: str
    method: str
    lr: float
    settings: Mapping[str, Any] = field(default_factory=dict)


YARDSTICK = "demo float32"
"""The row with which all others are compared."""

_STREAMING: Mapping[str, Any] = {"fragments": 4, "stagger": True, "delay": 4}

# Learning rates: best of a sweep in factors of 2, 4 sites, seed 0, batch 4 x 64. Held-out losses, best first:
#   after 120 steps: adamw 1.5e-3 2.444 (7.5e-4 2.464, 3e-3 2.749), muon 12e-3 2.199 (24e-3 2.248, 6e-3 2.272),
#     PowerSGD rank 4 1.5e-3 2.492 (3e-3 2.726), DiLoCo 7.5e-4 2.570 (1.5e-3 2.646; lower not tried), SparseLoCo with
#     int8 values 1.5e-3 2.690 (3e-3 2.746, 7.5e-4 2.827);
#   after 200 steps: demo sign 1e-3 2.412 (5e-4 2.507, 2e-3 2.551);
#   after 150 steps: demo adam 1e-3 2.468 (5e-4 2.552, 2e-3 2.813), demo identity 4e-3 2.477 (2e-3 2.609; higher not
#     tried), demo paper 1e-3 2.628 (5e-4 2.700, 2e-3 2.849), demo overlap 5e-4 2.685 (2.5e-4 2.941, 1e-3 2.900, 4e-3
#     2.850), demo overlap aggregate 2e-3 2.945 (1e-3 2.953, 5e-4 2.955, 4e-3 3.144).
# Not swept: PowerSGD rank 1, which has the rate of rank 4, and the other rows of DeMo and DiLoCo, which have that of
# `demo sign` and `diloco`.
ROWS = (
    Row("adamw-ddp", "adamw", 1.5e-3),
    Row("muon-ddp", "muon", 12e-3),
    Row("powersgd rank 1", "powersgd", 1.5e-3, {"rank": 1}),
    Row("powersgd rank 4", "powersgd", 1.5e-3, {"rank": 4}),
    Row("diloco", "diloco", 7.5e-4, {"codec": "bf16"}),
    Row("diloco 20", "diloco", 7.5e-4, {"every": 20}),
    Row("diloco 20 bf16", "diloco", 7.5e-4, {"every": 20, "codec": "bf16"}),
    Row("diloco 20 int8", "diloco", 7.5e-4, {"every": 20, "codec": "int8"}),
    Row("diloco 20 topk 256", "diloco", 7.5e-4, {"every": 20, "codec": "topk", "k": 256}),
    Row("diloco 20 topk 32", "diloco", 7.5e-4, {"every": 20, "codec": "topk", "k": 32}),
    Row("diloco 20 stagger", "diloco", 7.5e-4, {"every": 20, "fragments": 4, "stagger": True}),
    Row("diloco 20 delay", "diloco", 7.5e-4, {"every": 20, "delay": 4}),
    Row("diloco 20 delay mix 0.5", "diloco", 7.5e-4, {"every": 20, "delay": 4, "mix": 0.5}),
    Row("diloco 20 streaming", "diloco", 7.5e-4, {"every": 20, **_STREAMING}),
    Row("diloco 20 streaming int8", "diloco", 7.5e-4, {"every": 20, **_STREAMING, "codec": "int8"}),
    Row("sparseloco", "sparseloco", 1.5e-3, {"codec": "int2"}),
    Row(YARDSTICK, "float32", 1e-3, {"k": 32}),
    Row("demo sign", "demo", 1e-3, {"codec": "sign"}),
    Row("demo int2", "demo", 1e-3, {"codec": "int2"}),
    Row("demo int4", "demo", 1e-3, {"codec": "int4"}),
    Row("demo int8", "demo", 1e-3, {"codec": "int8"}),
    Row("demo int16", "demo", 1e-3, {"codec": "int16"}),
    Row("demo overlap", "demo", 5e-4, {"overlap": True}),
    Row("demo overlap aggregate", "demo", 1e-3, {"overlap": True, **preset("paper")}),
    Row("demo k=8", "demo", 1e-3, {"k": 8}),
    Row("demo k=128", "demo", 1e-3, {"k": 128}),
    Row("demo paper", "demo", 1e-3, preset("paper")),
    Row("demo reference", "demo", 1e-3, preset("reference")),
    Row("demo adam", "demo", 1e-3, {"base_update": "adam"}),
    Row("demo hadamard", "demo", 1e-3, {"transform": "hadamard"}),
    Row("demo random", "demo", 1e-3, {"transform": "random"}),
    Row("demo identity", "demo", 4e-3, {"transform": "identity"}),
)


def choose(names: Sequence[str]) -> list[Row]:
    """The rows of these names, all if there are none. Raises ValueError on a name that is not in the table."""
    rows = {row.name: row for row in ROWS}
    unknown = [name for name in names if name not in rows]
    if unknown:
        raise ValueError(f"no rows {', '.join(unknown)}; there are {', '.join(rows)}")
    return [rows[name] for name in names or rows]
