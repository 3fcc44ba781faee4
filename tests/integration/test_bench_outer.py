"""`isthmus bench outer` as a user runs it, with small parameters: a coordinator, its Redis, three agents with ranks."""

import json
import os
import statistics
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from site_agent.bench.outer.report import print_report
from tests.processes import processes_of

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
MIB = 16
COMMAND = [sys.executable, "-c", "from api.cli import main; main()", "bench", "outer", "--json", "--mib", str(MIB)]


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("bench-outer")
    done = subprocess.run(
        COMMAND,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "measuring: one_differs, 3 sites, 16 MiB each" in done.stderr
    assert list(folder.iterdir()) == []
    assert not processes_of(folder)
    return json.loads(done.stdout)


def test_only_distinct_fragments_are_uploaded(figures: dict) -> None:
    """Of three equal copies one; and once more the one fragment of four that differs."""
    assert 1 / 3 <= figures["uploads_over_naive_3sites"] <= 0.34
    more = figures["uploads_over_naive_one_differs"] - figures["uploads_over_naive_3sites"]
    assert more == pytest.approx(1 / 4 / 3, rel=0.02)
    for row in figures["rows"].values():
        naive = 3 * len(row["outer_each_s"]) * MIB * 2**20 / 1e6
        assert row["uploaded_mb"] == pytest.approx(naive * row["uploads_over_naive"], rel=0.001)
        assert row["downloaded_mb"] == pytest.approx(naive, rel=0.02)


def test_memory_and_seconds(figures: dict) -> None:
    rows = figures["rows"].values()
    assert figures[f"coordinator_peak_mb_{MIB}mib"] == max(row["coordinator_peak_mb"] for row in rows) < 256
    assert 0 < figures[f"redis_growth_mb_{MIB}mib"] < 64
    assert figures["site_peak_over_parameters"] >= 1
    for row in rows:
        assert row["outer_s"] == pytest.approx(statistics.mean(row["outer_each_s"]), rel=0.01)
        assert 0 < row["outer_s"] < row["run_s"]


def test_a_run_resumes_with_the_same_bits(figures: dict) -> None:
    assert figures["resume"] == {"resume_from_a_site": True, "resume_from_anchors": True}
    assert figures["resume_bit_equal"] is True


def test_a_snapshot_is_not_loaded_whole(figures: dict) -> None:
    """Blocks are held, as much as this small snapshot, but for exporting."""
    snapshot = figures["snapshot"]
    name = f"snapshot_{3 * MIB}mib_peak_mb"
    assert figures["skipped"] == {}
    assert figures[name] == max(snapshot["coordinator_growth_mb"], snapshot["export_growth_mb"]) < 64
    assert snapshot["export_growth_mb"] < 16


def test_the_tables_have_the_same_figures(figures: dict) -> None:
    console = Console(file=StringIO(), width=200)
    print_report(figures, console)
    text = console.file.getvalue()
    for words in ("one_differs", "uploads_over_naive_3sites", f"{figures['outer_s']:.4g}"):
        assert words in text
