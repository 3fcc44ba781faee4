"""The page of transitions says what the code does."""

from coordinator.state import TRANSITIONS
from tests.unit.coordinator import diagram


def test_the_page_is_up_to_date():
    page = diagram.page()
    assert diagram.PAGE.read_text() == page, "run `make docs`"
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) == len(TRANSITIONS)
    assert all(cell.strip() for row in rows for cell in row.strip("|").split("|"))
