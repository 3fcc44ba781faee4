"""The sub-commands of `isthmus bench`: figures on stdout, progress on stderr."""

import json
import sys
from typing import Annotated

import typer
from rich.console import Console

from api.command import obey
from site_agent.bench.algorithms import FULL, QUICK, measure
from site_agent.bench.quality.command import quality
from site_agent.bench.report import print_report

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Measure Isthmus on this machine.")
progress = Console(stderr=True)

AsJson = Annotated[bool, typer.Option("--json", help="print JSON instead of tables")]
Quick = Annotated[bool, typer.Option("--quick", help="small shapes and few rounds: a check, not a measurement")]


@app.callback()
def bench() -> None:
    """Measure Isthmus on this machine."""


@app.command()
def algorithms(as_json: AsJson = False, quick: Quick = False) -> None:
    """CPU time, memory and bytes of the algorithms, beside the textbook way of doing the same."""
    figures = measure(QUICK if quick else FULL, lambda text: progress.print(text, style="dim", highlight=False))
    if as_json:
        sys.stdout.write(json.dumps(figures, indent=2, allow_nan=False) + "\n")
    else:
        print_report(figures, Console())


@app.command()
def rounds(as_json: AsJson = False, quick: Quick = False) -> None:
    """Whole rounds through a real coordinator, beside bare sockets and a gloo all-gather of the same bytes."""
    from site_agent.bench.rounds import cases, measure, report  # they need a coordinator's Redis client

    plan = cases.QUICK if quick else cases.FULL
    figures = measure.measure(plan, lambda text: progress.print(text, style="dim", highlight=False))
    if as_json:
        sys.stdout.write(json.dumps(figures, indent=2, allow_nan=False) + "\n")
    else:
        report.print_report(figures, Console())


@app.command()
def outer(
    as_json: AsJson = False,
    mib: Annotated[
        int, typer.Option(help="of parameters at each of three sites; a snapshot has three times that", min=1)
    ] = 1024,
) -> None:
    """Outer rounds of large parameters through a real coordinator, beside every site sending everything; snapshots."""
    from site_agent.bench.outer import measure, report  # they need a coordinator's Redis client

    figures = measure.measure(mib, lambda text: progress.print(text, style="dim", highlight=False))
    if as_json:
        sys.stdout.write(json.dumps(figures, indent=2, allow_nan=False) + "\n")
    else:
        report.print_report(figures, Console())


app.command()(quality)


if __name__ == "__main__":
    obey(lambda: app(prog_name="isthmus bench"))  # on SIGTERM, too, what it has started and stored is taken away
