"""Requests that must be refused, sent over real HTTP to a real coordinator: status and code of each."""

import hashlib
import json
import secrets
import socket
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import httpx
import pytest

from api.app import CONTRIBUTION_LIMIT
from api.client import CoordinatorClient
from api.errors import ProblemError
from api.payload import MEDIA_TYPE
from api.schemas import PROTOCOL_VERSION, Heartbeat, RunSpec, RunStatus
from tests.conftest import wait_until
from tests.contract.by_hand import LAYOUT, TASK, RunByHand, SiteByHand, new_name, problem, registration

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


def test_a_token_is_needed(http, run):
    for path in ("/v1/runs", "/v1/sites", f"/v1/runs/{run.id}", f"/v1/blobs/{ZERO}"):
        answer = http.get(path)
        problem(answer, 401, "token_missing")
        assert answer.headers["www-authenticate"] == "Bearer"
        for value in ("", "Bearer", "Basic YTpi", "bearer"):
            problem(http.get(path, headers={"Authorization": value}), 401, "token_missing")
        for value in ("Bearer x", f"Bearer {'x' * 5000}", "Bearer a b", b"Bearer \xff\xfe"):
            problem(http.get(path, headers={"Authorization": value}), 401, "token_unknown")


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


def test_a_token_is_good_for_its_own_site_only(send, run, patient):
    other = run.sites[1].name
    problem(send("site", "POST", f"/v1/sites/{other}/heartbeat", json={}), 403, "wrong_site")
    problem(send("site", "POST", f"/v1/sites/{other}/leave"), 403, "wrong_site")
    problem(send("site", "GET", f"/v1/sites/{other}"), 403, "wrong_site")
    seat = {"attempt": 1, "secret": "s" * 32}
    problem(send("site", "PUT", f"/v1/runs/{run.id}/sites/{other}/seat", json=seat), 403, "wrong_site")
    problem(
        send("ranks", "PUT", f"/v1/runs/{run.id}/sites/{other}/final", json={"seq": 0, "digest": ZERO}),
        403,
        "wrong_site",
    )
    path = f"/v1/runs/{run.id}/regions/west/steps/1/contributions/{other}/parts/0"
    headers = {"Content-Type": MEDIA_TYPE}
    problem(send("ranks", "PUT", path, content=run.sites[1].message(1), headers=headers), 403, "wrong_site")
    report = {"site": other, "points": []}
    problem(send("ranks", "POST", f"/v1/runs/{run.id}/metrics", json=report), 403, "wrong_site")
    problem(send("ranks", "GET", "/v1/runs/another-run"), 403, "wrong_run")


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


def test_a_seat_is_for_members_of_this_attempt(send, run):
    seat = {"attempt": 2, "secret": secrets.token_urlsafe(32)}
    problem(send("site", "PUT", f"/v1/runs/{run.id}/sites/{run.sites[0].name}/seat", json=seat), 409, "stale_attempt")
    seat = {"attempt": 1, "secret": "too short"}
    problem(send("site", "PUT", f"/v1/runs/{run.id}/sites/{run.sites[0].name}/seat", json=seat), 422, "invalid_request")


