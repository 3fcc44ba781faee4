"""Routes say whose tokens are good for them, or the application does not even start."""

import asyncio
import json

import pytest
from fastapi import APIRouter, FastAPI

from api.errors import ProblemError, TooLargeError
from api.middleware import problem_response
from api.permissions import GuardedRoute, allowed
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
