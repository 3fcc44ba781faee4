"""Requests and refusals that one request alone does not show, over real HTTP to a real coordinator.

Those that it does are in `bad_requests`.
"""

import hashlib
import json
import secrets
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from api.client import CoordinatorClient
from api.errors import ProblemError
from api.schemas import Heartbeat, RunStatus
from api.specs import RunSpec
from tests.conftest import wait_until
from tests.contract.by_hand import TASK, RunByHand, SiteByHand, new_name, problem, registration

ZERO = "0" * 64


@pytest.fixture(scope="module")
def run(patient):
    """A run of two sites that waits for step 1."""
    return RunByHand(patient)


@pytest.fixture(scope="module")
def tokens(patient, run):
    scopes = {scope: patient.token(scope) for scope in ("admin", "join", "observer")}
    return scopes | {"site": run.sites[0].secret, "ranks": run.sites[0].seat, "unknown": secrets.token_urlsafe(32)}


@pytest.fixture(scope="module")
def http(patient):
    with httpx.Client(base_url=patient.url, timeout=60) as client:
        yield client


@pytest.fixture
def send(http, tokens):
    """Sends a request with the token of a scope."""

    def send(scope, method, path, **options):
        headers = options.pop("headers", {}) | ({"Authorization": f"Bearer {tokens[scope]}"} if scope else {})
        return http.request(method, path, headers=headers, **options)

    return send


def spec(**changes):
    return {"name": "errors", "task": TASK, "steps": 3} | changes


# --- tokens -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scopes", "method", "path", "body"),
    [
        ("observer site ranks", "PUT", "/v1/sites/NAME", registration().model_dump()),
        ("join site ranks", "GET", "/v1/sites", None),
        ("join ranks", "GET", "/v1/sites/SITE", None),
        ("join observer site ranks", "DELETE", "/v1/sites/SITE", None),
        ("admin join observer ranks", "POST", "/v1/sites/SITE/heartbeat", {}),
        ("admin join observer ranks", "POST", "/v1/sites/SITE/leave", None),
        ("join observer site ranks", "POST", "/v1/runs", spec()),
        ("join site ranks", "GET", "/v1/runs", None),
        ("join", "GET", "/v1/runs/RUN", None),
        ("join observer site ranks", "DELETE", "/v1/runs/RUN", None),
        ("join observer site ranks", "POST", "/v1/runs/RUN/start", None),
        ("join observer site ranks", "POST", "/v1/runs/RUN/stop", None),
        ("join observer site ranks", "POST", "/v1/runs/RUN/pause", None),
        ("join observer site ranks", "POST", "/v1/runs/RUN/resume", None),
        ("join observer site ranks", "PUT", "/v1/runs/RUN/sites/SITE", None),
        ("join observer site ranks", "DELETE", "/v1/runs/RUN/sites/SITE", None),
        (
            "admin join observer site",
            "POST",
            "/v1/runs/RUN/sites/SITE/caught-up",
            {"attempt": 1, "position": {"seq": 0, "hash": ZERO}},
        ),
        ("join", "GET", "/v1/runs/RUN/sites", None),
        ("join site ranks", "GET", "/v1/runs/RUN/outer-rounds", None),
        ("join site ranks", "GET", "/v1/runs/RUN/model", None),
        ("admin join observer ranks", "PUT", "/v1/runs/RUN/sites/SITE/seat", {"attempt": 1, "secret": "s" * 32}),
        ("admin join observer site", "PUT", "/v1/runs/RUN/sites/SITE/layout", {"attempt": 1, "layout": {}}),
        ("admin join observer site", "PUT", "/v1/runs/RUN/sites/SITE/start", {"parameters": ZERO}),
        ("admin join observer site", "PUT", "/v1/runs/RUN/sites/SITE/final", {"seq": 0, "digest": ZERO}),
        ("admin join observer site", "PUT", "/v1/runs/RUN/regions/west/steps/1/contributions/SITE/parts/0", None),
        (
            "admin join observer site",
            "PUT",
            "/v1/runs/RUN/regions/west/steps/1/abstentions/SITE",
            {"position": {"seq": 0, "hash": ZERO}, "reason": "none"},
        ),
        ("join site", "GET", "/v1/runs/RUN/regions/west/steps/1/update/parts/0", None),
        ("join site", "GET", "/v1/runs/RUN/regions/west/log", None),
        ("join site", "GET", "/v1/runs/RUN/regions/west/log/0/parts/0", None),
        (
            "admin join observer site",
            "PUT",
            "/v1/runs/RUN/outer-rounds/1/fragments/0/sites/SITE",
            {"digest": ZERO},
        ),
        ("join observer site", "PUT", f"/v1/blobs/{ZERO}", None),
        ("join", "GET", f"/v1/blobs/{ZERO}", None),
        ("admin join observer site", "POST", "/v1/runs/RUN/metrics", {"site": "SITE", "points": []}),
        ("join site", "GET", "/v1/runs/RUN/metrics", None),
    ],
    ids=lambda value: value if isinstance(value, str) and value.startswith(("/", "PUT", "POST", "GET")) else "",
)
def test_each_scope_has_its_routes(send, run, scopes, method, path, body):
    site = run.sites[0].name
    path = path.replace("RUN", run.id).replace("SITE", site).replace("NAME", new_name())
    text = None if body is None else json.dumps(body).replace("SITE", site)
    for scope in scopes.split():
        headers = {"Content-Type": "application/json"} if body is not None else {}
        answer = send(scope, method, path, content=text, headers=headers)
        assert scope in problem(answer, 403, "wrong_scope")["detail"]
    assert run.view.status is RunStatus.RUNNING


