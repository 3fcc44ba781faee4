"""The command: seed after seed, progress on stderr, what came of it on stdout."""

import json
import shutil
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import stamina
import typer
from rich.console import Console

from site_agent.chaos.drill import Outcome, drill
from site_agent.chaos.schedule import plan

progress = Console(stderr=True)


def chaos(
    seeds: Annotated[int, typer.Option(min=1, help="how many runs, one after the other")] = 3,
    faults: Annotated[int, typer.Option(min=1, help="in each of them")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="the first one's seed; each has one of its own")] = 1,
    keep: Annotated[Path | None, typer.Option(help="keep data and logs of seeds that fail in this folder")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of text")] = False,
) -> None:
    """Break everything that can break under a run of three sites, and check that nothing came of it.

    Kills (-9) and restarts coordinator, Redis, agents and ranks; cuts and slows links; loses, duplicates, reorders,
    truncates and corrupts requests and answers. The run must succeed by itself, with equal digests at all sites and in
    a replay of its log, every accepted contribution listed, and no step applied twice. Equal seeds break the same.
    """
    stamina.instrumentation.set_on_retry_hooks([])  # that the coordinator is away is no news here
    started = time.monotonic()
    parent = Path(tempfile.mkdtemp(prefix="isthmus-chaos-")) if keep is None else keep.absolute()
    for number in range(seed, seed + seeds):
        if (there := parent / f"seed-{number}").exists():
            raise typer.BadParameter(
                f"{there} is there already: remove it, or name another folder", param_hint="--keep"
            )
    outcomes = []
    for number in range(seed, seed + seeds):
        outcome = _drilled(number, faults, parent / f"seed-{number}")
        outcomes.append(outcome)
        if outcome.wrong:
            progress.print(_failure(outcome, faults, parent), style="red", soft_wrap=True, markup=False)
        else:
            shutil.rmtree(parent / f"seed-{number}")
    if keep is None and not any(outcome.wrong for outcome in outcomes):
        parent.rmdir()
    report = _report(outcomes, time.monotonic() - started)
    sys.stdout.write(json.dumps(report, indent=2) + "\n" if as_json else _text(report))
    if any(outcome.wrong for outcome in outcomes):
        raise SystemExit(1)


def _drilled(number: int, faults: int, folder: Path) -> Outcome:
    started = time.monotonic()

    def tell(text: str) -> None:
        progress.print(f"seed {number} {time.monotonic() - started:5.1f} s  {text}", highlight=False, soft_wrap=True)

    tell("starting")
    return drill(plan(number, faults), folder, tell)


def _failure(outcome: Outcome, faults: int, parent: Path) -> str:
    again = f"isthmus chaos --seed {outcome.seed} --seeds 1 --faults {faults}"
    wrong = "\n  ".join(outcome.wrong)
    return f"seed {outcome.seed} failed:\n  {wrong}\nlogs: {parent / f'seed-{outcome.seed}'}\nagain: {again}"


def _report(outcomes: list[Outcome], wall_s: float) -> dict[str, Any]:
    return {
        "seeds": len(outcomes),
        "faults": sum(outcome.faults for outcome in outcomes),
        "succeeded": sum(outcome.succeeded for outcome in outcomes),
        "digests_equal": all(outcome.digests_equal for outcome in outcomes),
        "replay_equal": all(outcome.replay_equal for outcome in outcomes),
        "lost_contributions": sum(outcome.lost_contributions for outcome in outcomes),
        "wall_s": round(wall_s, 1),
        "runs": [asdict(outcome) for outcome in outcomes],
    }


def _text(report: dict[str, Any]) -> str:
    yes = {True: "yes", False: "NO"}
    return (
        f"{report['succeeded']} of {report['seeds']} runs succeeded under {report['faults']} faults; "
        f"digests equal: {yes[report['digests_equal']]}; replay equal: {yes[report['replay_equal']]}; "
        f"lost contributions: {report['lost_contributions']}; {report['wall_s']} s\n"
    )


app = typer.Typer(add_completion=False)
app.command()(chaos)

if __name__ == "__main__":
    app(prog_name="isthmus chaos")