# --- things that are not there ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scope", "method", "path", "status", "code"),
    [
        ("admin", "GET", "/v1/runs/nothing", 404, "run_not_found"),
        ("admin", "DELETE", "/v1/runs/nothing", 404, "run_not_found"),
        ("admin", "POST", "/v1/runs/nothing/start", 404, "run_not_found"),
        ("admin", "POST", "/v1/runs/nothing/stop", 404, "run_not_found"),
        ("admin", "GET", "/v1/runs/nothing/model", 404, "run_not_found"),
        ("admin", "GET", "/v1/runs/nothing/metrics", 404, "run_not_found"),
        ("admin", "GET", "/v1/runs/nothing/outer-rounds", 404, "run_not_found"),
        ("admin", "GET", "/v1/runs/nothing/regions/west/log", 404, "run_not_found"),
        ("admin", "GET", f"/v1/runs/{'x' * 81}", 422, "invalid_request"),
        ("admin", "GET", "/v1/runs/%00", 404, "run_not_found"),
        ("admin", "GET", "/v1/runs/%ff%fe", 404, "run_not_found"),
        ("admin", "GET", "/v1/sites/nothing", 404, "site_not_found"),
        ("admin", "DELETE", "/v1/sites/nothing", 404, "site_not_found"),
        ("admin", "GET", "/v1/sites/UPPER", 422, "invalid_request"),
        ("admin", "GET", f"/v1/blobs/{ZERO}", 404, "blob_not_found"),
        ("admin", "GET", "/v1/blobs/short", 422, "invalid_request"),
        ("admin", "GET", f"/v1/blobs/{'F' * 64}", 422, "invalid_request"),
        ("admin", "GET", f"/v1/blobs/{ZERO}%0a", 422, "invalid_request"),
        ("admin", "PUT", f"/v1/blobs/..%2f{ZERO[3:]}", 404, "no_such_route"),
        ("admin", "GET", "/v1/nothing", 404, "no_such_route"),
        ("admin", "PATCH", "/v1/runs", 405, "http_405"),
        ("admin", "GET", "/v1/runs/RUN/regions/north/log", 404, "region_not_found"),
        ("admin", "GET", "/v1/runs/RUN/regions/west/log/1/parts/0", 404, "entry_not_found"),
        ("admin", "GET", "/v1/runs/RUN/regions/west/log/-1/parts/0", 422, "invalid_request"),
        ("admin", "GET", f"/v1/runs/RUN/regions/west/log/{10**30}/parts/0", 422, "invalid_request"),
        ("admin", "GET", "/v1/runs/RUN/regions/west/log?wait=nan", 422, "invalid_request"),
        ("admin", "GET", "/v1/runs/RUN/regions/west/log?wait=-1", 422, "invalid_request"),
        ("admin", "GET", "/v1/runs/RUN/regions/north/steps/1/update/parts/0", 404, "region_not_found"),
        ("admin", "GET", "/v1/runs/RUN/metrics?max_points=0", 422, "invalid_request"),
        ("admin", "GET", "/v1/runs/RUN/model", 409, "no_model"),
        ("admin", "DELETE", "/v1/runs/RUN", 409, "wrong_status"),
        ("admin", "DELETE", "/v1/sites/SITE", 409, "site_in_use"),
        (None, "GET", "/nothing", 404, "no_such_route"),
        (None, "GET", "/web/nothing.js", 404, "no_such_route"),
        (None, "GET", "/web/%2e%2e/app.py", 404, "no_such_route"),
        (None, "GET", "/web/..%2fapp.py", 404, "no_such_route"),
        (None, "GET", "/web/%2e%2e%2f%2e%2e%2f%2e%2e%2fetc%2fpasswd", 404, "no_such_route"),
        (None, "GET", "/web//etc/passwd", 404, "no_such_route"),
        (None, "GET", "/web/%00", 404, "no_such_route"),
        (None, "POST", "/web/app.js", 405, "http_405"),
    ],
)
def test_what_is_not_there_or_not_possible_now(send, run, scope, method, path, status, code):
    path = path.replace("RUN", run.id).replace("SITE", run.sites[0].name)
    problem(send(scope, method, path), status, code)


def test_removed_sites_are_unknown(patient, send):
    site = SiteByHand(new_name(), "west", patient.url)
    site.register(patient.token("join"))
    assert site.agent.heartbeat(site.name, Heartbeat(), 0).assignments == []
    patient.client().remove_site(site.name)
    with pytest.raises(ProblemError) as caught:
        site.agent.heartbeat(site.name, Heartbeat(), 0)
    assert (caught.value.status, caught.value.code) == (401, "token_unknown")