def test_secrets_that_are_tokens_of_others_are_refused(send, run, patient):
    """Or else whoever may register could turn everybody's join token into a site's."""
    for scope in ("join", "admin", "observer", "site", "ranks"):
        secret = {"site": run.sites[1].secret, "ranks": run.sites[1].seat}.get(scope) or patient.token(scope)
        body = registration(secret).model_dump()
        problem(send("join", "PUT", f"/v1/sites/{new_name()}", json=body), 409, "secret_taken")
        seat = {"attempt": 1, "secret": secret}
        answer = send("site", "PUT", f"/v1/runs/{run.id}/sites/{run.sites[0].name}/seat", json=seat)
        problem(answer, 409, "secret_taken")
    assert send("join", "PUT", f"/v1/sites/{new_name()}", json=registration().model_dump()).status_code == 200
    assert send("observer", "GET", "/v1/runs").status_code == 200


# --- specs ------------------------------------------------------------------------------------------------------------


def test_params_come_back_unchanged(send):
    params = {"text": "ä€😀\0", "numbers": [1, -(2**63) + 1, 0.1, 1e300, None, True], "deep": {"a": [[[{}]]]}}
    run = send("admin", "POST", "/v1/runs", json=spec(params=params)).json()
    assert send("admin", "GET", f"/v1/runs/{run['id']}").json()["spec"]["params"] == params
    assert send("admin", "DELETE", f"/v1/runs/{run['id']}").status_code == 204


# --- creating, starting, deleting -------------------------------------------------------------------------------------


def test_an_idempotency_key_creates_one_run(send):
    headers = {"Idempotency-Key": secrets.token_hex(8)}
    first = send("admin", "POST", "/v1/runs", json=spec(), headers=headers)
    assert first.status_code == 201
    again = send("admin", "POST", "/v1/runs", json=spec(optimizer={}), headers=headers)
    assert again.json()["id"] == first.json()["id"]
    other = send("admin", "POST", "/v1/runs", json=spec())
    assert other.json()["id"] != first.json()["id"]


