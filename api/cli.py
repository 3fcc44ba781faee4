"""The `isthmus` command: starts coordinator and agents as programs; everything else goes through the REST API."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from api.access_cli import audit, token_app
from api.client import CoordinatorClient
from api.command import obey
from api.connection import Connection
from api.errors import IsthmusError, ProblemError, faults_of
from api.export import export_model
from api.report import build_report, print_report, print_table, print_warnings, run_table, why
from api.schemas import Run
from api.simulate import Simulation, spec_of
from api.simulate import simulate as run_simulation
from api.snapshot_cli import begin_with, list_snapshots, snapshot
from api.specs import Change, RunSpec
from api.watch import watch as watch_run

__all__ = ["main"]

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Train one model across several sites.")
run_app = typer.Typer(no_args_is_help=True, help="Create, start, follow and stop runs.")
site_app = typer.Typer(no_args_is_help=True, help="The sites that have registered.")
app.add_typer(run_app, name="run")
app.add_typer(site_app, name="site")
app.add_typer(token_app, name="token")
app.command()(audit)
run_app.command("snapshot")(snapshot)
run_app.command("snapshots")(list_snapshots)
out = Console()
err = Console(stderr=True)

_WATCH_PATIENCE_S = 600.0
"""Whoever watches a run outlasts a restart of its coordinator."""

AsJson = Annotated[bool, typer.Option("--json", help="print JSON instead of text")]


def main() -> None:
    obey(app)


# --- programs ---------------------------------------------------------------------------------------------------------

_PASS_ON = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


@app.command(context_settings=_PASS_ON, help="Run a coordinator; `isthmus coordinator --help` lists the settings.")
def coordinator(context: typer.Context) -> None:
    _become("coordinator", context.args)


@app.command(context_settings=_PASS_ON, help="Run a site's agent; `isthmus agent --help` lists the settings.")
def agent(context: typer.Context) -> None:
    _become("site_agent", context.args)


@app.command(context_settings=_PASS_ON, help="Measure Isthmus here; `isthmus bench --help` lists what of it.")
def bench(context: typer.Context) -> None:
    _become("site_agent.bench", context.args)


@app.command(
    context_settings=_PASS_ON, help="Rebuild a run from its log and compare; `isthmus replay --help` says more."
)
def replay(context: typer.Context) -> None:
    _become("site_agent.replay", context.args)


@app.command(context_settings=_PASS_ON, help="Break what can break under a run; `isthmus chaos --help` says more.")
def chaos(context: typer.Context) -> None:
    _become("site_agent.chaos", context.args)


def _become(module: str, arguments: list[str]) -> NoReturn:
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


# --- simulate ---------------------------------------------------------------------------------------------------------


_ONE_SPEC = ("steps", "outer_every", "sites", "fragments", "lr", "k", "data")
"""Options of `isthmus simulate` that say what `--spec` says."""


@app.command()
def simulate(
    context: typer.Context,
    spec: Annotated[Path | None, typer.Option(help="simulate this run spec instead of varying the default")] = None,
    steps: Annotated[int, typer.Option(help="inner steps", min=1)] = 200,
    outer_every: Annotated[int, typer.Option(help="steps between outer steps; 0: none, and one region", min=0)] = 50,
    sites: Annotated[int, typer.Option(help="how many; about two thirds in west, the rest in east", min=1, max=26)] = 3,
    ranks: Annotated[int, typer.Option(help="training processes per site", min=1, max=64)] = 1,
    fragments: Annotated[int, typer.Option(help="parts of the parameters that outer-step one by one", min=1)] = 2,
    lr: Annotated[float, typer.Option(help="peak learning rate")] = 1e-3,
    k: Annotated[int, typer.Option(help="coefficients sent per chunk of 64 x 64", min=1)] = 32,
    data: Annotated[Path | None, typer.Option(help="train on this text file or folder", exists=True)] = None,
    out_: Annotated[Path | None, typer.Option("--out", help="write the trained model, as safetensors")] = None,
    report: Annotated[Path | None, typer.Option("--json", help="write the report, as JSON")] = None,
    directory: Annotated[Path | None, typer.Option(help="keep all data and logs here")] = None,
) -> None:
    """Train a small language model across several sites on this machine, with everything real but the distance."""
    if spec is None:
        run_spec = spec_of(
            sites=sites, steps=steps, outer_every=outer_every, fragments=fragments, lr=lr, k=k, data=data
        )
    else:
        _require_alone(context, spec)
        run_spec = _spec(spec)
    run_simulation(Simulation.of(run_spec, ranks), out=out_, report_file=report, directory=directory, console=out)


def _require_alone(context: typer.Context, spec: Path) -> None:
    given = [name for name in _ONE_SPEC if (source := context.get_parameter_source(name)) and source.name != "DEFAULT"]
    if given:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise IsthmusError(f"--spec says it all: leave out {options}, or change {spec}")


# --- runs -------------------------------------------------------------------------------------------------------------


def _spec(path: Path) -> RunSpec:
    try:
        return RunSpec.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise IsthmusError(f"cannot read the run spec {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise IsthmusError(f"run spec {path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except ValidationError as error:
        raise IsthmusError(f"run spec {path}: {'; '.join(faults_of(error.errors()))}") from None


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def _print_run(run: Run, as_json: bool) -> None:
    if as_json:
        _print_json(run.model_dump(mode="json"))
        return
    out.print(f"{run.id}: {run.status}, step {run.step} of {run.spec.steps}; {why(run)}", soft_wrap=True, markup=False)
    for change in run.changes:
        settings = ", ".join(f"{name} {value}" for name, value in change.settings().items())
        out.print(f"from step {change.from_step} on: {settings}", soft_wrap=True, markup=False)
    for alarm in run.alarms:
        out.print(f"alarm: {alarm}", style="yellow", soft_wrap=True, markup=False)


@run_app.command("create")
def create_run(spec: Path, as_json: AsJson = False) -> None:
    """Create a run from a JSON file; it waits until it is started."""
    with Connection().client() as client:
        _print_run(client.create_run(_spec(spec)), as_json)


@run_app.command("start")
def start_run(
    run: Annotated[str, typer.Argument(help="a run's id, or a JSON file that describes a new run")],
    begin: Annotated[
        str | None, typer.Option("--from", help="RUN/N, a snapshot, or a safetensors file that a new run begins with")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="follow it to its end; fail unless it succeeds")] = False,
    as_json: AsJson = False,
) -> None:
    """Start a run: one that exists, or a new one from a file."""
    if run.endswith(".json") and not Path(run).is_file():
        raise IsthmusError(f"there is no file {run}")
    if "/" in run and not Path(run).is_file():
        raise IsthmusError(f"there is no file and no run {run}: `isthmus run list` shows the runs")
    spec = _spec(Path(run)) if Path(run).is_file() else None
    if spec is None and begin is not None:
        raise IsthmusError(f"--from is for new runs: give a JSON file that describes one instead of {run}")
    with Connection().client(_WATCH_PATIENCE_S if watch else 10.0) as client:
        if spec is not None and begin is not None:
            spec = spec.model_copy(update={"begin": begin_with(client, begin)})
        started = client.start_run(run) if spec is None else _create_and_start(client, spec)
        print_warnings(started, err)
        if watch:
            if not as_json:
                _print_run(started, as_json=False)
            _watch(client, started.id, as_json)
        else:
            _print_run(started, as_json)


def _create_and_start(client: CoordinatorClient, spec: RunSpec) -> Run:
    """Leaves no run behind if it cannot be started."""
    created = client.create_run(spec)
    try:
        return client.start_run(created.id)
    except ProblemError:
        client.delete_run(created.id)
        raise


@run_app.command("watch")
def watch(run: str, as_json: AsJson = False) -> None:
    """Follow a run to its end, and report; fails unless it succeeds."""
    with Connection().client(_WATCH_PATIENCE_S) as client:
        _watch(client, run, as_json)


def _watch(client: CoordinatorClient, run_id: str, as_json: bool) -> None:
    run = watch_run(client, run_id, err if as_json else out)
    report = build_report(client, run)
    if as_json:
        _print_json(report)
    else:
        print_report(report, out)
    if run.status != "succeeded":
        raise IsthmusError(f"run {run.id} {run.status}: {why(run)}")


@run_app.command("list")
def list_runs(as_json: AsJson = False) -> None:
    """All runs, newest first."""
    with Connection().client() as client:
        runs = client.runs()
    if as_json:
        _print_json([run.model_dump(mode="json") for run in runs])
        return
    print_table(run_table(runs), out)


@run_app.command("show")
def show_run(run: str, as_json: AsJson = False) -> None:
    """One run: its state, and the report so far."""
    with Connection().client() as client:
        found = client.run(run)
        report = build_report(client, found)
    if as_json:
        _print_json(found.model_dump(mode="json") | {"report": report})
        return
    _print_run(found, as_json)
    _print_members(found)
    print_report(report, out)


def _print_members(run: Run) -> None:
    table = Table("site", "region", "condition", "since", "attempt", "version", "reason")
    for member in run.members:
        since, reason = f"{member.since:%Y-%m-%d %H:%M:%S} UTC", member.reason.partition("\n")[0]
        table.add_row(
            member.site,
            member.region,
            str(member.condition),
            since,
            str(member.attempt),
            *map(escape, (member.version, reason)),
        )
    print_table(table, out)


@run_app.command("stop")
def stop_run(run: str, as_json: AsJson = False) -> None:
    """Stop a run; its sites end their processes."""
    with Connection().client() as client:
        _print_run(client.stop_run(run), as_json)


@run_app.command("pause")
def pause_run(run: str, as_json: AsJson = False) -> None:
    """Pause a run: the open round ends, no other begins; its sites keep their processes and wait."""
    with Connection().client() as client:
        _print_run(client.pause_run(run), as_json)


@run_app.command("resume")
def resume_run(run: str, as_json: AsJson = False) -> None:
    """Go on with a paused run."""
    with Connection().client() as client:
        _print_run(client.resume_run(run), as_json)


@run_app.command("change")
def change_run(
    run: str,
    from_step: Annotated[int, typer.Option(help="the first step with the new settings; no region has opened it yet")],
    lr: Annotated[float | None, typer.Option(help="peak learning rate; the schedule goes on with it")] = None,
    k: Annotated[int | None, typer.Option(help="coefficients sent per chunk")] = None,
    every: Annotated[int | None, typer.Option(help="steps between outer steps")] = None,
    as_json: AsJson = False,
) -> None:
    """Change settings of a run that goes on, from a step on: for all sites, and in the log."""
    try:
        change = Change(from_step=from_step, lr=lr, k=k, every=every)
    except ValidationError as error:
        raise IsthmusError("; ".join(faults_of(error.errors()))) from None
    with Connection().client() as client:
        _print_run(client.change_run(run, change), as_json)


@run_app.command("add-site")
def add_site(run: str, site: str, as_json: AsJson = False) -> None:
    """Add a site to a run that goes on, or take one back that was excluded.

    With outer steps in the run's spec the site may be in a region that the run does not have yet: that begins at the
    newest anchors.
    """
    with Connection().client() as client:
        before = {region.name for region in client.run(run).regions}
        added = client.add_site(run, site)
    for new in (region.name for region in added.regions if region.name not in before):
        err.print(
            f"isthmus: region {new} is new in run {run}, with site {site} alone; if that is a slip, start its agent "
            f"with another --region, then `isthmus run remove-site {run} {site}` and `isthmus run add-site {run} "
            f"{site}`",
            style="yellow",
            markup=False,
            soft_wrap=True,
        )
    _print_run(added, as_json)


@run_app.command("remove-site")
def exclude_site(run: str, site: str, as_json: AsJson = False) -> None:
    """Exclude a site from a run, which goes on without it: not the last one of a region that the run began with."""
    with Connection().client() as client:
        _print_run(client.exclude_site(run, site), as_json)


@run_app.command("delete")
def delete_run(run: str) -> None:
    """Delete a run that has ended, with its log."""
    with Connection().client() as client:
        client.delete_run(run)


@run_app.command("export")
def export_run(
    run: str,
    path: Annotated[Path, typer.Option("--out", help="file to write")],
    snapshot: Annotated[int | None, typer.Option(help="its number; default: the trained model")] = None,
) -> None:
    """Write the trained model of a run, or a snapshot of it, as safetensors: its parameters and its buffers."""
    with Connection().client() as client:
        digest = export_model(client, run, path, snapshot)
    out.print(f"{path}: parameters {digest}", soft_wrap=True)


# --- sites ------------------------------------------------------------------------------------------------------------


@site_app.command("list")
def list_sites(as_json: AsJson = False) -> None:
    """All sites."""
    with Connection().client() as client:
        sites = client.sites()
    if as_json:
        _print_json([site.model_dump(mode="json") for site in sites])
        return
    table = Table("site", "region", "status", "ranks", "tasks")
    for site in sites:
        table.add_row(site.name, site.region, str(site.status), str(site.ranks), ", ".join(site.tasks))
    print_table(table, out)


@site_app.command("remove")
def remove_site(name: str) -> None:
    """Remove a site that no active run needs; its name is free again."""
    with Connection().client() as client:
        client.remove_site(name)
