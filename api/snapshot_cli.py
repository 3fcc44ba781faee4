"""`isthmus run snapshot`, `isthmus run snapshots`, and what `isthmus run start --from` takes."""

import sys
import time
from functools import partial
from pathlib import Path
from typing import Annotated, BinaryIO

import typer
from rich.console import Console
from rich.table import Table

from algorithms.tensor_file import read_header
from api.client import CoordinatorClient
from api.connection import Connection
from api.errors import IsthmusError
from api.report import print_table
from api.schemas import RunStatus, Snapshot
from api.specs import BeginSpec

__all__ = ["begin_with", "list_snapshots", "snapshot"]

out = Console()
err = Console(stderr=True)

_PATIENCE_S = 600.0
_POLL_S = 0.5
_LONGEST_NAME = 1000

AsJson = Annotated[bool, typer.Option("--json", help="print JSON instead of text")]


def snapshot(run: str, as_json: AsJson = False) -> None:
    """Make a snapshot of a run, and wait for it: after the next step, or right behind the next outer round.

    A run keeps its newest snapshots, as many as its spec says in `snapshots.keep`, these among them: `isthmus run
    export RUN --snapshot N --out FILE` writes one that is to stay.
    """
    with Connection().client(_PATIENCE_S) as client:
        number = client.request_snapshot(run).wanted
        if number is None:
            raise IsthmusError(f"run {run} makes no snapshot")
        found = client.run(run)
        keep = found.spec.snapshots.keep
        if found.status is RunStatus.PAUSED:
            said = f"run {run} is paused: the snapshot is made once it goes on, `isthmus run resume {run}`"
            err.print(said, soft_wrap=True, markup=False)
        with err.status(f"waiting for snapshot {number} of {run}"):
            made = _waited_for(client, run, number)
    if as_json:
        sys.stdout.write(made.model_dump_json(indent=2) + "\n")
    else:
        said = f"snapshot {made.number} of {run}, after step {made.step}; it goes once there are {keep} newer ones"
        out.print(said, soft_wrap=True, markup=False)


def _waited_for(client: CoordinatorClient, run: str, number: int) -> Snapshot:
    while True:
        found = client.run(run)
        for made in client.snapshots(run).items:
            if made.number == number:
                return made
        if found.status.terminal:
            raise IsthmusError(f"run {run} {found.status} without snapshot {number}: {found.reason}")
        time.sleep(_POLL_S)


def list_snapshots(run: str, as_json: AsJson = False) -> None:
    """The snapshots of a run that are kept, oldest first."""
    with Connection().client() as client:
        page = client.snapshots(run)
    if as_json:
        sys.stdout.write(page.model_dump_json(indent=2) + "\n")
        return
    table = Table("snapshot", "step", "manifest")
    for made in page.items:
        table.add_row(f"{run}/{made.number}", str(made.step), made.manifest)
    print_table(table, out)
    if page.wanted is not None:
        out.print(f"snapshot {page.wanted} is being made", soft_wrap=True)


def begin_with(client: CoordinatorClient, words: str) -> BeginSpec:
    """Of RUN/N, or of a file, which is uploaded if it is one of safetensors."""
    path = Path(words)
    if path.is_file():
        _require_tensors(path)
        return BeginSpec(file=client.put_blob(path), called=words[-_LONGEST_NAME:])
    run, _, number = words.rpartition("/")
    if words.endswith(".safetensors") or not run or not number.isdecimal():
        raise IsthmusError(f"--from {words}: there is no such file, and it is no snapshot, which is RUN/NUMBER")
    return BeginSpec(run=run, snapshot=int(number))


def _require_tensors(path: Path) -> None:
    try:
        with path.open("rb") as file:
            read_header(partial(_read, file), path.stat().st_size)
    except OSError as error:
        raise IsthmusError(f"--from {path}: cannot read it: {error.strerror}") from None
    except ValueError as error:
        raise IsthmusError(f"--from {path}: {error}") from None


def _read(file: BinaryIO, start: int, stop: int) -> bytes:
    file.seek(start)
    return file.read(stop - start)
