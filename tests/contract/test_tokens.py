"""Tokens over real HTTP: who may make them, what they are good for, and how they end."""

import secrets

import httpx
import pytest

from api.access import TokenRequest
from api.client import CoordinatorClient
from api.errors import ProblemError
from api.schemas import Heartbeat
from tests.conftest import wait_until
from tests.contract.by_hand import RunByHand, SiteByHand, new_name, problem, registration


@pytest.fixture
def admin(patient):
    with patient.client() as client:
        yield client


def get(live, token, path="/v1/runs"):
    return httpx.get(live.url + path, headers={"Authorization": f"Bearer {token}"})


def test_a_token_is_good_for_its_scope_until_it_is_revoked(patient, admin):
    issued = admin.create_token(TokenRequest(scope="observer", name="grafana"))
    assert (issued.scope, issued.name, issued.expires_at, issued.from_settings) == ("observer", "grafana", None, False)
    assert get(patient, issued.token).status_code == 200
    with CoordinatorClient(patient.url, issued.token) as observer, pytest.raises(ProblemError) as caught:
        observer.remove_site("nothing")
    assert (caught.value.status, caught.value.code) == (403, "wrong_scope")
    admin.revoke_token(issued.id)
    assert "expired" in problem(get(patient, issued.token), 401, "token_unknown")["detail"]
    with pytest.raises(ProblemError) as caught:
        admin.revoke_token(issued.id)
    assert (caught.value.status, caught.value.code) == (404, "token_not_found")


def test_a_join_token_registers_sites_and_no_more(patient, admin):
    issued = admin.create_token(TokenRequest(scope="join", name="partner"))
    site = SiteByHand(new_name(), "west", patient.url)
    site.register(issued.token)
    problem(get(patient, issued.token), 403, "wrong_scope")
    admin.revoke_token(issued.id)
    assert site.beat().assignments == []  # the site has its own


def test_an_admin_token_makes_tokens(patient, admin):
    issued = admin.create_token(TokenRequest(scope="admin", name="deputy"))
    with CoordinatorClient(patient.url, issued.token) as deputy:
        other = deputy.create_token(TokenRequest(scope="observer", name="screen"))
        assert get(patient, other.token).status_code == 200
        deputy.revoke_token(issued.id)  # its own
    problem(get(patient, issued.token), 401, "token_unknown")
    assert get(patient, other.token).status_code == 200


def test_tokens_are_listed_without_their_secrets(patient, admin):
    issued = admin.create_token(TokenRequest(scope="observer", name="listed", expires_in_s=3600))
    answer = get(patient, patient.token("admin"), "/v1/tokens")
    listed = {token["id"]: token for token in answer.json()["items"]}
    assert listed[issued.id].keys() == {"id", "name", "scope", "created_at", "expires_at", "from_settings"}
    assert listed[issued.id]["expires_at"] > listed[issued.id]["created_at"]
    assert {listed[scope]["scope"] for scope in ("admin", "join", "observer")} == {"admin", "join", "observer"}
    assert issued.token not in answer.text
    created = httpx.post(
        f"{patient.url}/v1/tokens",
        json={"scope": "observer", "name": "located"},
        headers={"Authorization": f"Bearer {patient.token('admin')}"},
    )
    assert created.status_code == 201
    one = get(patient, patient.token("admin"), f"/v1/{created.headers['location']}").json()
    assert one == {name: value for name, value in created.json().items() if name != "token"}


def test_a_token_expires(patient, admin):
    issued = admin.create_token(TokenRequest(scope="observer", name="brief", expires_in_s=1))
    assert get(patient, issued.token).status_code == 200
    wait_until(lambda: get(patient, issued.token).status_code == 401, "the token to expire", 10)
    assert issued.id not in [token.id for token in admin.tokens()]


@pytest.mark.parametrize("scope", ["admin", "join", "observer"])
def test_tokens_of_the_settings_cannot_be_revoked(admin, scope):
    with pytest.raises(ProblemError, match=f"ISTHMUS_{scope.upper()}_TOKEN") as caught:
        admin.revoke_token(scope)
    assert (caught.value.status, caught.value.code) == (409, "token_from_settings")


@pytest.mark.parametrize("scope", ["observer", "join"])
@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/v1/tokens"), ("GET", "/v1/tokens"), ("DELETE", "/v1/tokens/admin")]
)
def test_tokens_are_for_administrators(patient, scope, method, path):
    headers = {"Authorization": f"Bearer {patient.token(scope)}"}
    body = {"json": {"scope": "admin", "name": "mine"}} if method == "POST" else {}
    problem(httpx.request(method, patient.url + path, headers=headers, **body), 403, "wrong_scope")


@pytest.mark.parametrize(
    "changes",
    [{"scope": "site"}, {"scope": "ranks"}, {"name": "No"}, {"expires_in_s": 0}, {"expires_in_s": 10**10}, {"x": 1}],
    ids=str,
)
def test_tokens_that_make_no_sense(patient, changes):
    headers = {"Authorization": f"Bearer {patient.token('admin')}"}
    body = {"scope": "observer", "name": "odd"} | changes
    problem(httpx.post(f"{patient.url}/v1/tokens", json=body, headers=headers), 422, "invalid_request")


def test_a_secret_that_is_in_use_cannot_be_claimed(patient, admin):
    issued = admin.create_token(TokenRequest(scope="observer", name="claimed"))
    headers = {"Authorization": f"Bearer {patient.token('join')}"}
    body = registration(issued.token).model_dump()
    answer = httpx.put(f"{patient.url}/v1/sites/{new_name()}", json=body, headers=headers)
    problem(answer, 409, "secret_taken")


def test_a_removed_site_and_its_ranks_are_unknown(patient, admin):
    """Ranks may ask how their run has ended for a while after it has, but not those of a site that was removed."""
    run = RunByHand(patient)
    removed, kept = run.sites
    admin.stop_run(run.id)
    for site in run.sites:
        site.agent.heartbeat(site.name, Heartbeat(), 0)
    assert run.view.status == "stopped"
    path = f"/v1/runs/{run.id}"
    assert [get(patient, site.seat, path).status_code for site in run.sites] == [200, 200]
    admin.remove_site(removed.name)
    problem(get(patient, removed.seat, path), 401, "token_unknown")
    problem(get(patient, removed.secret, f"/v1/sites/{removed.name}"), 401, "token_unknown")
    assert get(patient, kept.seat, path).status_code == 200


def test_no_secret_is_in_any_file(patient, admin):
    """Redis's append-only file has every write; the log is there, too."""
    issued = admin.create_token(TokenRequest(scope="observer", name="hashed"))
    secret = secrets.token_urlsafe(32)
    SiteByHand(new_name(), "west", patient.url, secret=secret).register(patient.token("join"))
    files = [path for path in patient.directory.rglob("*") if path.is_file() and not path.name.endswith("-token")]
    everything = b"".join(path.read_bytes() for path in files)
    assert issued.id.encode() in everything
    for token in (issued.token, secret, patient.token("admin")):
        assert token.encode() not in everything
