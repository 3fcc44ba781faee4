"""What a run came to, from what the API tells of it: the report of `isthmus simulate` and of `isthmus run watch`."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Column, Table

from api import schemas
from api.client import CoordinatorClient
from api.totals import per_step, total

__all__ = [
    "build_report",
    "digests_equal",
    "print_report",
    "print_table",
    "print_warnings",
    "run_table",
    "size",
    "steps_done",
    "why",
]

Report = dict[str, Any]

_BYTES = tuple(f"{kind}bytes_{way}" for kind in ("", "round_", "outer_", "blob_") for way in ("up", "down"))


def build_report(client: CoordinatorClient, run: schemas.Run) -> Report:
    """A JSON-ready report. Totals of a site are over all of its sessions; losses are null if the task reported none.
    `steps` of a site are null if it has not trained.
    `digests_equal` is null where there is nothing to compare: not all sites that are there have told theirs.

    `wall_s` is from the start of the run to its end, or until now.
    `outer_bytes_*` are those of outer rounds, `blob_bytes_*` of other blobs, as entry 0; a region's are its sites'.
    """
    points = client.metrics(run.id)
    outer_rounds = client.outer_rounds(run.id)
    held_out = [value for value in _series(points, "heldout_loss") if value is not None]
    sites = [_site(member, run, points) for member in run.members]
    return {
        "run": run.id,
        "status": str(run.status),
        "steps": run.step,
        "wall_s": run.lasted_s,
        "heldout_loss_start": held_out[0] if held_out else None,
        "heldout_loss_end": held_out[-1] if held_out else None,
        "unigram_loss": _last(points, "unigram_loss"),
        "bigram_loss": _last(points, "bigram_loss"),
        "outer_rounds": len(outer_rounds),
        "outer_copies_averaged": sum(outer_round.distinct for outer_round in outer_rounds),
        "digests_equal": digests_equal(run),
        "ddp_bytes_per_step": _last(points, "ddp_bytes_per_step"),
        "parameter_bytes": _last(points, "parameter_bytes"),
        "alarms": run.alarms,
        "regions": [_region(region.name, sites) for region in run.regions],
        "sites": sites,
    }


def digests_equal(run: schemas.Run) -> bool | None:
    digests = {member.digest for member in run.members if member.condition is schemas.Condition.ACTIVE}
    if len(digests - {None}) > 1:
        return False
    return True if digests and None not in digests else None


def steps_done(run: schemas.Run, points: Sequence[schemas.StoredPoint]) -> int:
    """By all sites of regions that the run began with: as far as the logs tell, and beyond where sites train by
    themselves and report it."""
    later = {region.name for region in run.regions if region.came_later}
    active = (member for member in run.members if member.condition is schemas.Condition.ACTIVE)
    there = {member.site for member in active if member.region not in later}
    if run.spec.exchange != "none" or not there:
        return run.step
    own = {site: max((point.step for point in points if point.site == site), default=0) for site in there}
    return max(run.step, min(own.values()))


def _site(member: schemas.MemberView, run: schemas.Run, points: Sequence[schemas.StoredPoint]) -> Report:
    own = [point for point in points if point.site == member.site]
    return {
        "name": member.site,
        "region": member.region,
        "steps": _steps_of(member, run, own),
        "digest": member.digest,
        **{name: int(total(own, name)) for name in _BYTES},
        **{f"{name}_per_step": per_step(own, name) for name in ("bytes_up", "bytes_down")},
        **{name: round(total(own, name), 3) for name in ("wait_s", "compute_s")},
    }


def _steps_of(member: schemas.MemberView, run: schemas.Run, own: Sequence[schemas.StoredPoint]) -> int | None:
    """Of a site that is not there up to the step that it has reported; None: it has reported nothing."""
    steps = [point.step for point in own]
    if member.digest is not None or member.condition is schemas.Condition.ACTIVE:
        steps.append(next(region.step for region in run.regions if region.name == member.region))
    return max(steps, default=None)


def _region(name: str, sites: Sequence[Report]) -> Report:
    own = [site for site in sites if site["region"] == name]
    return {"name": name, "sites": [site["name"] for site in own]} | {
        kind: sum(site[kind] for site in own) for kind in _BYTES
    }


def _series(points: Sequence[schemas.StoredPoint], name: str) -> list[float | None]:
    return [point.values[name] for point in points if name in point.values]


def _last(points: Sequence[schemas.StoredPoint], name: str) -> float | None:
    series = _series(points, name)
    return series[-1] if series else None


# --- for people -------------------------------------------------------------------------------------------------------


def print_report(report: Report, console: Console) -> None:
    """Losses, bytes against DDP, and where the time went."""
    _print_losses(report, console)
    ddp = report["ddp_bytes_per_step"]
    against = f"; DDP would send {size(ddp)}" if ddp else ""
    console.print(f"bytes per step, over {report['steps']} steps{against}:", highlight=False)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("site", "region", "up", "rounds", "outer", "down", "vs DDP", "waiting", "digest"):
        left = column in ("site", "region", "digest")
        table.add_column(column, justify="left" if left else "right", no_wrap=True)
    for site in report["sites"]:
        table.add_row(
            site["name"],
            site["region"],
            *_rates(site),
            _against(ddp, site["bytes_up_per_step"]),
            _share(site),
            (site["digest"] or "-")[:8],
        )
    console.print(table)
    console.print(f"{report['outer_rounds']} outer rounds, {report['outer_copies_averaged']} distinct copies averaged")
    ended = schemas.RunStatus(report["status"]).terminal
    lasted = f"{report['status']} {'in' if ended else 'for'} {report['wall_s']:.0f} s"
    console.print(f"{lasted}{_agreement(report)}", style="bold")


def _rates(site: Mapping[str, Any]) -> list[str]:
    """Bytes per step: up, of rounds, of outer rounds, down."""
    if site["steps"] is None:
        return ["-"] * 4
    steps = max(site["steps"], 1)
    rates = (site["round_bytes_up"] / steps, site["outer_bytes_up"] / steps)
    return [size(rate) for rate in (site["bytes_up_per_step"], *rates, site["bytes_down_per_step"])]


def _agreement(report: Mapping[str, Any]) -> str:
    if report["digests_equal"] is None:
        return ""
    if not report["digests_equal"]:
        return "; THE SITES' PARAMETERS DIFFER"
    told, sites = sum(site["digest"] is not None for site in report["sites"]), len(report["sites"])
    if told == sites:
        return "; all sites hold the same parameters"
    return f"; {told} of {sites} sites hold the same parameters" if told > 1 else ""


def _against(ddp: float | None, sent: float) -> str:
    if not ddp or not sent:
        return "-"
    return f"1/{ddp / sent:.0f}" if sent <= ddp else f"{sent / ddp:.0f}x"


def _print_losses(report: Mapping[str, Any], console: Console) -> None:
    if report["heldout_loss_start"] is None:
        return
    losses = f"held-out loss {report['heldout_loss_start']:.3f} -> {report['heldout_loss_end']:.3f} nats per token"
    known = [(name, report[f"{name}_loss"]) for name in ("unigram", "bigram") if report[f"{name}_loss"] is not None]
    baselines = ", ".join(f"{name} model {value:.3f}" for name, value in known)
    console.print(losses + (f"  ({baselines})" if baselines else ""), style="bold", soft_wrap=True)


def _share(site: Mapping[str, Any]) -> str:
    lasted = site["wait_s"] + site["compute_s"]
    return f"{100 * site['wait_s'] / lasted:.0f} %" if lasted else "-"


def why(run: schemas.Run) -> str:
    """The reason to be read behind the status, with which it may begin."""
    return re.sub(rf"^{run.status}\b[:,;]? *", "", run.reason)


def print_warnings(run: schemas.Run, console: Console) -> None:
    """Once, where a run begins: they are of its spec."""
    for warning in run.warnings:
        console.print(f"warning: {warning}", style="yellow", soft_wrap=True, markup=False, highlight=False)


def run_table(runs: Sequence[schemas.Run]) -> Table:
    table = Table(Column("run", no_wrap=True), "status", "step", "alarms", "reason")
    for run in runs:
        table.add_row(
            run.id,
            str(run.status),
            f"{run.step}/{run.spec.steps}",
            f"[yellow]{len(run.alarms)}[/yellow]" if run.alarms else "-",
            escape(why(run).partition("\n")[0]),
        )
    return table


def print_table(table: Table, console: Console) -> None:
    """As wide as the terminal. A pipe has no width: there nothing is cut, and a row is a line."""
    if console.is_terminal:
        console.print(table)
        return
    wide = console.options.update_width(10_000)
    Console(file=console.file, width=Measurement.get(console, wide, table).maximum).print(table)


def size(count: float) -> str:
    """Bytes, in the unit that suits them."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
