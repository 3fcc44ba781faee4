"""What `isthmus bench outer` calls the same bits as before."""

from pathlib import Path

import pytest

from site_agent.bench.outer.resume import agree
from site_agent.bench.outer.trained import Lines, lines_of

SNAPSHOT = [(4, "four")]
BEFORE = [(3, "three"), (4, "four"), (5, "five"), (6, "six")]


@pytest.mark.parametrize(
    ("snapshot", "after", "equal"),
    [
        (SNAPSHOT, [[(6, "six"), (7, "seven")], [(7, "seven")]], True),
        (SNAPSHOT, [[(6, "other"), (7, "seven")]], False),
        (SNAPSHOT, [[(6, "six"), (7, "seven")], [(7, "other")]], False),
        (SNAPSHOT, [[(7, "seven")]], False),
        ([(4, "other")], [[(6, "six")]], False),
    ],
    ids=["same", "entered with others", "gone on with others", "entered nowhere known", "another snapshot"],
)
def test_what_agrees(snapshot: Lines, after: list[Lines], equal: bool):
    assert agree([snapshot, BEFORE], after) is equal


def test_a_line_that_is_being_written_is_none(tmp_path: Path):
    path = tmp_path / "a-1"
    path.write_text("4 four\n5 fi")
    assert lines_of(path) == [(4, "four")]
