"""A large snapshot on its way: a site's file, the coordinator's blob, an exported file, a run that begins with it.

One site, which is a region, without outer steps. None of them may load it whole.
"""

import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from api.client import CoordinatorClient
from api.errors import IsthmusError
from api.export import export_model
from api.schemas import Run
from api.simulate import Check, Simulation, agents, wait_for_sites
from api.specs import BeginSpec, OptimizerSpec, RoundsSpec, RunSpec, SnapshotsSpec
from site_agent.bench.outer.site import Task, seen_at
from site_agent.bench.resident import forget_peak, peak, resident
from site_agent.bench.rounds.host import Host, host, megabytes
from site_agent.bench.timing import rounded

__all__ = ["bench_snapshot"]

Figures = dict[str, Any]

_SITE = "a"
_LOOK_EVERY_S = 0.2
_ON_DISK = 6
"""Times the parameters: what is stored, what is being written beside it, and the exported file."""
_IN_MEMORY = 1.5


def bench_snapshot(mib: int, say: Callable[[str], None]) -> Figures:
    """Figures; or `skipped`, with the reason. Megabytes are how far memory rose at most.

    Raises:
        IsthmusError: it arrived with other bits.
    """
    say(f"measuring: a snapshot of {mib} MiB")
    with host() as there, there.admin() as admin:
        lacking = _lacking(mib << 20, there.directory)
        if lacking is not None:
            return {"skipped": lacking}
        module = f"{__package__}.site"
        simulation = Simulation(_spec(Task(mib, 0, None, "")), {_SITE: _SITE}, module=module)
        with agents(simulation, there.url, there.directory) as check:
            wait_for_sites(admin, [_SITE], check)
            return _moved(mib, there, admin, check)


def _lacking(size: int, folder: Path) -> str | None:
    disk, memory = shutil.disk_usage(folder).free, psutil.virtual_memory().available
    if disk < _ON_DISK * size:
        return f"{folder} has {disk >> 20} MiB free, {_ON_DISK * size >> 20} are needed"
    if memory < _IN_MEMORY * size:
        return f"{memory >> 20} MiB of memory are available, {int(_IN_MEMORY * size) >> 20} are needed"
    return None


def _spec(task: Task, begin: BeginSpec | None = None) -> RunSpec:
    return RunSpec(
        name="bench",
        task="bench",
        params=asdict(task),
        steps=1,
        sites=[_SITE],
        optimizer=OptimizerSpec(k=1),
        rounds=RoundsSpec(deadline_s=3600, restarts=0),
        snapshots=SnapshotsSpec(every=1 if begin is None else None),
        begin=begin,
    )


def _moved(mib: int, there: Host, admin: CoordinatorClient, check: Check) -> Figures:
    task = Task(mib, secrets.randbits(32), None, str(there.directory / "seen"))
    Path(task.folder).mkdir()
    there.forget_peak()
    before = there.usage().resident
    run, taken_s = _succeeded(_spec(task), admin, check)
    seen = seen_at(Path(task.folder), _SITE)
    path = there.directory / "exported"
    digest, export_growth, export_s = _exported(admin, run.id, path)
    path.unlink()
    begun, begun_s = _succeeded(_spec(task, BeginSpec(run=run.id, snapshot=1)), admin, check)
    start = admin.log(begun.id, _SITE, 0, 1).items[0]["parameters"]
    if {digest, start} != {member.digest for member in run.members}:
        raise IsthmusError(f"snapshot 1 of run {run.id} of the bench has other parameters than its site")
    return {
        "coordinator_growth_mb": megabytes(there.peak() - before),
        "export_growth_mb": megabytes(export_growth),
        "snapshot_site_peak_over_parameters": rounded((max(seen.peaks) - seen.bare) / (mib << 20)),
        "snapshot_run_s": rounded(taken_s),
        "snapshot_export_s": rounded(export_s),
        "snapshot_begin_s": rounded(begun_s),
    }


def _succeeded(spec: RunSpec, admin: CoordinatorClient, check: Check) -> tuple[Run, float]:
    """The run, and how many seconds it took."""
    started = time.monotonic()
    run = admin.start_run(admin.create_run(spec).id)
    while not run.status.terminal:
        check()
        time.sleep(_LOOK_EVERY_S)
        run = admin.run(run.id)
    if run.status != "succeeded":
        raise IsthmusError(f"run {run.id} of the bench {run.status}: {run.reason}")
    return run, time.monotonic() - started


def _exported(admin: CoordinatorClient, run: str, path: Path) -> tuple[str, int, float]:
    """Of snapshot 1: the digest of its parameters, by how many bytes memory rose here, and the seconds."""
    forget_peak()
    before, started = resident(), time.monotonic()
    digest = export_model(admin, run, path, 1)
    return digest, peak() - before, time.monotonic() - started
