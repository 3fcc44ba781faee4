"""`Content-Digest` by itself, in the middleware, and in the client: what was changed on its way does not count."""

import base64
import hashlib

import httpx
import pytest

from api.client import CoordinatorClient, UnreachableError
from api.content_digest import FIELD, agrees, content_digest, content_digest_of
from api.digest_middleware import ContentDigests
from api.errors import InvalidError, ProblemError
from tests.unit.api.test_client import URL, VERSION, Answers, refusal
from tests.unit.api.test_middleware import CHUNKS, call, read_all

BODY = b"ab"


def test_the_field_is_that_of_rfc_9530():
    """The example of its appendix B.1."""
    body = b'{"hello": "world"}\n'
    assert content_digest(body) == "sha-256=:RK/0qy18MlBSVnWgjwz6lZEWjP/lF5HF9bvEF8FabDg=:"
    assert content_digest_of(hashlib.sha256(body).digest()) == content_digest(body)


@pytest.mark.parametrize(
    ("field", "right"),
    [
        (None, True),
        ("", True),
        ("sha-512=:AAAA:", True),
        (content_digest(BODY), True),
        (f"sha-512=:AAAA:, {content_digest(BODY)}", True),
        (content_digest(b"ax"), False),
        (f"sha-512=:AAAA:, {content_digest(b'ax')}", False),
        ("sha-256=:AAA:", False),
        ("sha-256=::", False),
    ],
)
def test_a_body_agrees_with_its_field_or_there_is_none(field, right):
    assert agrees(field, BODY) is right
    headers = [] if field is None else [(FIELD.lower(), field)]
    status, _, answer = call(ContentDigests(read_all), headers=headers)
    assert status == (200 if right else 422)
    assert (b"digest_mismatch" in answer) is not right


def test_the_end_of_a_wrong_body_does_not_reach_the_application():
    seen = []

    async def app(scope, receive, send):
        """Makes of every error an answer of its own, as FastAPI does of one in a JSON body."""
        try:
            while True:
                seen.append((await receive())["body"])
        except ProblemError:
            await send({"type": "http.response.start", "status": 400, "headers": []})
            await send({"type": "http.response.body", "body": b"nonsense"})

    status, headers, answer = call(ContentDigests(app), headers=[(FIELD.lower(), content_digest(b"ax"))])
    assert (status, headers["content-type"]) == (422, "application/problem+json")
    assert b"digest_mismatch" in answer
    assert seen == [CHUNKS[0]["body"]]


def test_answers_of_one_piece_carry_the_field():
    status, headers, body = call(ContentDigests(read_all))
    assert (status, headers["content-digest"], body) == (200, content_digest(BODY), BODY)


def test_a_field_that_is_there_and_answers_in_pieces_stay():
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-digest", b"its own")]})
        await send({"type": "http.response.body", "body": b"a"})

    async def in_pieces(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        await send({"type": "http.response.body", "body": b"b"})

    assert call(ContentDigests(app))[1]["content-digest"] == "its own"
    status, headers, body = call(ContentDigests(in_pieces))
    assert (status, body) == (200, BODY)
    assert "content-digest" not in headers


# --- the client -------------------------------------------------------------------------------------------------------


def changed(response: httpx.Response) -> httpx.Response:
    """With the field of what it was before."""
    response.headers[FIELD] = content_digest(b"x" + response.content)
    return response


def test_every_body_goes_with_its_digest():
    answers = Answers(httpx.Response(202))
    answers.client().contribute("run", "west", 1, "a", 0, b"message", 5.0)
    assert answers.requests[0].headers[FIELD] == content_digest(b"message")


def test_a_changed_answer_is_asked_for_again():
    answers = Answers(changed(httpx.Response(200, json=VERSION)), httpx.Response(200, json=VERSION))
    assert answers.client(patience=10).version().protocols == [1]
    assert len(answers.requests) == 2
    with pytest.raises(UnreachableError, match="changed on its way"):
        Answers(changed(httpx.Response(404, text="nothing"))).client().version()


def test_a_changed_request_is_sent_again():
    answers = Answers(refusal(InvalidError("digest_mismatch", "send it again")), httpx.Response(202))
    answers.client(patience=10).contribute("run", "west", 1, "a", 0, b"message", 5.0)
    assert [request.content for request in answers.requests] == [b"message"] * 2


def test_a_blob_that_was_changed_on_its_way_is_asked_for_again():
    blob = b"bytes"
    field = {FIELD: f"sha-256=:{base64.b64encode(hashlib.sha256(blob).digest()).decode()}:"}
    answers = Answers(
        httpx.Response(200, content=b"other", headers=field), httpx.Response(200, content=blob, headers=field)
    )
    client = CoordinatorClient(URL, "token", transport=httpx.MockTransport(answers), patience=10)
    assert client.get_blob(hashlib.sha256(blob).hexdigest()) == blob
