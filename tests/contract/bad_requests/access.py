"""Tokens that are missing or not good for what is asked, and things that are not there."""

from tests.contract.bad_requests.case import Case, Http
from tests.contract.bad_requests.states import Pending
from tests.contract.bad_requests.transport import headers_only

__all__ = ["CASES", "PLACES"]

_UNKNOWN = "nobody has issued this token, or it was revoked or has expired: ask for a new one"
_MISSING = "this needs a token: send `Authorization: Bearer TOKEN`"
_PART = "/v1/runs/RUN/regions/west/steps/STEP/contributions/SITE/parts/0"


def _unknown(what: str, token: str) -> Case:
    return Case(what, Http("GET", "/v1/runs", token), 401, "token_unknown", _UNKNOWN)


def _authorization(what: str, value: str | bytes, code: str = "token_missing") -> Case:
    detail = _MISSING if code == "token_missing" else _UNKNOWN
    return Case(what, Http("GET", "/v1/runs", None, headers={"Authorization": value}), 401, code, detail)


def _scope(method: str, path: str, token: str, needed: str, what: str, body: bytes = b"") -> Case:
    scope = {"other ranks": "ranks", "other site": "site"}.get(token, token)
    detail = f"this needs a token with scope {needed}, not {scope}"
    return Case(what, Http(method, path, token, body), 403, "wrong_scope", detail)


def _elsewhere(what: str, method: str, path: str, token: str, code: str, detail: str, body: str = "{}") -> Case:
    return Case(what, Http(method, path, token, body), 403, code, detail)


_NONE = [
    Case("no token", Http("GET", "/v1/runs", None), 401, "token_missing", _MISSING),
    Case("no token for a route that is not there", Http("GET", "/v1/nothing", None), 401, "token_missing", _MISSING),
    _authorization("an empty token", "Bearer"),
    _authorization("another scheme than Bearer", "Basic YTpi"),
    _unknown("a token that nobody issued", "unknown"),
    _unknown("a token that was revoked", "revoked"),
    _unknown("a token that has expired", "expired"),
    _unknown("the token of a site that was removed", "removed"),
    _unknown("the token of ranks that were replaced", "replaced"),
    _authorization("a token of 5,000 characters", f"Bearer {'x' * 5000}", "token_unknown"),
    _authorization("a token that is no text", b"Bearer \xff\xfe", "token_unknown"),
    Case(
        "a blob of 64 GiB with a token that nobody issued: answered before its body is read",
        headers_only("PUT /v1/blobs/ZERO", f"Content-Length: {64 << 30}", token="nobodys"),
        401,
        "token_unknown",
        _UNKNOWN,
    ),
    Case(
        "a blob with an observer's token: answered before its body is read",
        headers_only("PUT /v1/blobs/ZERO", "Content-Length: 1000", token="OBSERVER"),
        403,
        "wrong_scope",
        "this needs a token with scope admin or ranks, not observer",
    ),
]

