"""The processes of the sites: started once, since each loads torch, and given one case after the other."""

import contextlib
from collections.abc import Iterator, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, cast

from algorithms.traffic import parameters_bytes
from api.client import CoordinatorClient
from api.errors import IsthmusError
from api.specs import RunSpec
from site_agent.bench.rounds.cases import OPTIMIZER, Case, layout_of
from site_agent.bench.rounds.host import Host
from site_agent.bench.rounds.site import TASK, Measured, Place, Way, name_of, registration, secret_of, work

__all__ = ["Sites", "sites"]

_STEPS = 1_000_000


class Sites:
    def __init__(self) -> None:
        self._processes: list[SpawnProcess] = []
        self._pipes: list[Connection] = []

    def join(self, case: Case, host: Host, relay_port: int, rendezvous: Path) -> None:
        """A new run of the first sites, which have all joined it."""
        while len(self._pipes) < case.sites:
            self._start()
        names = [name_of(number) for number in range(case.sites)]
        with host.admin() as admin, CoordinatorClient(host.url, host.token("join")) as registrar:
            run = admin.create_run(RunSpec(name="bench", task=TASK, steps=_STEPS, sites=names, optimizer=OPTIMIZER)).id
            for number, name in enumerate(names):
                registrar.register_site(name, registration(secret_of("agent", run, number)))
            admin.start_run(run)
        parameters = host.pretend_blob(parameters_bytes(layout_of(case.payload)))
        self._ask(
            "join",
            [
                Place(number, case.sites, case.payload, host.url, run, parameters, relay_port, rendezvous)
                for number in range(case.sites)
            ],
        )

    def measure(self, case: Case, ways: list[Way], rounds: int) -> list[Measured]:
        return self._ask("measure", [(ways, rounds)] * case.sites)

    def _start(self) -> None:
        context = get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        self._processes.append(process)
        self._pipes.append(ours)

    def _ask(self, command: str, arguments: Sequence[Any]) -> list[Any]:
        """One argument, and one answer, per site."""
        asked = self._pipes[: len(arguments)]
        for pipe, argument in zip(asked, arguments, strict=True):
            pipe.send((command, argument))
        answers: dict[Connection, Any] = {}
        while len(answers) < len(asked):
            waiting: list[Any] = [pipe for pipe in asked if pipe not in answers]
            for pipe in cast("list[Connection]", wait(waiting)):
                try:
                    answers[pipe] = pipe.recv()
                except EOFError:
                    raise IsthmusError("a site of the bench has ended; its error is above") from None
        return [answers[pipe] for pipe in asked]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.terminate()
            process.join()


@contextlib.contextmanager
def sites() -> Iterator[Sites]:
    """They are gone afterwards, whatever happens."""
    found = Sites()
    try:
        yield found
    finally:
        found.close()
