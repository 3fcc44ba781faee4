"""Routes of rounds: contributions of sites, and the updates that answer them."""

import time
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Request, Response

from api import schemas
from api.authentication import principal_of
from api.content_digest import FIELD, content_digest_of
from api.errors import UnsupportedMediaError
from api.payload import MEDIA_TYPE
from api.permissions import DirectRoute, GuardedRoute, allowed
from api.routes import MAX_WAIT_S, Caller, Coordinator, Name, Number, RunId, Wait, attempt_of
from api.service import Answer, Place, Service

__all__ = ["direct", "v1"]

direct = APIRouter(route_class=DirectRoute)
v1 = APIRouter(route_class=GuardedRoute)

RoundStep = Annotated[int, Path(ge=1, le=2**48)]


def _answer(answer: Answer, waiting_status: Literal[202, 204]) -> Response:
    headers = {} if answer.evaluate is None else {"Isthmus-Evaluate": "true" if answer.evaluate else "false"}
    if answer.message is not None:
        if answer.snapshot is not None:
            headers["Isthmus-Snapshot"] = str(answer.snapshot)
        headers["Server-Timing"] = ", ".join(f"{name};dur={ms:.3f}" for name, ms in answer.timing.items())
        if answer.sha256 is not None:
            headers[FIELD] = content_digest_of(bytes.fromhex(answer.sha256))
        return Response(answer.message, media_type=MEDIA_TYPE, headers=headers)
    if waiting_status == 204:
        return Response(status_code=204, headers=headers)
    headers["Isthmus-Accepted"] = "true" if answer.accepted else "false"
    return Response(answer.waiting_for.encode(), status_code=202, media_type="text/plain", headers=headers)


@direct.put("/runs/{run}/regions/{region}/steps/{step}/contributions/{site}/parts/{part}")
@allowed("ranks")
async def contribute(
    request: Request, run: RunId, region: Name, step: RoundStep, site: Name, part: Number, wait: Wait = 0
) -> Response:
    if request.headers.get("content-type") != MEDIA_TYPE:
        raise UnsupportedMediaError("media_type", f"a contribution is {MEDIA_TYPE}; set Content-Type to that")
    started = time.perf_counter()
    body = await request.body()
    receive = (time.perf_counter() - started) * 1e3
    service: Service = request.app.state.service
    place = Place(run, region, step, site, attempt_of(principal_of(request)))
    answer = await service.contribute(place, part, body, min(wait, MAX_WAIT_S))
    return _answer(answer.timed(receive=receive), 202)


@v1.put("/runs/{run}/regions/{region}/steps/{step}/abstentions/{site}")
@allowed("ranks")
async def abstain(
    run: RunId,
    region: Name,
    step: RoundStep,
    site: Name,
    abstention: schemas.Abstention,
    service: Coordinator,
    caller: Caller,
    wait: Wait = 0,
) -> Response:
    place = Place(run, region, step, site, attempt_of(caller))
    return _answer(await service.abstain(place, abstention, min(wait, MAX_WAIT_S)), 202)


@v1.get("/runs/{run}/regions/{region}/steps/{step}/update/parts/{part}")
@allowed("admin", "observer", "ranks")
async def update(
    run: RunId, region: Name, step: RoundStep, part: Number, service: Coordinator, caller: Caller, wait: Wait = 0
) -> Response:
    return _answer(await service.update(run, region, step, part, min(wait, MAX_WAIT_S), caller.site), 204)
