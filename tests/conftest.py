"""Real things for tests to run against: a coordinator process with its own Redis, and a run of three sites."""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from api.client import CoordinatorClient
from api.processes import Service
from api.schemas import Run
from api.simulate import Simulation, services, spec_of, wait_for_sites

ROOT = Path(__file__).parents[1]
PATIENCE_S = 120.0

# of torch, here and in all processes of tests: several on a small machine would wait for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")

# machines are noisy: no test is about time; `pytest --hypothesis-profile=default` searches longer
hypothesis.settings.register_profile("isthmus", deadline=None, max_examples=25)
# the same examples every time: what is refused for a change was broken by it
hypothesis.settings.register_profile("ci", hypothesis.settings.get_profile("isthmus"), derandomize=True, database=None)
hypothesis.settings.load_profile("isthmus")


def wait_until(condition: Callable[[], Any], what: str, seconds: float = PATIENCE_S) -> Any:
    """What `condition` returns once it is true; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.02)
    return value


@dataclass
class LiveCoordinator:
    """`python -m coordinator` with its embedded Redis, in a directory of its own."""

    directory: Path
    service: Service
    url: str
    ca_file: Path | None = None

    def token(self, scope: str) -> str:
        return (self.directory / f"{scope}-token").read_text().strip()

    def client(self, scope: str = "admin") -> CoordinatorClient:
        return CoordinatorClient(self.url, self.token(scope), ca_file=self.ca_file, patience=10.0)


def start_coordinator(directory: Path, *options: str) -> LiveCoordinator:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "url").unlink(missing_ok=True)
    arguments = ["--port", "0", "--data-dir", str(directory), *options]
    service = Service("coordinator", arguments, directory / "coordinator.log", ROOT, {})
    return LiveCoordinator(directory, service, service.wait_for_file(directory / "url"))


@pytest.fixture
def new_coordinator(tmp_path: Path) -> Iterator[Callable[..., LiveCoordinator]]:
    """Starts coordinators that are gone after the test."""
    started: list[LiveCoordinator] = []

    def start(*options: str, name: str = "coordinator") -> LiveCoordinator:
        started.append(start_coordinator(tmp_path / name, *options))
        return started[-1]

    yield start
    for coordinator in started:
        coordinator.service.interrupt()
        coordinator.service.join()


@pytest.fixture(scope="session")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCoordinator]:
    """One coordinator for all tests that do not need it to themselves: use names of sites and runs of your own."""
    live = start_coordinator(tmp_path_factory.mktemp("shared"))
    yield live
    live.service.interrupt()
    live.service.join()


@dataclass
class FinishedRun:
    """A run of three sites in two regions, its coordinator still up."""

    url: str
    directory: Path
    run: Run

    @property
    def run_id(self) -> str:
        return self.run.id

    @property
    def observer_token(self) -> str:
        return (self.directory / "observer-token").read_text().strip()

    def client(self) -> CoordinatorClient:
        return CoordinatorClient(self.url, (self.directory / "admin-token").read_text().strip())


SIMULATION = Simulation.of(spec_of(sites=3, steps=12, outer_every=5, fragments=3, lr=1e-3, k=32, data=None))


def run_to_its_end(client: CoordinatorClient, run_id: str, check: Callable[[], None]) -> Run:
    def ended() -> Run | None:
        check()
        run = client.run(run_id)
        return run if run.status.terminal else None

    return wait_until(ended, f"the end of {run_id}", seconds=240)


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FinishedRun]:
    """Trains tiny_lm for 12 steps with outer rounds after 5, 10 and 12, through everything real."""
    folder = tmp_path_factory.mktemp("run")
    with services(SIMULATION, folder) as (client, check):
        run = client.create_run(SIMULATION.spec)
        wait_for_sites(client, list(SIMULATION.regions), check)
        client.start_run(run.id)
        yield FinishedRun(client.url, folder, run_to_its_end(client, run.id, check))
