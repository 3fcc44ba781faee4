"""docs/bad-requests.md, from the list of cases."""

from tests.contract.bad_requests import SUBJECTS
from tests.contract.bad_requests.case import CLOSED, Case

__all__ = ["page"]

_HEAD = """\
# Bad requests

What is answered to requests that are malformed, hostile or late. `make docs` writes this page from the list in
`tests/contract/bad_requests/`. `tests/contract/test_bad_requests.py` sends each of these {count} requests over HTTP to
a real coordinator, and checks the answer, that the coordinator goes on, that the run has not changed, and that its
round still closes with what the honest sites have sent.

Answers of 400 and more are `application/problem+json` with the code below; those without a code are plain text, from
the HTTP server itself. RUN stands for the run's id, SITE for the site that asks (its ranks are of attempt 2), OTHER for
another one, STEP for the step that is open, LAST and NEXT for those before and after it, FAR for one far away, SEQ and
HASH for the newest entry, SHORT for the beginning of its hash, ZERO for 64 zeros, OUTER for the outer round that is
open. The detail is an excerpt; context and every fault by itself come with it.
"""


def page() -> str:
    count = sum(map(len, SUBJECTS.values()))
    return "\n".join([_HEAD.format(count=count), *(_section(title, cases) for title, cases in SUBJECTS.items())])


def _section(title: str, cases: list[Case]) -> str:
    rows = ["| request | while | answer | detail |", "|---|---|---|---|", *map(_row, cases)]
    return f"## {title}\n\n" + "\n".join(rows) + "\n"


def _row(case: Case) -> str:
    answer = "none: the connection is closed" if case.status == CLOSED else f"{case.status} {case.code}".strip()
    shown = f"<br>`{case.request.shown}`" if case.request.shown else ""
    cells = (case.what + shown, case.state.name, answer, case.detail)
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
