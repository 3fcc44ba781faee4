"""Every bad request of the list, sent over real HTTP to a real coordinator, and the page that is made of the list."""

import pytest

from tests.conftest import ROOT, LiveCoordinator, start_coordinator
from tests.contract.bad_requests import SUBJECTS
from tests.contract.bad_requests.case import CLOSED, Case
from tests.contract.bad_requests.page import page
from tests.contract.bad_requests.states import lost_tokens
from tests.contract.by_hand import problem

CASES = [
    pytest.param(case, id=f"{subject}: {case.what}"[:100], marks=[pytest.mark.slow] if case.slow else [])
    for subject, cases in SUBJECTS.items()
    for case in cases
]

LONGEST = 60_000


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    options = ["--lease-s", "36000", "--failure-limit", "1000000"]
    live = start_coordinator(tmp_path_factory.mktemp("bad-requests"), *options)
    yield live
    live.service.interrupt()
    live.service.join()


@pytest.fixture(scope="module")
def states(live):
    """One run in each of the states, made when it is first needed."""
    made, lost = {}, lost_tokens(live)

    def state(kind):
        if kind not in made:
            made[kind] = kind(live, lost)
        return made[kind]

    return state


@pytest.mark.parametrize("case", CASES)
def test_every_bad_request_has_its_answer_and_changes_nothing(live: LiveCoordinator, states, case: Case):
    state = states(case.state)
    state.ready()
    before = state.seen
    answer = case.request.send(state)
    detail = state.fill(case.detail)
    if case.status == CLOSED:
        assert answer is None, answer
    elif case.code:
        assert len(answer.content) < LONGEST
        body = problem(answer, case.status, case.code)
        assert detail in body["detail"]
        assert body["errors"] or case.code != "invalid_request"
        assert answer.headers.get("WWW-Authenticate") == ("Bearer" if case.status == 401 else None)
    else:
        assert answer.status_code == case.status, answer.text
        assert detail in answer.text
    assert state.admin.ready().status == "ok"
    assert state.seen == before
    assert not (live.directory / "opened").exists()
    state.go_on()


def test_the_page_is_up_to_date():
    path = ROOT / "docs" / "bad-requests.md"
    assert path.read_text() == page(), "run `make docs` and look at what has changed"


def test_every_case_has_its_own_words():
    for cases in SUBJECTS.values():
        assert len({case.what for case in cases}) == len(cases)
