"""create_app(service): the REST API as an ASGI application, with the status page at `/`."""

import re
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from api import access_routes, blob_routes, round_routes, routes, snapshot_routes
from api.audit import Audit
from api.authentication import Authentication
from api.digest_middleware import ContentDigests
from api.errors import PROBLEM_MEDIA_TYPE, InvalidError, NotFoundError, ProblemError, faults_of
from api.message import PROTOCOL_VERSION
from api.middleware import BodyLimits, SecurityHeaders, problem_response
from api.rates import Rates
from api.service import Service

__all__ = ["CONTRIBUTION_LIMIT", "create_app"]

CONTRIBUTION_LIMIT = 8 << 20
"""Bytes of one part of a contribution: nothing bigger goes into one Redis value."""
_LAYOUT_LIMIT = 32 << 20
_JSON_LIMIT = 4 << 20
_BLOB_LIMIT = 64 << 30
_WEB = Path(__file__).parent / "web"


def _limit(path: str) -> int:
    if "/contributions/" in path:
        return CONTRIBUTION_LIMIT
    if path.endswith("/layout"):
        return _LAYOUT_LIMIT
    return _BLOB_LIMIT if re.fullmatch(r"/v1/blobs/[^/]*", path) else _JSON_LIMIT


async def _problem(_: Request, error: Exception) -> Response:
    assert isinstance(error, ProblemError)
    return problem_response(error)


async def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    faults = faults_of(error.errors())
    return problem_response(InvalidError("invalid_request", "; ".join(faults[:5]), errors=faults))


async def _plain_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    detail, path = str(error.detail), request.url.path
    if error.status_code == 404:
        detail = f"there is nothing at {request.method} {path}; the routes are listed at /openapi.json"
        return problem_response(NotFoundError("no_such_route", detail))
    if error.status_code == 405:
        detail = f"{request.method} is not possible at {path}; the routes are listed at /openapi.json"
    failure = ProblemError(f"http_{error.status_code}", detail)
    body = failure.problem().model_copy(update={"status": error.status_code, "title": str(error.detail)})
    return JSONResponse(body.model_dump(), error.status_code, headers=error.headers, media_type=PROBLEM_MEDIA_TYPE)


async def _internal(request: Request, _: Exception) -> Response:
    """The exception itself goes on to the server, which logs it."""
    where = f"{request.method} {request.url.path}"
    return problem_response(ProblemError("internal_error", f"{where} failed; the coordinator's log says why"))


async def _nobody(_: Request, __: Exception) -> Response:
    """Whoever has sent half a body is gone: no fault of ours, and nobody gets this answer."""
    return Response(status_code=400)


def create_app(service: Service, rates: Rates) -> FastAPI:
    """The application around a service; it keeps no state of its own."""
    app = FastAPI(title="Isthmus coordinator", version=str(PROTOCOL_VERSION), docs_url=None, redoc_url=None)
    app.state.service = service
    app.add_exception_handler(ProblemError, _problem)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _plain_http)
    app.add_exception_handler(ClientDisconnect, _nobody)
    app.add_exception_handler(Exception, _internal)
    app.add_middleware(BodyLimits, limit=_limit)
    app.add_middleware(Audit, service=service)
    app.add_middleware(Authentication, service=service, rates=rates)
    app.add_middleware(SecurityHeaders)
    app.add_middleware(ContentDigests)
    app.include_router(round_routes.direct, prefix="/v1")  # first: routes are tried in turn, and this is asked for most
    app.include_router(round_routes.v1, prefix="/v1")
    app.include_router(routes.public)
    app.include_router(routes.v1, prefix="/v1")
    app.include_router(blob_routes.v1, prefix="/v1")
    app.include_router(access_routes.v1, prefix="/v1")
    app.include_router(snapshot_routes.v1, prefix="/v1")

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(_WEB / "index.html", headers={"Cache-Control": "no-cache"})

    app.mount("/web", StaticFiles(directory=_WEB))
    return app
