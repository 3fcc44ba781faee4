"""`isthmus simulate`: what a user would do by hand at several places, done on one machine with the same programs."""

import contextlib
import json
import shutil
import string
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

import api
from api.client import CoordinatorClient
from api.errors import IsthmusError
from api.export import export_model, file_digest
from api.output_file import make_directory, require_writable
from api.processes import Service
from api.report import build_report, print_report, print_warnings, why
from api.schemas import SiteStatus
from api.specs import OptimizerSpec, OuterSpec, RunSpec
from api.watch import watch

__all__ = ["Check", "Simulation", "agents", "services", "simulate", "spec_of", "wait_for_sites"]

_TASK = "tiny_lm"
_CHECKOUT = Path(api.__path__[0]).parent
_QUIET = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


@dataclass(frozen=True)
class Simulation:
    """What to simulate: a run, and on which sites."""

    spec: RunSpec
    regions: Mapping[str, str]
    """By site."""
    ranks: int = 1
    module: str = f"examples.{_TASK}.train"
    """What the sites run."""

    @classmethod
    def of(cls, spec: RunSpec, ranks: int = 1) -> "Simulation":
        """On the sites that the spec names, or on three.

        Their regions are the spec's; else one, or, with outer steps, about two thirds are in west, the rest in east.
        """
        if spec.task != _TASK:
            raise IsthmusError(f"isthmus simulate trains the task {_TASK}; this spec names the task {spec.task}")
        if spec.regions is not None:
            return cls(spec, {site: region for region, sites in spec.regions.items() for site in sites}, ranks)
        sites = spec.sites or list(string.ascii_lowercase[:3])
        west = -(-2 * len(sites) // 3) if spec.outer is not None else len(sites)
        regions = {site: "west" if number < west else "east" for number, site in enumerate(sites)}
        return cls(spec.model_copy(update={"sites": sites}), regions, ranks)


def spec_of(
    *, sites: int, steps: int, outer_every: int, fragments: int, lr: float, k: int, data: Path | None
) -> RunSpec:
    """The run that is simulated by default. Raises ValueError if it makes no sense."""
    every = min(outer_every, steps)
    return RunSpec(
        name="simulation",
        task=_TASK,
        params={"data": str(data.absolute())} if data else {},
        steps=steps,
        sites=list(string.ascii_lowercase[:sites]),
        optimizer=OptimizerSpec(lr=lr, k=k),
        outer=OuterSpec(every=every, fragments=fragments) if every else None,
        evaluate_every=max(steps // 10, 1),
    )


Check = Callable[[], None]


def simulate(
    simulation: Simulation, *, out: Path | None, report_file: Path | None, directory: Path | None, console: Console
) -> None:
    """Trains, reports, and writes the trained model to `out`.

    Everything that it starts is gone when it returns or raises. `directory` keeps blobs and logs; by default a
    temporary one, removed unless something went wrong.

    Raises:
        IsthmusError: a process died, or the run did not succeed with the same digest at all sites and in the file; or,
            before anything starts, `out` or `report_file` cannot be written.
    """
    if not (_CHECKOUT / "examples" / _TASK).is_dir():
        raise IsthmusError("isthmus simulate trains examples/tiny_lm: run it from a clone of the repository")
    for path in filter(None, (out, report_file)):
        require_writable(path)
    with _directory(directory) as folder, services(simulation, folder) as (client, check):
        run = client.create_run(simulation.spec)
        wait_for_sites(client, list(simulation.regions), check)
        started = client.start_run(run.id)
        if simulation.spec.regions is not None:
            print_warnings(started, console)
        observer = (folder / "observer-token").read_text().strip()
        console.print(f"watch it at {client.url}/#/runs/{run.id}?token={observer}", soft_wrap=True, highlight=False)
        run = watch(client, run.id, console, check)
        report = build_report(client, run)
        if run.status != "succeeded":
            console.print(f"run {run.status}: {why(run)}", style="bold red", soft_wrap=True, markup=False)
        elif out is not None:
            export_model(client, run.id, out)
            report["model_digest"] = file_digest(out)
            same = report["model_digest"] == run.members[0].digest
            report["digests_equal"] = report["digests_equal"] is True and same
        print_report(report, console)
        if report_file is not None:
            report_file.write_text(json.dumps(report, indent=2) + "\n")
        if report["status"] != "succeeded":
            raise IsthmusError(f"the run {report['status']}; the logs are in {folder}")
        if not report["digests_equal"]:
            raise IsthmusError(f"the parameters differ between the sites, or from {out}; the logs are in {folder}")


@contextlib.contextmanager
def _directory(directory: Path | None) -> Iterator[Path]:
    if directory is not None:
        make_directory(directory)
        yield directory.absolute()
        return
    folder = Path(tempfile.mkdtemp(prefix="isthmus-"))
    try:
        yield folder
    except IsthmusError:
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder)


@contextlib.contextmanager
def services(simulation: Simulation, folder: Path) -> Iterator[tuple[CoordinatorClient, Check]]:
    """The coordinator with its Redis, and one agent per site; all gone at the end."""
    (folder / "url").unlink(missing_ok=True)  # of an earlier simulation in this directory
    options = ["--port", "0", "--data-dir", str(folder)]
    coordinator = Service("coordinator", options, folder / "coordinator.log", _CHECKOUT, _QUIET)
    try:
        url = coordinator.wait_for_file(folder / "url")
        with agents(simulation, url, folder) as check_agents, _admin(url, folder) as client:

            def check() -> None:
                coordinator.check()
                check_agents()

            yield client, check
    finally:
        coordinator.interrupt()
        coordinator.join()


def _admin(url: str, folder: Path) -> CoordinatorClient:
    return CoordinatorClient(url, (folder / "admin-token").read_text().strip())


@contextlib.contextmanager
def agents(simulation: Simulation, url: str, folder: Path) -> Iterator[Check]:
    """One agent per site, gone at the end; `folder` is the coordinator's data directory, where they keep theirs."""
    started: list[Service] = []

    def check() -> None:
        for service in started:
            service.check()

    try:
        for name, region in simulation.regions.items():
            started.append(_agent(name, region, simulation, url, folder))
        yield check
    finally:
        for service in reversed(started):
            service.interrupt()
        for service in reversed(started):
            service.join()


def _agent(name: str, region: str, simulation: Simulation, url: str, folder: Path) -> Service:
    options = {
        "--name": name,
        "--region": region,
        "--coordinator": url,
        "--join-token-file": str(folder / "join-token"),
        "--site-dir": str(folder / f"site-{name}"),
        "--ranks": str(simulation.ranks),
        "--task": f"{simulation.spec.task}=python -m {simulation.module}",
    }
    arguments = [word for option in options.items() for word in option]
    return Service("site_agent", arguments, folder / f"site-{name}.log", _CHECKOUT, _QUIET)


def wait_for_sites(client: CoordinatorClient, names: list[str], check: Check) -> None:
    while True:
        check()
        online = {site.name for site in client.sites() if site.status is SiteStatus.ONLINE}
        if online >= set(names):
            return
        time.sleep(0.1)
