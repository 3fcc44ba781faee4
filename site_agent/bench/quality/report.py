"""From losses to tables."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from site_agent.bench.quality.train import Outcome

__all__ = ["Summary", "markdown", "summary", "sweep_markdown"]


@dataclass(frozen=True)
class Summary:
    """A row of the table. Losses are held-out, in nats per byte; None: there is no such number."""

    method: str
    lr: float
    sent_kb: float
    """Kilobytes (1,000 bytes) that one site sends in a run."""
    loss: float | None
    """Mean over the seeds; None if a run has diverged."""
    spread: float | None
    """Standard deviation over the seeds."""
    difference: float | None
    """To the yardstick, mean over the seeds: below 0 is better."""
    standard_errors: float | None
    """The difference in units of its own standard error, from the differences seed by seed."""


def summary(method: str, lr: float, outcomes: Sequence[Outcome], yardstick: Sequence[Outcome]) -> Summary:
    """Both sequences are in the order of the seeds; an empty `yardstick` means that there is none."""
    losses = [outcome.loss for outcome in outcomes]
    sent_kb = statistics.mean(outcome.sent for outcome in outcomes) / 1000
    if not all(map(math.isfinite, losses)):
        return Summary(method, lr, sent_kb, None, None, None, None)
    differences = [loss - other.loss for loss, other in zip(losses, yardstick, strict=bool(yardstick))]
    difference = statistics.mean(differences) if differences and all(map(math.isfinite, differences)) else None
    error = _standard_error(differences) if difference is not None else None
    return Summary(
        method=method,
        lr=lr,
        sent_kb=sent_kb,
        loss=statistics.mean(losses),
        spread=statistics.stdev(losses) if len(losses) > 1 else None,
        difference=difference,
        standard_errors=difference / error if difference is not None and error else None,
    )


def _standard_error(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def markdown(rows: Sequence[Summary]) -> str:
    """The table, least bytes last."""
    lines = [
        "| method | lr | kB sent per site | held-out loss | spread | against the yardstick | in standard errors |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: -row.sent_kb):
        loss = "diverged" if row.loss is None else f"{row.loss:.3f}"
        cells = [
            row.method,
            f"{row.lr:g}",
            f"{row.sent_kb:,.0f}",
            loss,
            _cell(row.spread, ".3f"),
            _cell(row.difference, "+.3f"),
            _cell(row.standard_errors, "+.1f"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def sweep_markdown(losses: Mapping[str, Mapping[float, float]]) -> str:
    """Method -> learning rate -> loss, as one line per method, the best in bold."""
    lines = ["| method | learning rate: held-out loss |", "|---|---|"]
    for method, by_rate in losses.items():
        best = min(by_rate, key=lambda lr: by_rate[lr] if math.isfinite(by_rate[lr]) else math.inf)
        cells = [f"{'**' if lr == best else ''}{lr:g}: {by_rate[lr]:.3f}{'**' if lr == best else ''}" for lr in by_rate]
        lines.append(f"| {method} | {', '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
