"""JSON that makes no sense, mostly as the spec of a run, which has something of everything."""

import json
from typing import Any

from tests.contract.bad_requests.case import Case, Http
from tests.contract.by_hand import TASK, registration

__all__ = ["CASES"]

_SPEC = {"name": "errors", "task": TASK, "steps": 3}


def _body(what: str, body: str | bytes, detail: str) -> Case:
    headers = {"Content-Type": "application/json"}
    return Case(what, Http("POST", "/v1/runs", body=body, headers=headers), 422, "invalid_request", detail)


def _spec(what: str, detail: str, **changes: Any) -> Case:
    return _body(what, json.dumps(_SPEC | changes), detail)


def _params(what: str, value: str, detail: str) -> Case:
    return _body(what, json.dumps(_SPEC)[:-1] + f', "params": {{"x": {value}}}}}', detail)


def _site(what: str, detail: str, **changes: Any) -> Case:
    request = Http("PUT", "/v1/sites/NAME", "join", json=registration().model_dump() | changes)
    return Case(what, request, 422, "invalid_request", detail)


_FORMS = [
    _body("nothing", b"", "body: Field required"),
    _body("not JSON", "{", "body.1: JSON decode error: Expecting property name enclosed in double quotes"),
    _body("bytes that are no UTF-8", b'{"name": "\xff"}', "body: 'utf-8' codec can't decode byte 0xff in position 10"),
    _body("a list", "[]", "body: Input should be a valid dictionary"),
    _body("null", "null", "body: Input should be a valid dictionary"),
    _body("a string", '"spec"', "body: Input should be a valid dictionary"),
    _body("a number of 5,000 digits", "9" * 5000, "body: Exceeds the limit (4300 digits)"),
    _body("100,000 lists, one in the other", "[" * 100_000 + "]" * 100_000, "body: maximum recursion depth exceeded"),
]

_PARAMS = [
    _params("NaN", "NaN", "body.params: numbers must be finite"),
    _params("Infinity", "-Infinity", "body.params: numbers must be finite"),
    _params("1e999", "1e999", "body.params: numbers must be finite"),
    _params("2^63", str(2**63), "body.params: integers must fit 64 bits"),
    _params("a number of 400 digits", "9" * 400, "body.params: integers must fit 64 bits"),
    _params("half of a surrogate pair", r'"\ud800"', "body.params"),
    _params("40 lists, one in the other", "[" * 40 + "]" * 40, "body.params: nested deeper than 32"),
    _params("230 lists, one in the other", "[" * 230 + "]" * 230, "body.params: nested deeper than 32"),
]

_SPECS = [
    _spec("a field that nobody knows", "body.surprise: Extra inputs are not permitted", surprise=1),
    _spec("10,000 fields that nobody knows", "body.field0: Extra inputs", **{f"field{n}": 1 for n in range(10_000)}),
    _spec("a field of 1 MB that nobody knows", "body.xxx", **{"x" * 1_000_000: 1}),
    _spec("no task", "body.task: Input should be a valid string", task=None),
    _spec("steps as text", "body.steps: Input should be a valid integer", steps="three"),
    _spec("no step", "body.steps: Input should be greater than or equal to 1", steps=0),
    _spec("10^10 steps", "body.steps: Input should be less than or equal to 1000000000", steps=10**10),
    _spec("a path as name", "body.name: '../../x' is no name: use lower-case letters", name="../../x"),
    _spec("a line break in a name", r"body.name: 'x\n' is no name", name="x\n"),
    _spec("a name of 64 characters", "is no name: use lower-case letters, digits, - and _ inside", name="x" * 64),
    _spec("a seed of -1", "body.seed: Input should be greater than or equal to 0", seed=-1),
    _spec("a seed of 2^63", "body.seed: Input should be less than", seed=2**63),
    _spec("a list as params", "body.params: Input should be a valid dictionary", params=[]),
    _spec("no site", "body.sites: List should have at least 1 item", sites=[]),
    _spec("a site's name in capitals", "body.sites.0: 'A' is no name", sites=["A"]),
    _spec("a site twice", "sites names a more than once", sites=["a", "b", "a"]),
    _spec("no outer step before the last", "outer.every = 4 is more than steps = 3", outer={"every": 4}),
    _spec("an outer round at every 0th step", "body.outer.every: Input should be greater", outer={"every": 0}),
    _spec("no fragment", "body.outer.fragments: Input should be", outer={"every": 1, "fragments": 0}),
    _spec("a chunk of 63", "body.optimizer.chunk: Input should be 32, 64 or 128", optimizer={"chunk": 63}),
    _spec("k = 0", "body.optimizer.k: Input should be greater than or equal to 1", optimizer={"k": 0}),
    _spec(
        "more coefficients than a chunk has",
        "k must be 1 to 1024 for chunks of 32 x 32, got 2000",
        optimizer={"k": 2000, "chunk": 32},
    ),
    _spec("a learning rate of 0", "body.optimizer.lr: Input should be greater than 0", optimizer={"lr": 0}),
    _spec("a longer warm-up than the run", "optimizer.warmup = 4 is more than steps = 3", optimizer={"warmup": 4}),
    _spec("a setting of another optimizer", "kind = demo has no setting momentum", optimizer={"momentum": 0.9}),
]

_OTHERS = [
    Case(
        "a key of a run with another spec",
        Http("POST", "/v1/runs", json=_SPEC, headers={"Idempotency-Key": "KEY"}),
        422,
        "idempotency_key",
        "this Idempotency-Key came with another body before: use a new one",
    ),
    Case(
        "a key of 129 characters",
        Http("POST", "/v1/runs", json=_SPEC, headers={"Idempotency-Key": "x" * 129}),
        422,
        "invalid_request",
        "header.idempotency-key: String should have at most 128 characters",
    ),
    Case(
        "a run of a task that no site allows is started",
        Http("POST", "/v1/runs/UNWILLING/start"),
        409,
        "sites_not_ready",
        "the run cannot start: no site that allows task 'nobodys' is online",
    ),
    Case(
        "a heartbeat of 65 runs",
        Http(
            "POST",
            "/v1/sites/SITE/heartbeat",
            "site",
            json={"processes": [{"run": "x", "attempt": 1, "state": "running"}] * 65},
        ),
        422,
        "invalid_request",
        "body.processes: List should have at most 64 items",
    ),
    Case(
        "a heartbeat about attempt 0",
        Http(
            "POST",
            "/v1/sites/SITE/heartbeat",
            "site",
            json={"processes": [{"run": "x", "attempt": 0, "state": "running"}]},
        ),
        422,
        "invalid_request",
        "body.processes.0.attempt: Input should be greater than or equal to 1",
    ),
    Case(
        "a heartbeat with a log's end that is no text",
        Http(
            "POST",
            "/v1/sites/SITE/heartbeat",
            "site",
            r'{"processes": [{"run": "x", "attempt": 1, "state": "exited", "detail": "\ud800"}]}',
        ),
        422,
        "invalid_request",
        "body.processes.0.detail",
    ),
    _site("a site with a short secret", "body.secret: String should have at least 32 characters", secret="short"),
    _site("a site without a task", "body.tasks: List should have at least 1 item", tasks=[]),
    _site("a site without a rank", "body.ranks: Input should be greater than or equal to 1", ranks=0),
    _site("a region's name in capitals", "body.region: 'No' is no name", region="No"),
]

CASES = [*_FORMS, *_PARAMS, *_SPECS, *_OTHERS]