# --- specs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"outer": {"every": 4}}, "outer.every = 4 is more than steps = 3"),
        ({"outer": {"every": 0}}, "body.outer.every"),
        ({"outer": {"every": 1, "fragments": 0}}, "body.outer.fragments"),
        ({"optimizer": {"k": 2000, "chunk": 32}}, "k must be 1 to 1024 for chunks of 32 x 32, got 2000"),
        ({"optimizer": {"k": 0}}, "body.optimizer.k"),
        ({"optimizer": {"chunk": 63}}, "body.optimizer.chunk"),
        ({"optimizer": {"lr": 0}}, "body.optimizer.lr"),
        ({"optimizer": {"warmup": 4}}, "optimizer.warmup = 4"),
        ({"surprise": 1}, "body.surprise"),
        ({"optimizer": {"momentum": 0.9}}, "body.optimizer.momentum"),
        ({"sites": ["a", "b", "a"]}, "names a site twice: a, a, b"),
        ({"sites": []}, "body.sites"),
        ({"sites": ["A"]}, "body.sites.0"),
        ({"steps": 0}, "body.steps"),
        ({"steps": 10**10}, "body.steps"),
        ({"steps": "three"}, "body.steps"),
        ({"name": "../../x"}, "body.name"),
        ({"name": "x" * 64}, "body.name"),
        ({"name": "x\n"}, "body.name"),
        ({"task": None}, "body.task"),
        ({"seed": -1}, "body.seed"),
        ({"params": []}, "body.params"),
        ({"params": {"x": 2**63}}, "64 bits"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_specs_that_make_no_sense(send, changes, named):
    body = problem(send("admin", "POST", "/v1/runs", json=spec(**changes)), 422, "invalid_request")
    assert named in body["detail"]
    assert body["errors"]


@pytest.mark.parametrize(
    ("params", "status"),
    [
        ('{"x": NaN}', 422),
        ('{"x": [1e999]}', 422),
        ('{"x": "\\ud800"}', 422),
        ('{"\\ud800": 1}', 422),
        ('{"x": ' + "9" * 400 + "}", 422),
        ('{"x": ' + "[" * 40 + "]" * 40 + "}", 422),
        ('{"x": ' + "[" * 230 + "]" * 230 + "}", 422),
        ('{"x": ' + "[" * 100_000 + "]" * 100_000 + "}", 400),
        ('{"x": ' + "9" * 5000 + "}", 400),
    ],
    ids=["NaN", "1e999", "surrogate", "surrogate key", "huge", "deep", "deeper", "deepest", "hugest"],
)
def test_hostile_params_are_refused_and_spoil_nothing(send, params, status):
    """A spec that was taken in but cannot be read again would break every list of runs."""
    text = json.dumps(spec())[:-1] + f', "params": {params}}}'
    answer = send("admin", "POST", "/v1/runs", content=text, headers={"Content-Type": "application/json"})
    problem(answer, status, "invalid_request" if status == 422 else "http_400")
    assert send("admin", "GET", "/v1/runs").status_code == 200


def test_params_come_back_unchanged(send):
    params = {"text": "ä€😀\0", "numbers": [1, -(2**63) + 1, 0.1, 1e300, None, True], "deep": {"a": [[[{}]]]}}
    run = send("admin", "POST", "/v1/runs", json=spec(params=params)).json()
    assert send("admin", "GET", f"/v1/runs/{run['id']}").json()["spec"]["params"] == params
    assert send("admin", "DELETE", f"/v1/runs/{run['id']}").status_code == 204


@pytest.mark.parametrize("body", ["", "{", "[]", "null", '"spec"', b"\xff\xfe", b"\0"])
def test_bodies_that_are_no_json_object(send, body):
    answer = send("admin", "POST", "/v1/runs", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 422)
    problem(answer, answer.status_code, answer.json()["code"])


# --- creating, starting, deleting -------------------------------------------------------------------------------------


def test_an_idempotency_key_creates_one_run(send):
    headers = {"Idempotency-Key": secrets.token_hex(8)}
    first = send("admin", "POST", "/v1/runs", json=spec(), headers=headers)
    assert first.status_code == 201
    again = send("admin", "POST", "/v1/runs", json=spec(optimizer={}), headers=headers)
    assert again.json()["id"] == first.json()["id"]
    problem(send("admin", "POST", "/v1/runs", json=spec(steps=4), headers=headers), 422, "idempotency_key")
    other = send("admin", "POST", "/v1/runs", json=spec())
    assert other.json()["id"] != first.json()["id"]
    long = {"Idempotency-Key": "x" * 129}
    problem(send("admin", "POST", "/v1/runs", json=spec(), headers=long), 422, "invalid_request")


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
        return sorted(problem(answer, 409, "sites_not_ready")["errors"])

    expected = [
        "site left is left",
        "site lost is lost",
        "site other does not allow task 'by-hand'; it allows other-task",
        "site unknown is not registered",
    ]
    wait_until(lambda: faults() == expected, "an answer within the leases", 30)
    assert admin.run(run).status is RunStatus.PENDING
    last = admin.create_run(RunSpec(name="lost", task=TASK, steps=1, sites=["here"])).id
    wait_until(lambda: _started(live, sites["here"], last), "a start within the lease", 30)
    demanding = RunSpec(name="few", task=TASK, steps=1, sites=["here"], rounds={"min_sites": 2})
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
    taken = problem(send("join", "PUT", f"/v1/sites/{name}", json=registration().model_dump()), 409, "name_taken")
    assert f"isthmus site remove {name}" in taken["detail"]
    for version in (0, PROTOCOL_VERSION + 1):
        answer = send("join", "PUT", f"/v1/sites/{name}", json=body | {"protocol_version": version})
        assert f"protocol {version}" in problem(answer, 426, "protocol_version")["detail"]
    for path in (f"/v1/sites/{name}x" * 9, "/v1/sites/Name", "/v1/sites/-name", "/v1/sites/%2e%2e"):
        assert send("join", "PUT", path, json=body).status_code in (404, 422)
    for changes in ({"tasks": []}, {"secret": "short"}, {"ranks": 0}, {"region": "No"}, {"surprise": 1}):
        answer = send("join", "PUT", f"/v1/sites/{new_name()}", json=body | changes)
        problem(answer, 422, "invalid_request")


# --- bodies -----------------------------------------------------------------------------------------------------------


def answer_to_headers(url, method, path, token, *headers):
    """What is answered to a request of which only the headers are sent: status line, headers, body."""
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
        lines = [f"{method} {path} HTTP/1.1", f"Host: {address.netloc}", f"Authorization: Bearer {token}", *headers]
        connection.sendall("\r\n".join([*lines, "Connection: close", "", ""]).encode())
        received = b""
        while b"\r\n\r\n" not in received or not received.endswith(b"}"):
            block = connection.recv(65536)
            if not block:
                break
            received += block
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split()[1]), head.decode().lower(), json.loads(body)


