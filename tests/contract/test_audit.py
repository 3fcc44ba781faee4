"""The record of administrative acts, over real HTTP: who did what, and what was refused."""

import secrets

import httpx
import pytest

from api.access import TokenRequest
from api.errors import ProblemError
from api.schemas import Heartbeat
from tests.contract.by_hand import RunByHand, SiteByHand, new_name, problem, registration


@pytest.fixture
def admin(patient):
    with patient.client() as client:
        yield client


@pytest.fixture
def since(admin):
    """The acts since the test began, oldest first: act, target, status."""
    newest = max([event.id for event in admin.audit(limit=1).items], default=0)

    def events():
        return sorted((event for event in admin.audit(limit=1000).items if event.id > newest), key=lambda each: each.id)

    return events


def acts(events):
    return [(event.act, event.target, event.status) for event in events]


def send(live, token, method, path, **options):
    return httpx.request(method, live.url + path, headers={"Authorization": f"Bearer {token}"}, **options)


def test_every_administrative_act_is_recorded(patient, admin, since):
    run = RunByHand(patient)
    first, second = run.sites
    admin.pause_run(run.id)
    admin.resume_run(run.id)
    admin.exclude_site(run.id, second.name)
    admin.add_site(run.id, second.name)
    admin.stop_run(run.id)
    for site in run.sites:
        site.agent.heartbeat(site.name, Heartbeat(), 0)
    admin.delete_run(run.id)
    admin.remove_site(first.name)
    issued = admin.create_token(TokenRequest(scope="observer", name="screen"))
    admin.revoke_token(issued.id)
    assert acts(since()) == [
        ("site.register", f"sites/{first.name}", 200),
        ("site.register", f"sites/{second.name}", 200),
        ("run.create", f"runs/{run.id}", 201),
        ("run.start", f"runs/{run.id}/start", 202),
        ("run.pause", f"runs/{run.id}/pause", 202),
        ("run.resume", f"runs/{run.id}/resume", 202),
        ("run.remove-site", f"runs/{run.id}/sites/{second.name}", 202),
        ("run.add-site", f"runs/{run.id}/sites/{second.name}", 202),
        ("run.stop", f"runs/{run.id}/stop", 202),
        ("run.delete", f"runs/{run.id}", 204),
        ("site.remove", f"sites/{first.name}", 204),
        ("token.create", f"tokens/{issued.id}", 201),
        ("token.revoke", f"tokens/{issued.id}", 204),
    ]
    assert {(event.token, event.name, event.scope) for event in since()} == {
        ("join", "join", "join"),
        ("admin", "admin", "admin"),
    }


def test_who_did_it_is_the_token_not_its_secret(patient, admin, since):
    issued = admin.create_token(TokenRequest(scope="admin", name="deputy"))
    spec = {"name": "audited", "task": "x", "steps": 1}
    created = send(patient, issued.token, "POST", "/v1/runs", json=spec)
    assert created.headers["location"] == f"runs/{created.json()['id']}"
    event = since()[-1]
    assert (event.token, event.name, event.scope) == (issued.id, "deputy", "admin")
    assert issued.token not in send(patient, patient.token("admin"), "GET", "/v1/audit").text


def test_refused_acts_are_recorded(patient, admin, since):
    site = SiteByHand(new_name(), "west", patient.url)
    site.register(patient.token("join"))
    problem(send(patient, patient.token("observer"), "POST", "/v1/runs", json={}), 403, "wrong_scope")
    problem(send(patient, site.secret, "DELETE", f"/v1/sites/{site.name}"), 403, "wrong_scope")
    problem(send(patient, patient.token("admin"), "POST", "/v1/runs", json={}), 422, "invalid_request")
    problem(send(patient, patient.token("admin"), "POST", "/v1/runs/nothing/start"), 404, "run_not_found")
    problem(send(patient, patient.token("admin"), "DELETE", "/v1/tokens/admin"), 409, "token_from_settings")
    events = since()[1:]
    assert acts(events) == [
        ("run.create", "runs", 403),
        ("site.remove", f"sites/{site.name}", 403),
        ("run.create", "runs", 422),
        ("run.start", "runs/nothing/start", 404),
        ("token.revoke", "tokens/admin", 409),
    ]
    assert [event.name for event in events] == ["observer", f"site {site.name}", "admin", "admin", "admin"]


def test_what_is_no_act_is_not_recorded(patient, admin, since):
    admin.runs()
    send(patient, secrets.token_urlsafe(32), "POST", "/v1/runs", json={})  # nobody
    problem(send(patient, patient.token("admin"), "PATCH", "/v1/runs"), 405, "http_405")
    assert since() == []


def test_targets_are_printable_and_short(patient, admin, since):
    send(patient, patient.token("observer"), "POST", "/v1/runs/%1b%5b31mred%ff%0a/start")
    send(patient, patient.token("observer"), "DELETE", f"/v1/runs/{'x' * 5000}")
    first, second = since()
    assert first.target == "runs/?[31mred\ufffd?/start"
    assert second.target == "runs/" + "x" * 195


def test_pages_follow_one_another(patient, admin):
    for _ in range(3):
        site = SiteByHand(new_name(), "west", patient.url)
        site.register(patient.token("join"))
        admin.remove_site(site.name)
    whole = admin.audit(limit=1000).items
    assert [event.id for event in whole] == sorted((event.id for event in whole), reverse=True)
    pages, cursor = [], None
    while cursor is not None or not pages:
        page = admin.audit(cursor, 2)
        pages, cursor = pages + page.items, page.next_cursor
    assert pages == whole
    headers = {"Authorization": f"Bearer {patient.token('admin')}"}
    for query in ("cursor=0", "cursor=x", "limit=0", "limit=1001"):
        problem(httpx.get(f"{patient.url}/v1/audit?{query}", headers=headers), 422, "invalid_request")


@pytest.mark.parametrize("scope", ["observer", "join"])
def test_it_is_for_administrators(patient, scope):
    problem(send(patient, patient.token(scope), "GET", "/v1/audit"), 403, "wrong_scope")


def test_a_site_cannot_push_out_what_administrators_did(new_coordinator):
    live = new_coordinator("--failure-limit", "100000")
    with live.client() as admin:
        with pytest.raises(ProblemError):
            admin.start_run("remembered")
        body = registration().model_dump()
        headers = {"Authorization": f"Bearer {live.token('observer')}"}
        with httpx.Client(base_url=live.url, headers=headers) as observer:
            for _ in range(2100):
                assert observer.put("/v1/sites/flood", json=body).status_code == 403
        events = admin.audit(limit=1000)
        counted, cursor = len(events.items), events.next_cursor
        while cursor is not None:
            events = admin.audit(cursor, 1000)
            counted, cursor = counted + len(events.items), events.next_cursor
    assert events.items[-1].target == "runs/remembered/start"
    assert counted == 2001