def test_an_idempotency_key_does_not_bring_back_a_deleted_run(send):
    headers = {"Idempotency-Key": secrets.token_hex(8)}
    run = send("admin", "POST", "/v1/runs", json=spec(), headers=headers).json()["id"]
    assert send("admin", "DELETE", f"/v1/runs/{run}").status_code == 204
    assert run in problem(send("admin", "POST", "/v1/runs", json=spec(), headers=headers), 410, "run_deleted")["detail"]
    problem(send("admin", "GET", f"/v1/runs/{run}"), 404, "run_not_found")


def test_an_idempotency_key_sent_many_times_at_once(patient):
    key = secrets.token_hex(8)
    body = RunSpec(name="errors", task=TASK, steps=3)
    with ThreadPoolExecutor(8) as pool:
        runs = list(pool.map(lambda _: patient.client().create_run(body, key).id, range(8)))
    assert len(set(runs)) == 1


def test_starting_names_every_fault(new_coordinator):
    live = new_coordinator("--lease-s", "1", "--tick-s", "0.2")
    admin = live.client()
    with pytest.raises(ProblemError, match="no site that allows task 'by-hand' is online"):
        admin.start_run(admin.create_run(RunSpec(name="none", task=TASK, steps=1)).id)
    names = {"lost": (TASK,), "left": (TASK,), "other": ("other-task",), "here": (TASK,)}
    sites = {name: SiteByHand(name, "west", live.url) for name in names}
    with CoordinatorClient(live.url, live.token("join")) as join:
        for name, tasks in names.items():
            join.register_site(name, registration(sites[name].secret, tasks=tasks))
    sites["left"].agent.leave("left")
    wait_until(lambda: admin.site("lost").status == "lost", "the end of a lease", 30)
    run = admin.create_run(RunSpec(name="faults", task=TASK, steps=1, sites=[*names, "unknown"])).id

    def faults():
        for name in ("other", "here"):
            sites[name].agent.heartbeat(name, Heartbeat(), 0)
        answer = httpx.post(
            f"{live.url}/v1/runs/{run}/start", headers={"Authorization": f"Bearer {live.token('admin')}"}
        )
        faults = sorted(problem(answer, 409, "sites_not_ready")["errors"])
        remedies.update(fault.partition(": ")[2] for fault in faults)
        return [fault.partition(": ")[0] for fault in faults]

    remedies: set[str] = set()

    expected = [
        "site left is left",
        "site lost is lost",
        "site other does not allow task 'by-hand'; it allows other-task",
        "site unknown is not registered",
    ]
    wait_until(lambda: faults() == expected, "an answer within the leases", 30)
    assert {"its agent was stopped; start it again", "start its agent with `isthmus agent`"} < remedies
    assert any("its agent is silent" in remedy and "see there whether it runs" in remedy for remedy in remedies)
    assert admin.run(run).status is RunStatus.PENDING
    last = admin.create_run(RunSpec(name="lost", task=TASK, steps=1, sites=["here"])).id
    wait_until(lambda: _started(live, sites["here"], last), "a start within the lease", 30)
    demanding = RunSpec(name="few", task=TASK, steps=1, rounds={"min_sites": 2})
    few = admin.create_run(demanding).id

    def too_few():
        sites["here"].agent.heartbeat("here", Heartbeat(), 0)
        with pytest.raises(ProblemError) as caught:
            admin.start_run(few)
        return caught.value.errors == ["region west has 1 sites, rounds.min_sites asks for 2"]

    wait_until(too_few, "an answer within the lease", 30)


def _started(live, site, run):
    site.agent.heartbeat(site.name, Heartbeat(), 0)
    try:
        return live.client().start_run(run)
    except ProblemError:
        return None