@pytest.mark.parametrize(
    ("path", "size", "status", "code"),
    [
        ("/v1/runs", (32 << 20) + 1, 413, "body_too_large"),
        ("/v1/runs/RUN/regions/west/steps/1/contributions/SITE/parts/0", CONTRIBUTION_LIMIT + 1, 413, "body_too_large"),
        (f"/v1/blobs/{ZERO}", (64 << 30) + 1, 413, "body_too_large"),
        ("/v1/sites/blobs/heartbeat", (32 << 20) + 1, 413, "body_too_large"),
        ("/v1/runs/RUN/sites/blobs/layout", (32 << 20) + 1, 413, "body_too_large"),
        ("/v1/runs", 10**19, 413, "body_too_large"),
    ],
)
def test_too_large_bodies_are_refused_before_they_are_read(run, tokens, path, size, status, code):
    path = path.replace("RUN", run.id).replace("SITE", run.sites[0].name)
    answer = answer_to_headers(run.url, "PUT", path, tokens["ranks"], f"Content-Length: {size}")
    assert (answer[0], answer[2]["code"]) == (status, code)
    assert "content-type: application/problem+json" in answer[1]
    assert answer[2]["context"]["limit"] < size


@pytest.mark.parametrize("length", [1, 1 << 20, 64 << 30])
@pytest.mark.parametrize(("method", "path"), [("PUT", f"/v1/blobs/{ZERO}"), ("POST", "/v1/runs"), ("PUT", "/v1/x")])
def test_tokens_are_looked_at_before_the_body_is_read(run, method, path, length):
    """Of each request only the headers are sent: an answer that needs the body would never come."""
    unknown = answer_to_headers(run.url, method, path, secrets.token_urlsafe(32), f"Content-Length: {length}")
    assert (unknown[0], unknown[2]["code"]) == (401, "token_unknown")
    assert "www-authenticate: bearer" in unknown[1]
    missing = answer_to_headers(run.url, method, path, "", f"Content-Length: {length}")
    assert (missing[0], missing[2]["code"]) == (401, "token_missing")


@pytest.mark.parametrize(
    ("scope", "method", "path"),
    [
        ("observer", "PUT", f"/v1/blobs/{ZERO}"),
        ("observer", "POST", "/v1/runs"),
        ("ranks", "PUT", "/v1/sites/SITE"),
        ("join", "POST", "/v1/sites/SITE/heartbeat"),
        ("site", "PUT", "/v1/runs/RUN/regions/west/steps/1/contributions/SITE/parts/0"),
        ("site", "PUT", "/v1/runs/RUN/sites/SITE/layout"),
    ],
)
def test_scopes_are_looked_at_before_the_body_is_read(run, tokens, scope, method, path):
    path = path.replace("RUN", run.id).replace("SITE", run.sites[0].name)
    answer = answer_to_headers(run.url, method, path, tokens[scope], "Content-Length: 1000")
    assert (answer[0], answer[2]["code"]) == (403, "wrong_scope")


