"""The page of transitions says what the code does."""

import re

import pytest

from coordinator.state import TRANSITIONS
from tests.unit.coordinator import diagram

EDGE = re.compile(r" {4}(\S+) --> (\S+): (.*)")


@pytest.mark.parametrize("every", [None, 1])
def test_what_a_run_of_one_site_comes_to_is_on_the_page(every):
    lines = diagram.PAGE.read_text().splitlines()
    edges = {(edge[1], edge[2]): set(edge[3].split(", ")) for edge in map(EDGE.fullmatch, lines) if edge}
    seen = diagram.explore({"a": "west"}, every)
    for (before, after), names in {**seen.statuses, **seen.conditions}.items():
        assert names <= edges["[*]" if before == "new" else before, after], "run `make docs`"
    rows = dict(line.strip("|` ").split("`", 1) for line in lines if line.startswith("| `"))
    assert rows.keys() == {kind.__name__ for kind in TRANSITIONS}
    for name, statuses in seen.taken.items():
        assert statuses <= set(rows[name].rpartition("|")[2].strip().split(", ")), name


@pytest.mark.slow
def test_the_page_is_up_to_date():
    page = diagram.page()
    assert diagram.PAGE.read_text() == page, "run `make docs`"
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) == len(TRANSITIONS)
    assert all(cell.strip() for row in rows for cell in row.strip("|").split("|"))
