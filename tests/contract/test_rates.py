"""How often one may ask, over real HTTP: of a good token, and of an address with tokens that are not good."""

import secrets

import httpx
import pytest

from api.access import TokenRequest
from tests.contract.by_hand import new_name, problem, registration


def get(live, token, path="/v1/runs"):
    return httpx.get(live.url + path, headers={"Authorization": f"Bearer {token}"} if token else {})


@pytest.fixture
def strict(new_coordinator):
    """Two requests in ten seconds with one token, three wrong tokens a minute."""
    return new_coordinator("--rate-limit", "12", "--failure-limit", "3")


def test_a_token_that_is_used_too_often(strict):
    answers = [get(strict, strict.token("observer")) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    body = problem(answers[2], 429, "rate_limited")
    assert answers[2].headers["retry-after"] == str(body["context"]["retry_after_s"]) == "10"
    assert "more than 12 requests a minute with the token of observer" in body["detail"]
    assert "ISTHMUS_RATE_LIMIT" in body["detail"]
    assert get(strict, strict.token("admin")).status_code == 200  # each token for itself
    assert get(strict, None, "/healthz").status_code == 200


def test_an_address_that_tries_tokens(strict):
    good = strict.token("observer")
    assert get(strict, good).status_code == 200
    codes = [get(strict, token).status_code for token in (secrets.token_urlsafe(32), None, secrets.token_urlsafe(32))]
    assert codes == [401, 401, 401]
    for token in (secrets.token_urlsafe(32), None, strict.token("join")):
        answer = get(strict, token)
        detail = problem(answer, 429, "rate_limited")["detail"]
        assert "127.0.0.1" in detail
        assert "wait, and if this one is not good, use another; try again in 60 s" in detail
        assert answer.headers["retry-after"] == "60"
    assert get(strict, good).status_code == 200  # known to be good, so that a stranger at the address is no harm


def test_a_token_that_was_good_is_looked_up_at_every_request(new_coordinator):
    """It is remembered only as one that is no guess: revoked, it is refused at once, and then counts as one."""
    live = new_coordinator("--failure-limit", "1")
    with live.client() as admin:
        issued = admin.create_token(TokenRequest(scope="join", name="partner"))
        path, body = f"{live.url}/v1/sites/{new_name()}", registration().model_dump()
        headers = {"Authorization": f"Bearer {issued.token}"}
        assert httpx.put(path, json=body, headers=headers).status_code == 200
        problem(get(live, "x" * 40), 401, "token_unknown")
        assert httpx.put(path, json=body, headers=headers).status_code == 200
        admin.revoke_token(issued.id)
        problem(httpx.put(path, json=body, headers=headers), 401, "token_unknown")
        problem(httpx.put(path, json=body, headers=headers), 429, "rate_limited")
