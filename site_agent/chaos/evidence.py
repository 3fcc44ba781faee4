"""Collects what is left of a run: its logs over the API, the sites' own files, and what a replay comes to."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from api.client import CoordinatorClient
from api.schemas import Run
from site_agent.chaos.checks import Applied
from site_agent.journal import NAME, Line, read_journal

__all__ = ["applied", "journal", "read_log", "replay"]

_REPLAY_S = 120.0
_SAID = re.compile(r'{"step": (\d+), "digest": "(\w+)"}\n')
"""A line of `chaos.task`; a thread that logs may have begun the same line before."""


def read_log(client: CoordinatorClient, run: str, region: str) -> list[dict[str, Any]]:
    headers: list[dict[str, Any]] = []
    while items := client.log(run, region, len(headers)).items:
        headers += items
    return headers


def journal(site: Path, run: Run) -> list[Line]:
    """What all ranks that this site has ever had for the run have sent."""
    return [line for path in sorted((site / "runs" / run.id).glob(f"*/{NAME}")) for line in read_journal(path)]


def applied(site: Path, run: Run, name: str, region: str) -> Iterator[Applied]:
    """What every rank that this site has ever had has said."""
    for path in sorted((site / "runs" / run.id).glob("**/stdout.log")):
        yield Applied(name, region, [(int(step), digest) for step, digest in _SAID.findall(path.read_text())])


def replay(url: str, token: str, run: str) -> str:
    """Nothing if `isthmus replay` comes to the sites' digests from the log alone; else what it says."""
    command = [sys.executable, "-c", "from api.cli import main; main()", "replay", run, "--json"]
    environment = {**os.environ, "ISTHMUS_COORDINATOR": url, "ISTHMUS_TOKEN": token}
    try:
        ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=_REPLAY_S, check=False)
    except subprocess.TimeoutExpired:
        return f"isthmus replay {run} takes longer than {_REPLAY_S:g} s"
    if ended.returncode == 0 and json.loads(ended.stdout)["equal"] is True:
        return ""
    return f"isthmus replay {run}, exit status {ended.returncode}: {(ended.stdout + ended.stderr).strip()[-2000:]}"
