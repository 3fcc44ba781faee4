"""`isthmus bench outer`: what an outer round costs here, beside the naive way: every site sends everything, every time.

Three sites, each a region of its own, with fp32 parameters that are made up; everything else is real: coordinator,
Redis, agents, ranks. Outer rounds of four fragments: two in which all sites hold the same, and, in another run, one in
which a site holds another copy of one fragment. The top level of the figures; `1gib` stands for the size that was asked
for:

- `coordinator_peak_mb_1gib`: the most that was resident in the coordinator's process, all of it, over both runs.
- `redis_growth_mb_1gib`: how far the memory of its Redis rose in a run.
- `site_peak_over_parameters`: the most that was resident in a rank in an outer round, beyond what it had before there
  were parameters, over their size: 1 is no copy at all.
- `uploads_over_naive_3sites`, `uploads_over_naive_one_differs`: bytes that the sites sent for outer rounds, heads and
  announcements included, over those of the naive way.
- `snapshot_3gib_peak_mb`: how far memory rose at most, in the coordinator or in who exports, while a snapshot of three
  times the size moved from a site to the coordinator, to a file, and into a run that begins with it.
- `resume_bit_equal`: whether three sites that train hold the same bits at the place of a snapshot, and at the place at
  which everything was stopped, as before that, in runs with and without outer steps.
- `outer_s`: seconds from the first site's beginning of an outer round to the last one's end, when all agree.
- `rows`: the same and more for both runs; `snapshot` and `resume`: more about these. Megabytes are 10^6 bytes.

What was not measured is null, with the reason in `skipped`.
"""

import os
import secrets
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from api.client import CoordinatorClient
from api.errors import IsthmusError
from api.report import build_report
from api.simulate import Check, Simulation, agents, wait_for_sites
from api.specs import OptimizerSpec, OuterSpec, RoundsSpec, RunSpec
from site_agent.bench.outer.resume import bench_resume
from site_agent.bench.outer.site import Seen, Task, seen_at
from site_agent.bench.outer.snapshot import bench_snapshot
from site_agent.bench.rounds.host import Host, host, megabytes
from site_agent.bench.timing import rounded

__all__ = ["measure"]

Figures = dict[str, Any]
Say = Callable[[str], None]

_TASK = "bench"
_SITES = ("a", "b", "c")
_FRAGMENTS = 4
_LOOK_EVERY_S = 0.2
_SNAPSHOT_OVER_PARAMETERS = 3


def measure(mib: int, say: Say) -> Figures:
    """All figures, as JSON values; `say` is told what comes next."""
    load = os.getloadavg()[0]
    with host() as there, there.admin() as admin:
        simulation = Simulation(_spec(Task(mib, 0, None, ""), 1), {site: site for site in _SITES}, module=_module())
        with agents(simulation, there.url, there.directory) as check:
            wait_for_sites(admin, list(_SITES), check)
            rows = {}
            for name, rounds, differing in (("agreeing", 2, None), ("one_differs", 1, _SITES[-1])):
                say(f"measuring: {name}, {len(_SITES)} sites, {mib} MiB each")
                folder = there.directory / name
                task = Task(mib, secrets.randbits(32), differing, str(folder))
                rows[name] = _row(_spec(task, rounds), folder, there, admin, check)
    resumed = bench_resume(say)
    snapshot = bench_snapshot(_SNAPSHOT_OVER_PARAMETERS * mib, say)
    environment = {"cores": os.cpu_count(), "load_before": rounded(load), "load_after": rounded(os.getloadavg()[0])}
    details = {"rows": rows, "snapshot": snapshot, "resume": resumed, "environment": environment}
    return _headlines(rows, snapshot, resumed, mib) | details


def _module() -> str:
    return f"{__package__}.site"


def _spec(task: Task, rounds: int) -> RunSpec:
    return RunSpec(
        name="bench",
        task=_TASK,
        params=asdict(task),
        steps=rounds,
        sites=list(_SITES),
        optimizer=OptimizerSpec(k=1),
        outer=OuterSpec(every=1, fragments=_FRAGMENTS),
        rounds=RoundsSpec(deadline_s=3600, restarts=0),
    )


def _headlines(rows: dict[str, Figures], snapshot: Figures, resumed: dict[str, bool], mib: int) -> Figures:
    size = _size(mib)
    growth = f"snapshot_{_size(_SNAPSHOT_OVER_PARAMETERS * mib)}_peak_mb"
    every = rows.values()
    return {
        f"coordinator_peak_mb_{size}": max(row["coordinator_peak_mb"] for row in every),
        f"redis_growth_mb_{size}": max(row["redis_growth_mb"] for row in every),
        "site_peak_over_parameters": max(row["site_peak_over_parameters"] for row in every),
        "uploads_over_naive_3sites": rows["agreeing"]["uploads_over_naive"],
        "uploads_over_naive_one_differs": rows["one_differs"]["uploads_over_naive"],
        growth: None if "skipped" in snapshot else max(snapshot["coordinator_growth_mb"], snapshot["export_growth_mb"]),
        "resume_bit_equal": all(resumed.values()),
        "outer_s": rows["agreeing"]["outer_s"],
        "skipped": {growth: snapshot["skipped"]} if "skipped" in snapshot else {},
    }


def _size(mib: int) -> str:
    return f"{mib >> 10}gib" if mib in (1 << 10, 3 << 10) else f"{mib}mib"


def _row(spec: RunSpec, folder: Path, there: Host, admin: CoordinatorClient, check: Check) -> Figures:
    folder.mkdir()
    before = there.usage()
    started = time.monotonic()
    run = admin.start_run(admin.create_run(spec).id)
    held = before.redis_held
    while not run.status.terminal:
        check()
        time.sleep(_LOOK_EVERY_S)
        run, held = admin.run(run.id), max(held, there.usage().redis_held)
    if run.status != "succeeded" or run.alarms:
        raise IsthmusError(f"run {run.id} of the bench {run.status}: {'; '.join(run.alarms) or run.reason}")
    report = build_report(admin, run)
    sites = [seen_at(folder, site) for site in _SITES]
    return {
        **_traffic(report),
        **_of_sites(sites, report["parameter_bytes"]),
        "coordinator_peak_mb": megabytes(there.peak()),
        "coordinator_before_mb": megabytes(before.resident),
        "redis_growth_mb": megabytes(held - before.redis_held),
        "run_s": rounded(time.monotonic() - started),
    }


def _traffic(report: Figures) -> Figures:
    up, down = (sum(site[f"outer_bytes_{way}"] for site in report["sites"]) for way in ("up", "down"))
    naive = len(_SITES) * report["outer_rounds"] * report["parameter_bytes"]
    return {
        "uploads_over_naive": rounded(up / naive),
        "downloads_over_naive": rounded(down / naive),
        "uploaded_mb": megabytes(up),
        "downloaded_mb": megabytes(down),
    }


def _of_sites(sites: list[Seen], parameters: float) -> Figures:
    together = zip(*(site.spans for site in sites), strict=True)
    seconds = [max(end for _, end in spans) - min(begin for begin, _ in spans) for spans in together]
    return {
        "site_peak_over_parameters": rounded(max(max(site.peaks) - site.bare for site in sites) / parameters),
        "site_peak_over_parameters_joining": rounded(max(site.joined - site.bare for site in sites) / parameters),
        "outer_s": rounded(statistics.mean(seconds)),
        "outer_each_s": [rounded(value) for value in seconds],
    }
