"""Many runs, some at a time in processes of their own; what has finished is kept in a file."""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from api.payload import canonical_json
from site_agent.bench.quality.train import Outcome, Run, train

__all__ = ["outcomes"]


def outcomes(runs: Sequence[Run], jobs: int, results: Path | None) -> list[Outcome]:
    """Of each run, in order: from the file `results` if it has it, else trained now and added to the file.

    The file has one JSON object per line. It knows the settings of a run, not the version of the code.
    """
    known = _read(results) if results is not None and results.exists() else {}
    missing = [run for run in runs if _key(run) not in known]
    _say(f"{len(runs)} runs, of which {len(runs) - len(missing)} are known")
    started = time.monotonic()

    def finished(number: int, run: Run, outcome: Outcome) -> None:
        known[_key(run)] = outcome
        if results is not None:
            with results.open("a") as file:
                file.write(_line(run, outcome) + "\n")
        spent = time.monotonic() - started
        _say(
            f"{number}/{len(missing)} after {spent:.0f} s: {run.row.name}, lr {run.row.lr:g}, seed {run.seed}: "
            f"{outcome.loss:.3f}, {outcome.sent / 1000:,.0f} kB"
        )

    _train_all(missing, jobs, finished)
    return [known[_key(run)] for run in runs]


def _train_all(runs: Sequence[Run], jobs: int, finished: Callable[[int, Run, Outcome], None]) -> None:
    with ProcessPoolExecutor(jobs, get_context("spawn"), _start_worker) as pool:
        futures = {pool.submit(train, run): run for run in runs}
        try:
            for number, future in enumerate(as_completed(futures), 1):
                finished(number, futures[future], future.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _start_worker() -> None:
    """One thread; and an end when the parent has ended, however it has."""
    torch.set_num_threads(1)
    parent = parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    Thread(target=follow, daemon=True).start()


def _key(run: Run) -> str:
    return canonical_json(run.to_json())


def _line(run: Run, outcome: Outcome) -> str:
    loss = outcome.loss if math.isfinite(outcome.loss) else None
    return canonical_json({"run": run.to_json(), "outcome": asdict(outcome) | {"loss": loss}})


def _read(path: Path) -> dict[str, Outcome]:
    """Run, as canonical JSON, -> outcome. A last line without an end was cut off: it is removed."""
    *lines, rest = path.read_text().split("\n")
    if rest:
        path.write_text("".join(line + "\n" for line in lines))
    records: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return {canonical_json(record["run"]): _outcome(**record["outcome"]) for record in records}


def _outcome(loss: float | None, sent: int) -> Outcome:
    return Outcome(math.nan if loss is None else loss, sent)


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
