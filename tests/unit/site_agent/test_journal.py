"""What a journal of contributions holds, and that it holds all of it when its writer is killed."""

import subprocess
import sys
from functools import partial

import pytest

from api.errors import GoneError, InvalidError
from api.service import Answer
from site_agent.journal import Journal, Line, read_journal

WRITER = """
import os, signal, sys
from pathlib import Path
from api.service import Answer
from site_agent.journal import Journal
for step in range(1, 4):
    Journal(Path(sys.argv[1])).noted(step, "d", lambda: Answer(b"entry"))
os.kill(os.getpid(), signal.SIGKILL)
"""


def raising(error):
    def send():
        raise error

    return send


def test_every_answer_is_noted(tmp_path):
    journal = Journal(tmp_path)
    answers = [Answer(b"entry"), Answer(None, "waiting for b"), Answer(None, "paused", accepted=False)]
    assert [
        journal.noted(step, f"d{step}", partial(lambda answer: answer, answer))
        for step, answer in enumerate(answers, 1)
    ] == answers
    for step, error in ((4, GoneError("closed_without_you", "late")), (5, InvalidError("bad_values", "NaN"))):
        with pytest.raises(type(error)):
            journal.noted(step, f"d{step}", raising(error))
    with pytest.raises(KeyboardInterrupt):
        journal.noted(6, "d6", raising(KeyboardInterrupt()))
    noted = {(line.step, line.digest): line.answer for line in read_journal(tmp_path / "sent.jsonl")}
    assert noted == {(1, "d1"): "accepted", (2, "d2"): "accepted", (4, "d4"): "closed", (5, "d5"): "bad_values"}


def test_another_session_appends_and_half_a_line_is_left_out(tmp_path):
    for step in (1, 2):
        Journal(tmp_path).noted(step, "d", lambda: Answer(b"entry"))
    with (tmp_path / "sent.jsonl").open("a") as file:
        file.write('{"step": 3, "dig')
    assert read_journal(tmp_path / "sent.jsonl") == [Line(step=step, digest="d", answer="accepted") for step in (1, 2)]


def test_a_killed_writer_has_written(tmp_path):
    subprocess.run([sys.executable, "-c", WRITER, tmp_path], check=False, timeout=60)
    assert len(read_journal(tmp_path / "sent.jsonl")) == 3