def test_deleting(patient, send):
    pending = send("admin", "POST", "/v1/runs", json=spec()).json()["id"]
    assert send("admin", "DELETE", f"/v1/runs/{pending}").status_code == 204
    problem(send("admin", "GET", f"/v1/runs/{pending}"), 404, "run_not_found")
    run = RunByHand(patient)
    run.sites[0].contribute(1)
    assert "stop it" in problem(send("admin", "DELETE", f"/v1/runs/{run.id}"), 409, "wrong_status")["detail"]
    run.admin.stop_run(run.id)
    problem(send("admin", "DELETE", f"/v1/runs/{run.id}"), 409, "wrong_status")
    for site in run.sites:
        site.agent.heartbeat(site.name, Heartbeat(), 0)
    assert run.view.status is RunStatus.STOPPED
    problem(send("admin", "POST", f"/v1/runs/{run.id}/start"), 410, "run_ended")
    assert send("admin", "DELETE", f"/v1/runs/{run.id}").status_code == 204
    for path in ("", "/regions/west/log", "/metrics", "/outer-rounds"):
        problem(send("admin", "GET", f"/v1/runs/{run.id}{path}"), 404, "run_not_found")
    assert run.id not in [other["id"] for other in send("admin", "GET", "/v1/runs").json()["items"]]
    assert send(None, "GET", "/healthz").json()["status"] == "ok"


# --- sites ------------------------------------------------------------------------------------------------------------


def test_registering(send, patient):
    name = new_name()
    body = registration().model_dump()
    first = send("join", "PUT", f"/v1/sites/{name}", json=body)
    assert first.status_code == 200
    again = send("join", "PUT", f"/v1/sites/{name}", json=body | {"ranks": 2})
    assert again.json()["site"]["registered_at"] == first.json()["site"]["registered_at"]
    assert again.json()["site"]["ranks"] == 2


# --- bodies -----------------------------------------------------------------------------------------------------------


def test_blobs_with_other_bytes_than_their_name_says(send, patient):
    body = secrets.token_bytes(5000)
    digest = hashlib.sha256(body).hexdigest()
    wrong = problem(send("ranks", "PUT", f"/v1/blobs/{digest}", content=body[:-1]), 422, "digest_mismatch")
    assert wrong["context"]["digest"] == digest
    problem(send("ranks", "GET", f"/v1/blobs/{digest}"), 404, "blob_not_found")
    assert not list((patient.directory / "blobs" / "incoming").iterdir())
    assert send("ranks", "HEAD", f"/v1/blobs/{digest}").status_code == 404
    assert send("ranks", "PUT", f"/v1/blobs/{digest}", content=body).status_code == 201
    assert send("ranks", "PUT", f"/v1/blobs/{digest}", content=body).status_code == 200
    head = send("ranks", "HEAD", f"/v1/blobs/{digest}")
    assert (head.status_code, head.headers["content-length"]) == (200, "5000")
    assert send("observer", "GET", f"/v1/blobs/{digest}").content == body


# --- metrics ----------------------------------------------------------------------------------------------------------


def test_metrics_that_are_no_numbers_are_null(patient):
    run = RunByHand(patient)
    site = run.sites[0]
    headers = {"Authorization": f"Bearer {site.seat}", "Content-Type": "application/json"}
    path = f"{run.url}/v1/runs/{run.id}/metrics"
    values = (
        '{"nan": NaN, "inf": Infinity, "big": 1e999, "low": -1e999, "null": null, "loss": 0.5, "huge": 1' + "0" * 300
    )
    text = f'{{"site": "{site.name}", "points": [{{"step": 1, "values": {values}}}}}]}}'
    assert httpx.post(path, content=text, headers=headers).status_code == 204
    answer = httpx.get(path, headers=headers)

    def no_constant(name):
        raise AssertionError(name)

    (point,) = json.loads(answer.text, parse_constant=no_constant)["items"]
    assert (point["site"], point["step"]) == (site.name, 1)
    nothing = dict.fromkeys(("nan", "inf", "big", "low", "null"))
    assert point["values"] == nothing | {"loss": 0.5, "huge": 1e300}


def test_every_answer_forbids_caching_and_framing(send):
    for answer in (send("admin", "GET", "/v1/runs"), send(None, "GET", "/v1/runs"), send(None, "GET", "/nothing")):
        assert answer.headers["cache-control"] == "no-store"
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