def test_sites_and_runs_are_looked_at_before_the_body_is_read(run, tokens):
    other = run.sites[1].name
    for path, code in (
        (f"/v1/runs/{run.id}/sites/{other}/layout", "wrong_site"),
        (f"/v1/runs/another-run/sites/{run.sites[0].name}/layout", "wrong_run"),
    ):
        answer = answer_to_headers(run.url, "PUT", path, tokens["ranks"], "Content-Length: 1000")
        assert (answer[0], answer[2]["code"]) == (403, code)


def test_bodies_without_length_or_compressed(run, tokens):
    path = f"/v1/blobs/{ZERO}"
    chunked = answer_to_headers(run.url, "PUT", path, tokens["ranks"], "Transfer-Encoding: chunked")
    assert (chunked[0], chunked[2]["code"]) == (411, "length_required")
    packed = answer_to_headers(run.url, "PUT", path, tokens["ranks"], "Content-Encoding: gzip", "Content-Length: 10")
    assert (packed[0], packed[2]["code"]) == (415, "compressed_body")


@pytest.mark.parametrize("media_type", ["application/json", "application/octet-stream", "", None])
def test_contributions_have_their_media_type(run, tokens, http, media_type):
    headers = {"Authorization": f"Bearer {tokens['ranks']}"} | (
        {} if media_type is None else {"Content-Type": media_type}
    )
    answer = http.put(run.sites[0].path(1), content=run.sites[0].message(1), headers=headers)
    assert MEDIA_TYPE in problem(answer, 415, "media_type")["detail"]


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


@pytest.mark.parametrize(
    "points",
    [
        '[{"step": 1, "values": {"loss": "low"}}]',
        '[{"step": -1, "values": {}}]',
        '[{"step": 1, "values": {"' + "x" * 65 + '": 1}}]',
        '[{"step": 1, "values": {"\\ud800": 1}}]',
        '[{"step": 1, "values": {"x": 1' + "0" * 400 + "}}]",
        '[{"step": 1, "values": {' + ", ".join(f'"{number}": 1' for number in range(65)) + "}}]",
        "[" + ", ".join(['{"step": 1, "values": {}}'] * 1001) + "]",
        '[{"step": 1, "values": {}, "at": 1}]',
        "{}",
    ],
    ids=["text", "step", "long name", "surrogate", "huge", "many values", "many points", "surplus", "object"],
)
def test_metrics_that_make_no_sense(send, run, points):
    text = f'{{"site": "{run.sites[0].name}", "points": {points}}}'
    headers = {"Content-Type": "application/json"}
    answer = send("ranks", "POST", f"/v1/runs/{run.id}/metrics", content=text, headers=headers)
    problem(answer, 422, "invalid_request")
    assert send("observer", "GET", f"/v1/runs/{run.id}/metrics").status_code == 200


def test_a_reason_or_detail_that_is_no_text(send, run):
    """Half of a surrogate pair cannot be stored as UTF-8."""
    path = f"/v1/runs/{run.id}/regions/west/steps/1/abstentions/{run.sites[0].name}"
    text = f'{{"position": {{"seq": 0, "hash": "{ZERO}"}}, "reason": "\\ud800"}}'
    headers = {"Content-Type": "application/json"}
    problem(send("ranks", "PUT", path, content=text, headers=headers), 422, "invalid_request")
    text = '{"processes": [{"run": "x", "attempt": 1, "state": "exited", "detail": "\\ud800"}]}'
    path = f"/v1/sites/{run.sites[0].name}/heartbeat"
    problem(send("site", "POST", path, content=text, headers=headers), 422, "invalid_request")


def test_a_layout_with_hostile_names(send, run):
    """Names of tensors are stored and come back in errors."""
    tensors = [[name + "\ud800", shape, group] for name, shape, group in LAYOUT.to_json()["tensors"]]
    path = f"/v1/runs/{run.id}/sites/{run.sites[0].name}/layout"
    for changes in ({"groups": ["\ud800", "no_decay"]}, {"tensors": tensors}, {"surprise\ud800": 1}):
        text = json.dumps({"attempt": 1, "layout": LAYOUT.to_json() | changes})
        answer = send("ranks", "PUT", path, content=text, headers={"Content-Type": "application/json"})
        problem(answer, 422, "bad_layout")


def test_every_answer_forbids_caching_and_framing(send):
    for answer in (send("admin", "GET", "/v1/runs"), send(None, "GET", "/v1/runs"), send(None, "GET", "/nothing")):
        assert answer.headers["cache-control"] == "no-store"
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
