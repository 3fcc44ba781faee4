"""`isthmus bench rounds`: what a durable round costs here, beside bare sockets and gloo, the same bytes, in one run.

A round is everything from the moment at which all sites have their contributions until the last one has the entry:
sent, received, validated, committed to Redis, aggregated, committed, answered. An all-gather and an exchange over bare
sockets of the same bytes follow each round, in the same processes. The top level of the figures:

- `round_over_gloo_n4_100kib`, `_n4_1mib`: the round of 4 sites over the all-gather of 4 processes, p50 over p50, with
  `appendfsync everysec`; `_always` has the same with `always`, which is what the embedded Redis does by itself.
- `round_p50_ms_n4_100kib`, `gloo_p50_ms_n4_100kib`, and of `_n4_1mib`.
- `peak_mb_upload_400mib`: how far the coordinator's resident set rises while a blob of 400 MiB is uploaded.
- `rows`: per number of sites and size; `split_ms` is of the coordinator, p50 of single contributions, `aggregate` once
  a round. Times are wall-clock, in milliseconds, megabytes are 10^6 bytes.
"""

import os
import secrets
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import psutil

from algorithms import kernels
from site_agent.bench.rounds.cases import Case, Plan
from site_agent.bench.rounds.host import Fsync, Host, Usage, host, megabytes
from site_agent.bench.rounds.relay import relay
from site_agent.bench.rounds.site import Measured, Way
from site_agent.bench.rounds.sites import Sites, sites
from site_agent.bench.timing import rounded

__all__ = ["measure"]

Figures = dict[str, Any]
Say = Callable[[str], None]

HEADLINES = ("n4_100kib", "n4_1mib")
WAYS: list[Way] = ["round", "gloo", "sockets"]
_WARM_UP = 3


def measure(plan: Plan, say: Say) -> Figures:
    """All figures, as JSON values; `say` is told what comes next."""
    rows: dict[str, Figures] = {}
    skipped: dict[str, str] = {}
    load = os.getloadavg()[0]
    with sites() as crowd:
        for case in plan.cases:
            if case.memory > (there := psutil.virtual_memory().available):
                skipped[case.name] = f"it takes about {case.memory >> 30} GiB of memory, {there >> 30} are free"
                continue
            say(f"measuring: {case.sites} sites, {case.payload >> 10} KiB each")
            rows[case.name] = _row(case, crowd)
    say("measuring: upload")
    upload = _upload(plan.upload)
    environment = {
        "cores": os.cpu_count(),
        "compiled": kernels.compiled is not None,
        "load_before": rounded(load),
        "load_after": rounded(os.getloadavg()[0]),
    }
    top = _headlines(rows) | {f"peak_mb_upload_{plan.upload >> 20}mib": upload}
    return top | {"rows": rows, "skipped": skipped, "environment": environment}


def _headlines(rows: dict[str, Figures]) -> Figures:
    top: Figures = {}
    for name in HEADLINES:
        row = rows[name]
        top[f"round_over_gloo_{name}"] = row["everysec"]["round_over_gloo"]
        top[f"round_over_gloo_{name}_always"] = row["always"]["round_over_gloo"]
    for name in HEADLINES:
        top[f"round_p50_ms_{name}"] = rows[name]["everysec"]["round_p50_ms"]
        top[f"gloo_p50_ms_{name}"] = rows[name]["everysec"]["gloo_p50_ms"]
    return top


# --- rounds -----------------------------------------------------------------------------------------------------------


def _row(case: Case, crowd: Sites) -> Figures:
    with host() as there, relay(case.sites) as port, tempfile.TemporaryDirectory() as folder:
        crowd.join(case, there, port, Path(folder) / "rendezvous")
        crowd.measure(case, WAYS, _WARM_UP)
        found: dict[Fsync, _Found] = {fsync: _Found(case) for fsync in get_args(Fsync)}
        for _ in range(case.blocks):
            for fsync, series in found.items():
                there.set_fsync(fsync)
                series.add(there, crowd)
        figures: Figures = {fsync: series.figures() for fsync, series in found.items()}
        first = found["everysec"].measured[0]
        return {"sent_bytes": first.sent, "answered_bytes": first.answered, **figures}


class _Found:
    """What was measured of one case with one setting of Redis, block by block."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.measured: list[Measured] = []
        self._spans: dict[Way, list[float]] = {way: [] for way in WAYS}
        self._usage: list[tuple[Usage, Usage]] = []
        self._peaks: list[int] = []

    def add(self, there: Host, crowd: Sites) -> None:
        there.forget_peak()
        before = there.usage()
        measured = crowd.measure(self.case, WAYS, self.case.rounds)
        self._usage.append((before, there.usage()))
        self._peaks.append(there.peak() - before.resident)
        self.measured += measured
        for way, durations in self._spans.items():
            durations += _durations([site.spans[way] for site in measured])

    def figures(self) -> Figures:
        rounds = len(self._usage) * self.case.rounds
        figures: Figures = {}
        for way, durations in self._spans.items():
            milliseconds = sorted(duration * 1e3 for duration in durations)
            figures[f"{way}_p50_ms"] = rounded(statistics.median(milliseconds))
            figures[f"{way}_p99_ms"] = rounded(milliseconds[-1 - len(milliseconds) // 100])
        return {
            "round_over_gloo": rounded(figures["round_p50_ms"] / figures["gloo_p50_ms"]),
            "rounds_per_s": rounded(len(self._spans["round"]) / sum(self._spans["round"])),
            **figures,
            "split_ms": _split([timing for site in self.measured for timing in site.timings]),
            "cpu_ms": rounded(self._used("cpu_s") / rounds * 1e3),
            "redis_cpu_ms": rounded(self._used("redis_cpu_s") / rounds * 1e3),
            "peak_mb": megabytes(max(self._peaks)),
            "redis_received_mb": megabytes(self._used("redis_received") / rounds),
            "redis_sent_mb": megabytes(self._used("redis_sent") / rounds),
            "redis_held_mb": megabytes(self._usage[-1][1].redis_held),
            "rounds": rounds,
        }

    def _used(self, what: str) -> float:
        return float(sum(getattr(after, what) - getattr(before, what) for before, after in self._usage))


def _durations(spans: Sequence[Sequence[tuple[float, float]]]) -> list[float]:
    """From the first site's begin to the last one's end, round by round."""
    return [
        max(end for _, end in together) - min(begin for begin, _ in together) for together in zip(*spans, strict=True)
    ]


def _split(timings: list[dict[str, float]]) -> dict[str, float]:
    names = list(dict.fromkeys(name for timing in timings for name in timing))
    return {name: rounded(statistics.median(timing[name] for timing in timings if name in timing)) for name in names}


# --- upload -----------------------------------------------------------------------------------------------------------


def _upload(size: int) -> float:
    """A blob that is small goes first, so that what only the first one needs is there."""
    with host() as there, there.admin() as admin:
        admin.put_blob(secrets.token_bytes(1 << 20))
        there.forget_peak()
        before = there.usage().resident
        admin.put_blob(secrets.token_bytes(size))
        return megabytes(there.peak() - before)
