"""Follows a run to its end: a live progress bar on a terminal, a line every few seconds elsewhere."""

import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from api import schemas
from api.client import CoordinatorClient
from api.report import size, steps_done, why
from api.totals import total

__all__ = ["watch"]

_LINE_EVERY_S = 5.0


def watch(
    client: CoordinatorClient,
    run_id: str,
    console: Console,
    check: Callable[[], None] = lambda: None,
    every_s: float = 1.0,
) -> schemas.Run:
    """The run at its end. `check` is called at every look and may raise."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(run_id, total=None)
        printed, line = 0.0, ""
        while True:
            check()
            run = client.run(run_id)
            points = client.metrics(run.id, max_points=500) if run.status is schemas.RunStatus.RUNNING else []
            text, step = _describe(run, points), steps_done(run, points)
            progress.update(task, total=run.spec.steps, completed=step, description=text)
            if run.status.terminal:
                return run
            news = f"step {step}/{run.spec.steps}  {text}"
            if not console.is_terminal and news != line and time.monotonic() - printed >= _LINE_EVERY_S:
                console.print(news, soft_wrap=True, highlight=False)
                printed, line = time.monotonic(), news
            time.sleep(every_s)


def _describe(run: schemas.Run, points: Sequence[schemas.StoredPoint]) -> str:
    if run.status is not schemas.RunStatus.RUNNING or steps_done(run, points) == 0:
        return f"{run.status}: {why(run)}".partition("\n")[0]
    losses = [point.values["loss"] for point in points if point.values.get("loss") is not None]
    held_out = [point.values["heldout_loss"] for point in points if point.values.get("heldout_loss") is not None]
    sent = sum(total([point for point in points if point.site == member.site], "bytes_up") for member in run.members)
    parts = [
        f"loss {losses[-1]:.3f}" if losses else "",
        f"held-out {held_out[-1]:.3f}" if held_out else "",
        f"sent {size(sent)}" if sent else "",
    ]
    return "  ".join(part for part in parts if part)