_WRONG = [
    _scope("POST", "/v1/runs", "observer", "admin", "an observer creates a run"),
    _scope("GET", "/v1/runs", "join", "admin or observer", "a join token reads"),
    _scope("POST", "/v1/runs/RUN/stop", "ranks", "admin", "ranks stop a run"),
    _scope("DELETE", "/v1/runs/RUN", "site", "admin", "a site deletes a run"),
    _scope("POST", "/v1/tokens", "observer", "admin", "an observer makes itself a token"),
    _scope("GET", "/v1/audit", "ranks", "admin", "ranks read the audit log"),
    _scope("PUT", _PART, "admin", "ranks", "an administrator contributes", b"x"),
    _scope("PUT", _PART, "site", "ranks", "an agent contributes", b"x"),
    _scope("POST", "/v1/sites/SITE/heartbeat", "ranks", "site", "ranks send their agent's heartbeat"),
    _elsewhere(
        "a heartbeat for another site",
        "POST",
        "/v1/sites/OTHER/heartbeat",
        "site",
        "wrong_site",
        "this token belongs to site 'SITE', not to 'OTHER'",
    ),
    _elsewhere(
        "a look at another site",
        "GET",
        "/v1/sites/OTHER",
        "site",
        "wrong_site",
        "this token belongs to site 'SITE', not to 'OTHER'",
    ),
    _elsewhere(
        "another site leaves",
        "POST",
        "/v1/sites/OTHER/leave",
        "site",
        "wrong_site",
        "this token belongs to site 'SITE', not to 'OTHER'",
    ),
    _elsewhere(
        "a seat of another site",
        "PUT",
        "/v1/runs/RUN/sites/OTHER/seat",
        "site",
        "wrong_site",
        "this token belongs to site 'SITE', not to 'OTHER'",
    ),
    Case(
        "a layout for another site: answered before its body is read",
        headers_only("PUT /v1/runs/RUN/sites/OTHER/layout", "Content-Length: 1000"),
        403,
        "wrong_site",
        "this token belongs to site 'SITE', not to 'OTHER'",
    ),
    Case(
        "a layout for another run: answered before its body is read",
        headers_only("PUT /v1/runs/KEYED/sites/SITE/layout", "Content-Length: 1000"),
        403,
        "wrong_run",
        "this token belongs to run RUN, not to KEYED",
    ),
    _elsewhere(
        "a contribution for another site",
        "PUT",
        _PART,
        "other ranks",
        "wrong_site",
        "this token belongs to site 'OTHER', not to 'SITE'",
    ),
    _elsewhere(
        "a final digest for another site",
        "PUT",
        "/v1/runs/RUN/sites/OTHER/final",
        "ranks",
        "wrong_site",
        "belongs to site 'SITE', not to 'OTHER'",
        '{"seq": 0, "digest": "ZERO"}',
    ),
    _elsewhere(
        "metrics for another site",
        "POST",
        "/v1/runs/RUN/metrics",
        "ranks",
        "wrong_site",
        "belongs to site 'SITE', not to 'OTHER'",
        '{"site": "OTHER", "points": []}',
    ),
    _elsewhere(
        "ranks read another run",
        "GET",
        "/v1/runs/KEYED",
        "ranks",
        "wrong_run",
        "this token belongs to run RUN, not to KEYED",
    ),
    Case(
        "a secret that is somebody's token",
        Http("PUT", "/v1/runs/RUN/sites/SITE/seat", "site", '{"attempt": 2, "secret": "TAKEN"}'),
        409,
        "secret_taken",
        "secret",
    ),
    Case("a token that is not there is revoked", Http("DELETE", "/v1/tokens/no"), 404, "token_not_found", "'no'"),
    Case(
        "a token of the settings is revoked",
        Http("DELETE", "/v1/tokens/admin"),
        409,
        "token_from_settings",
        "ISTHMUS_ADMIN_TOKEN",
    ),
    Case(
        "a token of a scope that agents make",
        Http("POST", "/v1/tokens", json={"scope": "ranks", "name": "x"}),
        422,
        "invalid_request",
        "body.scope: Input should be 'admin', 'observer' or 'join'",
    ),
]

CASES = [*_NONE, *_WRONG]


def _missing(what: str, path: str, code: str, detail: str, method: str = "GET", status: int = 404) -> Case:
    return Case(what, Http(method, path), status, code, detail)


def _bad(what: str, path: str, detail: str, method: str = "GET", token: str = "admin", **body: object) -> Case:
    return Case(what, Http(method, path, token, **body), 422, "invalid_request", detail)  # type: ignore[arg-type]


_SITE = {"protocol_version": 1, "secret": "s" * 32, "region": "west", "tasks": ["x"]}

