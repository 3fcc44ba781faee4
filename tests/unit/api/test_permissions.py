"""Routes say whose tokens are good for them, or the application does not even start."""

import asyncio
import json
from functools import partial

import pytest
from fastapi import APIRouter, FastAPI, Request, Response

from api.errors import ProblemError, TooLargeError, faults_of
from api.middleware import problem_response
from api.permissions import DirectRoute, GuardedRoute, allowed
from api.routes import Name, Number, Wait
from api.service import Principal


def test_a_route_that_does_not_say_whose_it_is():
    router = APIRouter(route_class=GuardedRoute)
    with pytest.raises(TypeError, match="/everybodys: say with @allowed"):

        @router.get("/everybodys")
        async def everybodys():
            return None


def test_what_is_wrong_with_a_body_is_not_lost():
    """FastAPI makes one and the same 400 of all that is raised while it reads a body."""
    router = APIRouter(route_class=GuardedRoute)

    @router.post("/notes")
    @allowed("admin")
    async def add(note: dict[str, str]):
        return note

    async def problem(_, error):
        return problem_response(error)

    app = FastAPI(exception_handlers={ProblemError: problem})
    app.include_router(router)
    sent = []

    async def receive():
        raise TooLargeError("too_much", "this is too much")

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/notes", "query_string": b"", "root_path": ""}
    scope |= {"headers": [(b"content-type", b"application/json")], "state": {"principal": Principal("admin")}}
    asyncio.run(app(scope, receive, send))
    assert (sent[0]["status"], json.loads(sent[1]["body"])["code"]) == (413, "too_much")


def test_a_direct_route_is_as_any_other():
    """Described, and refused by the names of what is wrong, as FastAPI does it itself."""
    answers = {}
    for kind in (GuardedRoute, DirectRoute):
        router = APIRouter(route_class=kind)

        @router.get("/sites/{site}/steps/{step}")
        @allowed("ranks")
        async def ask(request: Request, site: Name, step: Number, wait: Wait = 0) -> Response:
            return Response(f"{site} {step} {wait} {request.method}")

        app = FastAPI()
        app.include_router(router)
        get = partial(answer, app)
        answers[kind] = [
            get("/sites/paris/steps/3", "wait=1.5&step=7"),
            get("/sites/paris/steps/3", ""),
            get("/sites/pa!ris/steps/three", "wait=-1"),
            get("/sites/rome/steps/3", ""),
            app.openapi()["paths"],
        ]
    assert answers[DirectRoute] == answers[GuardedRoute]
    fine, _, wrong, others, _ = answers[DirectRoute]
    assert fine == (200, "paris 3 1.5 GET")
    assert (wrong[0], len(wrong[1])) == (422, 3)
    assert others == "wrong_site"


def answer(app, path, query):
    """Status and body that ranks of the site get, or of another one than rome; what is wrong with their request."""
    sent = []

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    site = path.split("/")[2]
    principal = Principal("ranks", site="paris" if site == "rome" else site)
    scope = {"type": "http", "method": "GET", "path": path, "query_string": query.encode(), "root_path": ""}
    try:
        asyncio.run(app(scope | {"headers": [], "state": {"principal": principal}}, receive, send))
    except ProblemError as error:
        return error.code
    body = sent[1]["body"].decode()
    if sent[0]["status"] == 422:
        return 422, faults_of([{**fault, "loc": tuple(fault["loc"])} for fault in json.loads(body)["detail"]])
    return sent[0]["status"], body
