"""`isthmus bench rounds --quick` as a user runs it: a coordinator, its Redis, processes of four sites."""

import json
import math
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from site_agent.bench.rounds.report import print_report

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-c", "from api.cli import main; main()", "bench", "rounds", "--quick", "--json"]
PIECES = {"receive", "validate", "commit", "aggregate", "close", "answer"}


@pytest.fixture(scope="module")
def result() -> subprocess.CompletedProcess[str]:
    return subprocess.run(COMMAND, cwd=ROOT, capture_output=True, text=True, timeout=240, check=True)


@pytest.fixture(scope="module")
def figures(result) -> dict:
    return json.loads(result.stdout)


def test_progress_goes_to_stderr_and_every_case_is_there(result, figures):
    assert "measuring: upload" in result.stderr
    assert set(figures["rows"]) == {"n2_100kib", "n4_100kib", "n2_1mib", "n4_1mib"}
    assert figures["skipped"] == {}


def test_contributions_have_the_bytes_that_were_asked_for(figures):
    for name, row in figures["rows"].items():
        asked = 100 << 10 if name.endswith("100kib") else 1 << 20
        assert asked < row["sent_bytes"] + 100 < asked * 1.02 + 1500
        assert row["answered_bytes"] > row["sent_bytes"]


def test_every_way_was_measured(figures):
    for row in figures["rows"].values():
        for fsync in ("everysec", "always"):
            found = row[fsync]
            assert found["rounds"] == 5
            assert set(found["split_ms"]) == PIECES
            for way in ("round", "gloo", "sockets"):
                assert 0 < found[f"{way}_p50_ms"] <= found[f"{way}_p99_ms"]
            assert math.isclose(found["round_over_gloo"], found["round_p50_ms"] / found["gloo_p50_ms"], rel_tol=0.01)
            assert found["split_ms"]["aggregate"] < found["round_p50_ms"]


def test_redis_gets_what_the_sites_send_and_what_they_are_answered(figures):
    """Of a small round only what has waited for long: the rest is committed with the update, and never stored."""
    for name, row in figures["rows"].items():
        sent, answered = int(name[1]) * row["sent_bytes"] / 1e6, row["answered_bytes"] / 1e6
        least = answered if name.endswith("_100kib") else sent + answered
        assert least < row["everysec"]["redis_received_mb"] < 1.1 * (sent + answered) + 0.1


def test_headlines_are_those_of_the_rows(figures):
    for name in ("n4_100kib", "n4_1mib"):
        row = figures["rows"][name]
        assert figures[f"round_over_gloo_{name}"] == row["everysec"]["round_over_gloo"]
        assert figures[f"round_over_gloo_{name}_always"] == row["always"]["round_over_gloo"]
        assert figures[f"round_p50_ms_{name}"] == row["everysec"]["round_p50_ms"]
    assert 0 < figures["peak_mb_upload_400mib"] < 64


def test_the_tables_have_the_same_figures(figures):
    console = Console(file=StringIO(), width=200)
    print_report(figures, console)
    text = console.file.getvalue()
    for words in ("n4_1mib", "everysec", "aggregate", f"{figures['round_over_gloo_n4_100kib']:.4g}"):
        assert words in text