PLACES = [
    _missing("a run that is not there", "/v1/runs/nothing", "run_not_found", "nothing"),
    _missing("the model of a run that is not there", "/v1/runs/nothing/model", "run_not_found", "nothing"),
    _missing("the metrics of a run that is not there", "/v1/runs/nothing/metrics", "run_not_found", "nothing"),
    _missing("the log of a run that is not there", "/v1/runs/nothing/regions/west/log", "run_not_found", "nothing"),
    _missing("outer rounds of a run that is not there", "/v1/runs/nothing/outer-rounds", "run_not_found", "nothing"),
    _missing("a run that is not there is stopped", "/v1/runs/nothing/stop", "run_not_found", "nothing", "POST"),
    _missing("a zero byte as run", "/v1/runs/%00", "run_not_found", "there is no run"),
    _missing("bytes that are no UTF-8 as run", "/v1/runs/%ff%fe", "run_not_found", "there is no run"),
    _missing("a path as run", "/v1/runs/..%2f..%2fetc", "no_such_route", "there is nothing at GET"),
    _bad("a run's name of 81 characters", f"/v1/runs/{'x' * 81}", "path.run: String should have at most 80 characters"),
    _missing("a site that is not there", "/v1/sites/nothing", "site_not_found", "there is no site 'nothing'"),
    _bad("a site's name in capitals", "/v1/sites/Upper", "path.site: 'Upper' is no name: use lower-case letters"),
    _bad("a path as site", "/v1/sites/%2e%2e", "path.site: '..' is no name", "PUT", "join", json=_SITE),
    _bad("a line break in a site's name", "/v1/sites/a%0a", r"path.site: 'a\n' is no name"),
    _missing("a region that is not there", "/v1/runs/RUN/regions/north/log", "region_not_found", "its regions: west"),
    Case(
        "a region of a run that is not started",
        Http("GET", "/v1/runs/RUN/regions/west/log"),
        404,
        "region_not_found",
        "its regions: none before it is started",
        state=Pending,
    ),
    _missing(
        "an entry that is not there",
        "/v1/runs/RUN/regions/west/log/99999999/parts/0",
        "entry_not_found",
        "has no entry 99999999",
    ),
    _missing(
        "a part that is not there",
        "/v1/runs/RUN/regions/west/log/SEQ/parts/1",
        "part_not_found",
        "part 1: entry SEQ has 1, numbered from 0",
    ),
    _missing("a part of 2^48", f"/v1/runs/RUN/regions/west/log/SEQ/parts/{2**48}", "part_not_found", f"part {2**48}"),
    _bad("an entry of 2^64 - 1", f"/v1/runs/RUN/regions/west/log/{2**64 - 1}/parts/0", "path.seq: Input should be"),
    _bad("an entry of 30 digits", f"/v1/runs/RUN/regions/west/log/{10**30}/parts/0", "path.seq: Input should be"),
    _bad("a negative entry", "/v1/runs/RUN/regions/west/log/-1/parts/0", "path.seq: Input should be greater than"),
    _bad("a step of 1e3", "/v1/runs/RUN/regions/west/steps/1e3/update/parts/0", "path.step: Input should be a valid"),
    _bad("step 0", "/v1/runs/RUN/regions/west/steps/0/update/parts/0", "path.step: Input should be greater than"),
    _missing(
        "the update of a step after the last",
        f"/v1/runs/RUN/regions/west/steps/{10**6}/update/parts/0",
        "step_not_found",
        f"there is no step {10**6}",
    ),
    _bad("a wait of NaN", "/v1/runs/RUN/regions/west/log?wait=nan", "query.wait: Input should be greater than"),
    _bad("a negative wait", "/v1/runs/RUN/regions/west/log?wait=-1", "query.wait: Input should be greater than"),
    _missing(
        "a range of nothing",
        "/v1/runs/RUN/regions/west/log?from=2&to=2",
        "empty_range",
        "to = 2 must be greater than from = 2",
        status=422,
    ),
    Case("a range beyond the log", Http("GET", "/v1/runs/RUN/regions/west/log?from=99999999"), 200, "", '"items":[]'),
    _missing("the model of a run that goes on", "/v1/runs/RUN/model", "no_model", "run RUN is running", status=409),
    _missing("a run that goes on is deleted", "/v1/runs/RUN", "wrong_status", "stop it before", "DELETE", 409),
    _missing("a site of a run that goes on is removed", "/v1/sites/SITE", "site_in_use", "SITE", "DELETE", 409),
    _missing(
        "a run that goes on is resumed from nowhere",
        "/v1/runs/KEYED/resume",
        "wrong_status",
        "run KEYED is pending; to resume it must be paused",
        "POST",
        409,
    ),
    Case(
        "a site speaks another protocol",
        Http("PUT", "/v1/sites/NAME", "join", json=_SITE | {"protocol_version": 2}),
        426,
        "protocol_version",
        "site NAME speaks protocol 2, this coordinator [1]: install the same isthmus release at both",
    ),
    Case(
        "a site takes another one's name",
        Http("PUT", "/v1/sites/SITE", "join", json=_SITE),
        409,
        "name_taken",
        "another agent has registered as 'SITE'",
    ),
]
