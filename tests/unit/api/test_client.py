"""The client against answers that no coordinator gives: proxies in between, lost connections, strange bodies."""

import hashlib
import json

import httpx
import pytest

from api.client import CoordinatorClient, UnreachableError
from api.errors import ConflictError, GoneError, IsthmusError, ProblemError, UnavailableError
from api.middleware import problem_response
from api.schemas import Announcement
from api.service import Answer
from api.specs import RunSpec
from api.transfers import BLOCK

URL = "http://coordinator.example/prefix"
VERSION = {"version": "0.1.0", "protocols": [1]}
SPEC = RunSpec(name="drill", task="drill", steps=3)
HTML = "<html><body><h1>502 Bad Gateway</h1></body></html>"


class Answers:
    """A transport that gives these answers one by one, the last one for ever, and keeps the requests."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.requests = []

    def __call__(self, request):
        request.read()
        self.requests.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def client(self, patience=0.3, waiting=None):
        transport = httpx.MockTransport(self)
        return CoordinatorClient(URL, "token", transport=transport, patience=patience, waiting=waiting)


def refusal(error):
    response = problem_response(error)
    return httpx.Response(response.status_code, content=bytes(response.body), headers=dict(response.headers))


def test_the_url_may_have_a_prefix():
    answers = Answers(httpx.Response(200, json=VERSION))
    assert answers.client().version().version == "0.1.0"
    (request,) = answers.requests
    assert str(request.url) == f"{URL}/version"
    assert request.headers["authorization"] == "Bearer token"


@pytest.mark.parametrize("status", [400, 403, 404, 413, 500])
def test_a_proxys_html_is_told_from_the_coordinators_refusal(status):
    answers = Answers(httpx.Response(status, html=HTML))
    with pytest.raises(ProblemError, match="not an Isthmus coordinator") as caught:
        answers.client().version()
    assert caught.value.code == f"http_{status}"
    assert f"GET {URL}/version" in str(caught.value)
    assert len(answers.requests) == 1


@pytest.mark.parametrize("status", [408, 429, 502, 503, 504, 507])
def test_what_a_proxy_answers_for_a_moment_is_tried_again(status):
    answers = Answers(httpx.Response(status, html=HTML), httpx.Response(200, json=VERSION))
    assert answers.client(patience=10).version().protocols == [1]
    assert len(answers.requests) == 2


def test_patience_has_an_end():
    with pytest.raises(UnreachableError, match="502"):
        Answers(httpx.Response(502, html=HTML)).client().version()
    with pytest.raises(UnreachableError, match="Redis"):
        Answers(refusal(UnavailableError("redis_unavailable", "Redis is away"))).client().version()


@pytest.mark.parametrize("status", [429, 503, 507])
def test_it_waits_as_long_as_it_is_told_to(status, monkeypatch):
    waits = []
    monkeypatch.setattr("time.sleep", waits.append)
    answers = [httpx.Response(status, html=HTML, headers={"Retry-After": text}) for text in ("7", "100000", "Friday")]
    client = Answers(*answers, httpx.Response(200, json=VERSION)).client(patience=1000)
    assert client.version().protocols == [1]
    assert 7 <= waits[0] <= 10.5
    assert 60 <= waits[1] <= 90
    assert waits[2] <= 3


def test_a_lost_connection_is_tried_again_with_the_same_bytes():
    body = bytes(range(256)) * (BLOCK // 100)
    digest = hashlib.sha256(body).hexdigest()
    answers = Answers(httpx.Response(404), httpx.ReadError("reset"), httpx.ConnectError("refused"), httpx.Response(201))
    assert answers.client(patience=10).put_blob(body) == digest
    assert [request.method for request in answers.requests] == ["HEAD", "PUT", "PUT", "PUT"]
    for request in answers.requests[1:]:
        assert request.content == body
        assert request.headers["content-length"] == str(len(body))
        assert "transfer-encoding" not in request.headers


def test_nobody_answers():
    with pytest.raises(UnreachableError, match="is it running"):
        Answers(httpx.ConnectError("connection refused")).client().version()


@pytest.mark.parametrize("fault", [httpx.ConnectError("refused"), httpx.Response(502, html=HTML)])
def test_who_waits_for_the_first_answer_is_told_once(fault):
    told = []
    answers = Answers(fault, fault, httpx.Response(200, json=VERSION))
    answers.client(patience=10, waiting=told.append).version()
    assert len(answers.requests) == 3
    assert [(type(error), error.lasts, URL in str(error)) for error in told] == [(UnreachableError, False, True)]


def test_nobody_is_told_of_later_tries():
    told = []
    answers = [httpx.Response(200, json=VERSION), httpx.ConnectError("refused"), httpx.Response(200, json=VERSION)]
    client = Answers(*answers).client(patience=10, waiting=told.append)
    assert [client.version().protocols, client.version().protocols] == [[1], [1]]
    assert told == []


def test_who_is_told_may_end_the_wait():
    def give_up(error):
        raise error

    answers = Answers(httpx.ConnectError("refused"))
    with pytest.raises(UnreachableError, match="is it running"):
        answers.client(patience=10, waiting=give_up).version()
    assert len(answers.requests) == 1


def test_refusals_are_not_tried_again():
    answers = Answers(refusal(GoneError("run_ended", "it is over", context={"status": "stopped"})))
    with pytest.raises(GoneError, match="it is over") as caught:
        answers.client(patience=10).update("run", "west", 1, 0, 0.0)
    assert caught.value.context == {"status": "stopped"}
    assert len(answers.requests) == 1


def test_a_problem_that_is_none():
    headers = {"content-type": "application/problem+json"}
    with pytest.raises(ProblemError) as caught:
        Answers(httpx.Response(409, content=b'{"surprise": 1}', headers=headers)).client().version()
    assert caught.value.code == "http_409"
    assert isinstance(caught.value, ConflictError)


def test_a_run_is_created_once_however_often_it_is_sent():
    answers = Answers(httpx.ReadError("reset"), httpx.ReadError("reset"), refusal(ConflictError("x", "y")))
    with pytest.raises(ConflictError):
        answers.client(patience=10).create_run(SPEC)
    keys = {request.headers["idempotency-key"] for request in answers.requests}
    assert len(answers.requests) == 3
    assert len(keys) == 1
    assert len(keys.pop()) >= 16
    with pytest.raises(ConflictError):
        answers.client().create_run(SPEC, "mine")
    assert answers.requests[-1].headers["idempotency-key"] == "mine"


def test_a_blob_that_is_there_is_not_sent():
    answers = Answers(httpx.Response(200))
    answers.client().put_blob(b"bytes")
    assert [request.method for request in answers.requests] == ["HEAD"]


def test_a_blob_with_other_bytes_is_refused():
    answers = Answers(httpx.Response(200, content=b"other"))
    with pytest.raises(IsthmusError, match="other bytes"):
        answers.client().get_blob(hashlib.sha256(b"bytes").hexdigest())


def test_open_rounds_are_none_and_closed_ones_bytes():
    answers = Answers(httpx.Response(202, text="waiting"), httpx.Response(204), httpx.Response(200, content=b"entry"))
    client = answers.client()
    assert client.contribute("run", "west", 1, "a", 0, b"message", 5.0) == Answer(None, "waiting")
    assert client.update("run", "west", 1, 0, 5.0) is None
    assert client.update("run", "west", 1, 0, 5.0) == b"entry"
    assert answers.requests[0].url.params["wait"] == "5.0"
    assert answers.requests[0].headers["content-type"] == "application/vnd.isthmus+safetensors"


def test_what_was_not_accepted_is_to_be_sent_again():
    said = [httpx.Response(202, text="paused", headers={"Isthmus-Accepted": word}) for word in ("false", "true")]
    client = Answers(*said, httpx.Response(200, content=b"entry")).client()
    accepted = [client.contribute("run", "west", 1, "a", 0, b"message", 5.0).accepted for _ in range(3)]
    assert accepted == [False, True, True]


def test_names_are_quoted_where_users_type_them():
    answers = Answers(refusal(ConflictError("x", "y")))
    with pytest.raises(ConflictError):
        answers.client().run("..?sites#x")
    assert answers.requests[0].url.raw_path == b"/prefix/v1/runs/..%3Fsites%23x"


@pytest.mark.parametrize("text", ["", ".", "..", "/", "a/b", "../../x", "/dev/null"])
def test_what_cannot_be_a_name_is_not_sent(text):
    answers = Answers(httpx.Response(200, json={}))
    for ask in (answers.client().run, answers.client().remove_site, lambda name: answers.client().add_site("x", name)):
        with pytest.raises(IsthmusError, match=f"{text!r} is neither a run's id nor a name"):
            ask(text)
    assert not answers.requests


def test_json_bodies():
    answers = Answers(httpx.Response(200, json={"upload": True, "evaluate": False}))
    assert answers.client().announce("run", 1, 0, "a", Announcement(digest="0" * 64), 5.0).upload
    (request,) = answers.requests
    assert request.headers["content-type"] == "application/json"
    assert json.loads(request.content) == {"digest": "0" * 64, "upload": None, "tokens": 0}
