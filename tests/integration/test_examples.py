"""Runs the examples as a user would, and holds DeMo to a margin from AdamW."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def printed(module: str) -> str:
    run = subprocess.run([sys.executable, "-m", module], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


def number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found, text
    return float(found[1])


@pytest.mark.slow
def test_digits_convnet_comes_within_a_point_and_a_half_of_adamw() -> None:
    text = printed("examples.digits_convnet")
    demo, adamw = (number(rf"{name} +held-out accuracy ([\d.]+)%", text) for name in ("DeMo", "AdamW"))
    assert adamw > 96
    assert demo > adamw - 1.5
    assert number(r"margin ([+-][\d.]+) points", text) == pytest.approx(demo - adamw, abs=0.02)


@pytest.mark.slow
def test_text_transformer_comes_within_three_percent_of_adamw() -> None:
    text = printed("examples.text_transformer")
    demo, adamw = (number(rf"{name} +held-out loss ([\d.]+)", text) for name in ("DeMo", "AdamW"))
    assert adamw < number(r"bigrams ([\d.]+)", text)
    assert demo < 1.03 * adamw
    assert number(r"margin ([+-][\d.]+)%", text) == pytest.approx(100 * (demo / adamw - 1), abs=0.2)
