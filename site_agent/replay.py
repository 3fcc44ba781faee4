"""`isthmus replay`: rebuilds what a run came to from its log, and compares it with what its sites have reported."""

import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from api.client import CoordinatorClient
from api.command import obey
from api.connection import Connection
from api.errors import IsthmusError
from api.export import manifest_of
from api.schemas import Manifest, Run
from site_agent.rebuild import Rebuilt, rebuild

__all__ = ["compared", "main"]

Report = dict[str, Any]

_NOTHING_COMPARED = 3
_PATIENCE_S = 600.0
"""A replay outlasts a restart of the coordinator."""

app = typer.Typer(add_completion=False)
out = Console()
err = Console(stderr=True)


def main() -> None:
    obey(lambda: app(prog_name="isthmus replay"))


@app.command()
def replay(
    run: Annotated[str, typer.Argument(help="a run's id")],
    snapshot: Annotated[
        int | None,
        typer.Option("--from", min=1, metavar="N", help="begin at snapshot N of the run; default: at entry 0"),
    ] = None,
    to: Annotated[int | None, typer.Option("--to", min=0, help="stop after this step; compares no digests")] = None,
    region: Annotated[str | None, typer.Option(help="only this one; default: all")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON instead of text")] = False,
) -> None:
    """Rebuild a run's parameters from its log, and compare them with the digests that its sites have reported.

    Where the log was trimmed, the replay begins at the last outer step or snapshot before what is left. `isthmus run
    snapshots` lists what --from takes.

    Needs no site, an observer's token suffices. Checks on the way the hash chain, the digests of all arrays and blobs,
    and, before every outer step, the copies that the sites announced.

    Exit status: 0 equal, 1 different or damaged, 3 nothing to compare with: the run goes on, or --to was given.
    """
    with Connection().client(_PATIENCE_S) as client:
        found = client.run(run)
        manifest = None if snapshot is None else manifest_of(client, run, snapshot)
        regions = [_rebuilt(client, found, name, to, manifest) for name in _regions(found, region)]
    report = compared(found, regions)
    if to is not None:
        _say_where_logs_end(regions, to)
    if as_json:
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        _print(report)
    if report["equal"] is False:
        raise IsthmusError(f"run {run}: the log does not lead to what the sites have reported")
    if report["equal"] is None:
        err.print(f"isthmus: {_why_not(found, to)}: compared with no digest of a site", markup=False, soft_wrap=True)
        sys.exit(_NOTHING_COMPARED)


def _regions(run: Run, wanted: str | None) -> list[str]:
    there = [region.name for region in run.regions]
    if wanted is not None and wanted not in there:
        raise IsthmusError(f"run {run.id} has no region {wanted!r}; its regions: {', '.join(there) or 'none yet'}")
    if not there:
        raise IsthmusError(f"run {run.id} is {run.status}: there is nothing to replay before it is started")
    return there if wanted is None else [wanted]


def _rebuilt(client: CoordinatorClient, run: Run, region: str, to: int | None, snapshot: Manifest | None) -> Rebuilt:
    with Progress(console=err, transient=True) as progress:
        task = progress.add_task(f"region {region}", total=None)

        def say(seq: int, last: int) -> None:
            progress.update(task, completed=seq, total=last)

        return rebuild(client, run, region, to, say, snapshot)


def _say_where_logs_end(regions: Sequence[Rebuilt], to: int) -> None:
    for rebuilt in regions:
        if rebuilt.whole and rebuilt.step < to:
            said = f"the log of region {rebuilt.region} ends with step {rebuilt.step}: replayed to there, not to {to}"
            err.print(f"isthmus: {said}", markup=False, soft_wrap=True)


def _why_not(run: Run, to: int | None) -> str:
    if not run.status.terminal:
        return f"run {run.id} is {run.status}"
    if to is not None and to < max(region.step for region in run.regions):
        return f"replayed to step {to} only"
    return f"no site of run {run.id}, which is {run.status}, has reported the end of its training"


def compared(run: Run, regions: Sequence[Rebuilt]) -> Report:
    """As JSON. `equal` is null where there is nothing to compare with: no final digests, unless the run has ended."""
    lines = [_line(run, rebuilt) for rebuilt in regions]
    verdicts = {line["equal"] for line in lines}
    return {
        "run": run.id,
        "equal": False if False in verdicts else True if True in verdicts else None,
        "regions": lines,
    }


def _line(run: Run, rebuilt: Rebuilt) -> Report:
    reported: dict[str, str] = {}
    if run.status.terminal and rebuilt.whole:
        there = (member for member in run.members if member.region == rebuilt.region)
        reported = {member.site: member.digest for member in there if member.digest is not None}
    equal: bool | None = all(digest == rebuilt.digest for digest in reported.values()) if reported else None
    return {
        "region": rebuilt.region,
        "first": rebuilt.first,
        "seq": rebuilt.seq,
        "step": rebuilt.step,
        "digest": rebuilt.digest,
        "reported": reported,
        "copies": rebuilt.copies,
        "copies_differ": list(rebuilt.differing),
        "equal": False if rebuilt.differing else equal,
    }


def _print(report: Report) -> None:
    table = Table("region", "entries", "step", "digest", "sites")
    for line in report["regions"]:
        sites = [
            f"{site} {'equal' if digest == line['digest'] else digest[:12]}"
            for site, digest in line["reported"].items()
        ]
        table.add_row(
            line["region"], f"{line['first']}-{line['seq']}", str(line["step"]), line["digest"][:12], ", ".join(sites)
        )
    out.print(table)
    for line in report["regions"]:
        if line["copies_differ"]:
            seqs = ", ".join(map(str, line["copies_differ"]))
            out.print(f"region {line['region']}: the sites held other copies before the anchors {seqs}", style="red")


if __name__ == "__main__":
    main()
