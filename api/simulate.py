"""`isthmus simulate`: what a user would do by hand at several places, done on one machine with the same programs."""

import contextlib
import json
import shutil
import string
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pydantic import BaseModel, Field
from rich.console import Console

import api
from api.client import CoordinatorClient
from api.errors import IsthmusError
from api.export import export_model, file_digest
from api.processes import Service
from api.report import build_report, print_report
from api.schemas import OptimizerSpec, OuterSpec, RunSpec, SiteStatus
from api.watch import watch

__all__ = ["Simulation", "services", "simulate", "wait_for_sites"]

_TASK = "tiny_lm"
_CHECKOUT = Path(api.__path__[0]).parent
_QUIET = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


class Simulation(BaseModel):
    """What to simulate."""

    sites: int = Field(ge=1, le=26)
    ranks: int = Field(ge=1, le=64)
    steps: int
    outer_every: int = Field(ge=0, description="0: no outer step, and one region only")
    fragments: int
    lr: float
    k: int
    data: Path | None

    def regions(self) -> dict[str, str]:
        """Region by site: about two thirds in west, the rest in east."""
        names = string.ascii_lowercase[: self.sites]
        west = self.sites if self.outer_every == 0 else -(-2 * self.sites // 3)
        return {name: "west" if number < west else "east" for number, name in enumerate(names)}

    def spec(self) -> RunSpec:
        """Raises ValueError if it makes no sense."""
        every = min(self.outer_every, self.steps)
        outer = OuterSpec(every=every, fragments=self.fragments) if every else None
        return RunSpec(
            name="simulation",
            task=_TASK,
            params={"data": str(self.data.absolute())} if self.data else {},
            steps=self.steps,
            sites=list(self.regions()),
            optimizer=OptimizerSpec(lr=self.lr, k=self.k),
            outer=outer,
            evaluate_every=max(self.steps // 10, 1),
        )


Check = Callable[[], None]


def simulate(
    simulation: Simulation, *, out: Path | None, report_file: Path | None, directory: Path | None, console: Console
) -> None:
    """Trains, reports, and writes the trained model to `out`.

    Everything that it starts is gone when it returns or raises. `directory` keeps blobs and logs; by default a
    temporary one, removed unless something went wrong.

    Raises:
        IsthmusError: a process died, or the run did not succeed with the same digest at all sites and in the file.
    """
    spec = simulation.spec()
    if not (_CHECKOUT / "examples" / _TASK).is_dir():
        raise IsthmusError("isthmus simulate trains examples/tiny_lm: run it from a clone of the repository")
    with _directory(directory) as folder, services(simulation, folder) as (client, check):
        run = client.create_run(spec)
        wait_for_sites(client, list(simulation.regions()), check)
        client.start_run(run.id)
        observer = (folder / "observer-token").read_text().strip()
        console.print(f"watch it at {client.url}/#/runs/{run.id}?token={observer}", soft_wrap=True, highlight=False)
        run = watch(client, run.id, console, check)
        report = build_report(client, run)
        if run.status != "succeeded":
            console.print(f"run {run.status}: {run.reason}", style="bold red", soft_wrap=True, markup=False)
        elif out is not None:
            export_model(client, run.id, out)
            report["model_digest"] = file_digest(out)
            report["digests_equal"] &= report["model_digest"] == run.members[0].digest
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
        directory.mkdir(parents=True, exist_ok=True)
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
    services: list[Service] = []

    def check() -> None:
        for service in services:
            service.check()

    try:
        (folder / "url").unlink(missing_ok=True)  # of an earlier simulation in this directory
        options = ["--port", "0", "--data-dir", str(folder)]
        coordinator = Service("coordinator", options, folder / "coordinator.log", _CHECKOUT, _QUIET)
        services.append(coordinator)
        url = coordinator.wait_for_file(folder / "url")
        for name, region in simulation.regions().items():
            services.append(_agent(name, region, simulation.ranks, url, folder))
        with CoordinatorClient(url, (folder / "admin-token").read_text().strip()) as client:
            yield client, check
    finally:
        for service in reversed(services[1:]):
            service.interrupt()
        for service in reversed(services[1:]):
            service.join()
        for service in services[:1]:
            service.interrupt()
            service.join()


def _agent(name: str, region: str, ranks: int, url: str, folder: Path) -> Service:
    options = {
        "--name": name,
        "--region": region,
        "--coordinator": url,
        "--join-token-file": str(folder / "join-token"),
        "--site-dir": str(folder / f"site-{name}"),
        "--ranks": str(ranks),
        "--task": f"{_TASK}=python -m examples.{_TASK}.train",
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
