"""Middleware by itself: limits on bodies, and the headers of every answer."""

import asyncio
import json

import pytest

from api import app as application
from api import middleware
from api.errors import ProblemError
from api.middleware import BodyLimits, SecurityHeaders

CHUNKS = [{"type": "http.request", "body": b"a", "more_body": True}, {"type": "http.request", "body": b"b"}]


async def read_all(scope, receive, send):
    """An app that answers what it was sent."""
    body = b""
    while True:
        message = await receive()
        body += message["body"]
        if not message.get("more_body", False):
            break
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


def call(app, path="/v1/runs", headers=(), messages=CHUNKS):
    """Status, headers and body of the answer; a message that never comes hangs."""
    sent, left = [], list(messages)

    async def receive():
        return left.pop(0) if left else await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "method": "PUT",
        "path": path,
        "headers": [(name.encode(), value.encode()) for name, value in headers],
    }
    asyncio.run(app(scope, receive, send))
    start = sent[0]
    headers = {name.decode(): value.decode() for name, value in start["headers"]}
    return start["status"], headers, b"".join(message.get("body", b"") for message in sent[1:])


def limited(limit=10):
    return BodyLimits(read_all, limit=lambda path: limit)


@pytest.mark.parametrize("size", [0, 1, 10])
def test_bodies_within_the_limit_pass(size):
    assert call(limited(), headers=[("content-length", str(size))])[2] == b"ab"


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ([("content-length", "11")], 413, "body_too_large"),
        ([("transfer-encoding", "chunked")], 411, "length_required"),
        ([("transfer-encoding", "chunked"), ("content-length", "1")], 411, "length_required"),
        ([("content-encoding", "gzip"), ("content-length", "1")], 415, "compressed_body"),
        ([("content-encoding", "identity")], 415, "compressed_body"),
    ],
)
def test_refused_before_the_body_is_read(headers, status, code):
    answer = call(limited(), headers=headers, messages=[])
    assert answer[0] == status
    assert answer[1]["content-type"] == "application/problem+json"
    assert json.loads(answer[2])["code"] == code


def test_a_body_that_stops_arriving(monkeypatch):
    monkeypatch.setattr(middleware, "BODY_TIMEOUT_S", 0.01)
    with pytest.raises(ProblemError, match="stopped arriving") as caught:
        call(limited(), messages=CHUNKS[:1])
    assert (caught.value.status, caught.value.code) == (408, "body_timeout")


def trickle(sizes, monkeypatch, pause_s=0.05):
    """The answer to a body of blocks of these sizes, with a pause before each."""
    monkeypatch.setattr(middleware, "BODY_TIMEOUT_S", 0.3)  # in which 307 bytes are to arrive
    left = [{"type": "http.request", "body": b"x" * size, "more_body": True} for size in sizes]
    left[-1]["more_body"] = False
    sent = []

    async def receive():
        await asyncio.sleep(pause_s)
        return left.pop(0)

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "PUT", "path": "/v1/runs", "headers": []}
    asyncio.run(BodyLimits(read_all, limit=lambda path: 10_000)(scope, receive, send))
    return sent


def test_a_body_that_trickles(monkeypatch):
    """Every block comes in time, but all of them together would take for ever."""
    with pytest.raises(ProblemError, match="1024 a second are the least") as caught:
        trickle([1] * 100, monkeypatch)
    assert (caught.value.status, caught.value.code) == (408, "body_timeout")


def test_a_body_that_starts_fast_and_then_trickles(monkeypatch):
    with pytest.raises(ProblemError, match="1024 a second are the least"):
        trickle([5000] + [1] * 100, monkeypatch)


def test_a_slow_body_that_gets_on(monkeypatch):
    """For three times the time-out, much faster than it has to be."""
    assert trickle([1000] * 20, monkeypatch)[0]["status"] == 200


def test_a_small_body_may_take_its_time(monkeypatch):
    assert trickle([1, 1], monkeypatch)[0]["status"] == 200


def test_waiting_for_a_disconnect_is_no_timeout(monkeypatch):
    """Once the body is complete, `receive` waits for as long as the answer takes."""
    monkeypatch.setattr(middleware, "BODY_TIMEOUT_S", 0.01)

    async def patient(scope, receive, send):
        await receive()
        await receive()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await receive()
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    assert call(BodyLimits(patient, limit=lambda path: 10))[0] == 204


def test_what_is_not_http_passes():
    seen = []

    async def app(scope, receive, send):
        seen.append(scope["type"])

    asyncio.run(BodyLimits(app, limit=lambda path: 0)({"type": "lifespan"}, None, None))
    assert seen == ["lifespan"]


def test_security_headers():
    status, headers, body = call(SecurityHeaders(read_all))
    assert (status, body) == (200, b"ab")
    assert headers["cache-control"] == "no-store"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert "default-src 'none'" in headers["content-security-policy"]


@pytest.mark.parametrize(
    ("path", "limit"),
    [
        ("/v1/blobs/" + "0" * 64, application._BLOB_LIMIT),
        ("/v1/runs/r/regions/w/steps/1/contributions/s/parts/0", application.CONTRIBUTION_LIMIT),
        ("/v1/runs", application._JSON_LIMIT),
        ("/v1/sites/blobs/heartbeat", application._JSON_LIMIT),
        ("/v1/runs/r/sites/blobs/layout", application._LAYOUT_LIMIT),
        ("/v1/blobs/x/y", application._JSON_LIMIT),
    ],
)
def test_only_blobs_may_be_large(path, limit):
    """Also for a site of the name `blobs`: JSON bodies are read into memory, before any token is looked at."""
    assert application._limit(path) == limit
