"""The routes: who may ask, what is read, which status is answered. Everything else is the service's."""

from importlib.metadata import version
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from fastapi.responses import StreamingResponse

from api import schemas
from api.errors import ForbiddenError, InvalidError, UnauthorizedError, UnsupportedMediaError
from api.payload import MEDIA_TYPE
from api.service import Answer, Principal, Service

__all__ = ["public", "v1"]

MAX_WAIT_S = 30.0
_MAX_POINTS = 10_000

public = APIRouter()
v1 = APIRouter()


async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


Coordinator = Annotated[Service, Depends(_service)]


async def _principal(service: Coordinator, authorization: Annotated[str, Header()] = "") -> Principal:
    scheme, _, token = authorization.partition(" ")
    if scheme.lower() != "bearer" or not token:
        raise UnauthorizedError("token_missing", "this needs a token: send `Authorization: Bearer TOKEN`")
    principal = await service.authenticate(token.strip())
    if principal is None:
        raise UnauthorizedError("token_unknown", "nobody has issued this token, or it was revoked")
    return principal


Caller = Annotated[Principal, Depends(_principal)]
Wait = Annotated[float, Query(ge=0, description=f"seconds to wait, at most {MAX_WAIT_S:.0f}")]
Name = Annotated[schemas.Name, Path()]
RunId = Annotated[str, Path(max_length=80)]
Digest = Annotated[schemas.Digest, Path()]
Number = Annotated[int, Path(ge=0, le=2**48)]
RoundStep = Annotated[int, Path(ge=1, le=2**48)]


def _require(principal: Principal, *scopes: str, site: str | None = None, run: str | None = None) -> None:
    """Raises ForbiddenError unless the token has one of the scopes and belongs to this site and run."""
    if principal.scope not in scopes:
        needed = " or ".join(scopes)
        raise ForbiddenError("wrong_scope", f"this needs a token with scope {needed}, not {principal.scope}")
    if principal.scope in ("site", "ranks") and site is not None and principal.site != site:
        raise ForbiddenError("wrong_site", f"this token belongs to site {principal.site!r}, not to {site!r}")
    if principal.scope == "ranks" and run is not None and principal.run != run:
        raise ForbiddenError("wrong_run", f"this token belongs to run {principal.run}, not to {run}")


def _attempt(principal: Principal) -> int:
    """Which attempt of a site's ranks is asking; their tokens say so."""
    assert principal.attempt is not None
    return principal.attempt


READERS = ("admin", "observer", "site", "ranks")


# --- public -----------------------------------------------------------------------------------------------------------


@public.get("/healthz")
async def healthz(service: Coordinator, response: Response) -> schemas.Health:
    health = await service.health()
    response.status_code = 200 if health.status == "ok" else 503
    return health


@public.get("/readyz")
async def readyz(service: Coordinator, response: Response) -> schemas.Health:
    health = await service.ready()
    response.status_code = 200 if health.status == "ok" else 503
    return health


@public.get("/version")
async def get_version() -> schemas.Version:
    return schemas.Version(version=version("isthmus"), protocols=list(schemas.SUPPORTED_PROTOCOLS))


# --- sites ------------------------------------------------------------------------------------------------------------


@v1.put("/sites/{name}")
async def register_site(
    name: Name, registration: schemas.SiteRegistration, service: Coordinator, caller: Caller
) -> schemas.Registered:
    _require(caller, "join", "admin")
    return await service.register_site(name, registration)


@v1.get("/sites")
async def list_sites(service: Coordinator, caller: Caller) -> schemas.SitePage:
    _require(caller, "admin", "observer")
    return schemas.SitePage(items=await service.list_sites())


@v1.get("/sites/{name}")
async def get_site(name: Name, service: Coordinator, caller: Caller) -> schemas.Site:
    _require(caller, "admin", "observer", "site", site=name)
    return await service.site(name)


@v1.delete("/sites/{name}", status_code=204)
async def remove_site(name: Name, service: Coordinator, caller: Caller) -> None:
    _require(caller, "admin")
    await service.remove_site(name)


@v1.post("/sites/{name}/heartbeat")
async def heartbeat(
    name: Name, body: schemas.Heartbeat, service: Coordinator, caller: Caller, wait: Wait = 0
) -> schemas.HeartbeatReply:
    _require(caller, "site", site=name)
    return await service.heartbeat(name, body, min(wait, MAX_WAIT_S))


@v1.post("/sites/{name}/leave", status_code=204)
async def leave(name: Name, service: Coordinator, caller: Caller) -> None:
    _require(caller, "site", site=name)
    await service.leave(name)


# --- runs -------------------------------------------------------------------------------------------------------------


@v1.post("/runs", status_code=201)
async def create_run(
    spec: schemas.RunSpec,
    service: Coordinator,
    caller: Caller,
    idempotency_key: Annotated[str | None, Header(max_length=128)] = None,
) -> schemas.Run:
    _require(caller, "admin")
    return await service.create_run(spec, idempotency_key)


@v1.get("/runs")
async def list_runs(service: Coordinator, caller: Caller) -> schemas.RunPage:
    _require(caller, "admin", "observer")
    return schemas.RunPage(items=await service.list_runs())


@v1.get("/runs/{run}")
async def get_run(run: RunId, service: Coordinator, caller: Caller) -> schemas.Run:
    _require(caller, *READERS, run=run)
    return await service.run(run)


@v1.delete("/runs/{run}", status_code=204)
async def delete_run(run: RunId, service: Coordinator, caller: Caller) -> None:
    _require(caller, "admin")
    await service.delete_run(run)


@v1.post("/runs/{run}/start", status_code=202)
async def start_run(run: RunId, service: Coordinator, caller: Caller) -> schemas.Run:
    _require(caller, "admin")
    return await service.start_run(run)


@v1.post("/runs/{run}/stop", status_code=202)
async def stop_run(run: RunId, service: Coordinator, caller: Caller) -> schemas.Run:
    _require(caller, "admin")
    return await service.stop_run(run)


@v1.post("/runs/{run}/pause", status_code=202)
async def pause_run(run: RunId, service: Coordinator, caller: Caller) -> schemas.Run:
    _require(caller, "admin")
    return await service.pause_run(run)


@v1.post("/runs/{run}/resume", status_code=202)
async def resume_run(run: RunId, service: Coordinator, caller: Caller) -> schemas.Run:
    _require(caller, "admin")
    return await service.resume_run(run)


@v1.put("/runs/{run}/sites/{site}", status_code=202)
async def add_site(run: RunId, site: Name, service: Coordinator, caller: Caller) -> schemas.Run:
    _require(caller, "admin")
    return await service.add_site(run, site)


@v1.delete("/runs/{run}/sites/{site}", status_code=202)
async def exclude_site(run: RunId, site: Name, service: Coordinator, caller: Caller) -> schemas.Run:
    _require(caller, "admin")
    return await service.exclude_site(run, site)


@v1.get("/runs/{run}/sites")
async def run_sites(run: RunId, service: Coordinator, caller: Caller) -> list[schemas.MemberView]:
    _require(caller, *READERS, run=run)
    return (await service.run(run)).members


@v1.get("/runs/{run}/outer-rounds")
async def outer_rounds(run: RunId, service: Coordinator, caller: Caller) -> schemas.OuterRoundPage:
    _require(caller, "admin", "observer")
    return schemas.OuterRoundPage(items=await service.outer_rounds(run))


@v1.get("/runs/{run}/layout")
async def layout(run: RunId, service: Coordinator, caller: Caller) -> schemas.RunLayout:
    _require(caller, "admin", "observer", "ranks", run=run)
    return await service.layout(run)


@v1.get("/runs/{run}/model")
async def model(run: RunId, service: Coordinator, caller: Caller) -> schemas.Model:
    _require(caller, "admin", "observer")
    return await service.model(run)


# --- a site's part in a run -------------------------------------------------------------------------------------------


@v1.put("/runs/{run}/sites/{site}/seat", status_code=204)
async def take_seat(run: RunId, site: Name, seat: schemas.Seat, service: Coordinator, caller: Caller) -> None:
    _require(caller, "site", site=site)
    await service.take_seat(run, site, seat)


@v1.put("/runs/{run}/sites/{site}/layout")
async def join(
    run: RunId, site: Name, request: schemas.JoinRequest, service: Coordinator, caller: Caller
) -> schemas.JoinReply:
    _require(caller, "ranks", site=site, run=run)
    return await service.join(run, site, request)


@v1.post("/runs/{run}/sites/{site}/caught-up")
async def caught_up(
    run: RunId, site: Name, report: schemas.CaughtUp, service: Coordinator, caller: Caller
) -> schemas.CaughtUpReply:
    _require(caller, "ranks", site=site, run=run)
    return await service.caught_up(run, site, report)


@v1.put("/runs/{run}/sites/{site}/start", status_code=204)
async def upload_start(
    run: RunId, site: Name, start: schemas.StartUpload, service: Coordinator, caller: Caller
) -> None:
    _require(caller, "ranks", site=site, run=run)
    await service.upload_start(run, site, _attempt(caller), start)


@v1.put("/runs/{run}/sites/{site}/final")
async def report_final(
    run: RunId, site: Name, report: schemas.FinalReport, service: Coordinator, caller: Caller
) -> schemas.FinalReply:
    _require(caller, "ranks", site=site, run=run)
    return await service.report_final(run, site, _attempt(caller), report)


def _answer(answer: Answer, waiting_status: Literal[202, 204]) -> Response:
    if answer.message is not None:
        return Response(answer.message, media_type=MEDIA_TYPE)
    if waiting_status == 204:
        return Response(status_code=204)
    accepted = {"Isthmus-Accepted": "true" if answer.accepted else "false"}
    return Response(answer.waiting_for.encode(), status_code=202, media_type="text/plain", headers=accepted)


@v1.put("/runs/{run}/regions/{region}/steps/{step}/contributions/{site}/parts/{part}")
async def contribute(
    run: RunId,
    region: Name,
    step: RoundStep,
    site: Name,
    part: Number,
    request: Request,
    service: Coordinator,
    caller: Caller,
    wait: Wait = 0,
) -> Response:
    _require(caller, "ranks", site=site, run=run)
    if request.headers.get("content-type") != MEDIA_TYPE:
        raise UnsupportedMediaError("media_type", f"a contribution is {MEDIA_TYPE}; set Content-Type to that")
    body = await request.body()
    place = (run, region, step, site, _attempt(caller))
    return _answer(await service.contribute(*place, part, body, min(wait, MAX_WAIT_S)), 202)


@v1.put("/runs/{run}/regions/{region}/steps/{step}/abstentions/{site}")
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
    _require(caller, "ranks", site=site, run=run)
    place = (run, region, step, site, _attempt(caller))
    return _answer(await service.abstain(*place, abstention, min(wait, MAX_WAIT_S)), 202)


@v1.get("/runs/{run}/regions/{region}/steps/{step}/update/parts/{part}")
async def update(
    run: RunId, region: Name, step: RoundStep, part: Number, service: Coordinator, caller: Caller, wait: Wait = 0
) -> Response:
    _require(caller, "admin", "observer", "ranks", run=run)
    return _answer(await service.update(run, region, step, part, min(wait, MAX_WAIT_S)), 204)


@v1.get("/runs/{run}/regions/{region}/log")
async def log(
    run: RunId,
    region: Name,
    service: Coordinator,
    caller: Caller,
    start: Annotated[int, Query(alias="from", ge=0, le=2**48)] = 0,
    stop: Annotated[int | None, Query(alias="to", ge=0, le=2**48)] = None,
    wait: Wait = 0,
) -> schemas.LogPage:
    _require(caller, "admin", "observer", "ranks", run=run)
    if stop is not None and stop <= start:
        raise InvalidError("empty_range", f"to = {stop} must be greater than from = {start}")
    return await service.log(run, region, start, stop, min(wait, MAX_WAIT_S))


@v1.get("/runs/{run}/regions/{region}/log/{seq}/parts/{part}")
async def entry(run: RunId, region: Name, seq: Number, part: Number, service: Coordinator, caller: Caller) -> Response:
    _require(caller, "admin", "observer", "ranks", run=run)
    return Response(await service.entry(run, region, seq, part), media_type=MEDIA_TYPE)


@v1.put("/runs/{run}/outer-rounds/{number}/fragments/{fragment}/sites/{site}")
async def announce(
    run: RunId,
    number: Number,
    fragment: Number,
    site: Name,
    announcement: schemas.Announcement,
    service: Coordinator,
    caller: Caller,
    wait: Wait = 0,
) -> schemas.AnnouncementReply:
    _require(caller, "ranks", site=site, run=run)
    place = (run, number, fragment, site, _attempt(caller))
    return await service.announce(*place, announcement, min(wait, MAX_WAIT_S))


# --- blobs ------------------------------------------------------------------------------------------------------------


@v1.put("/blobs/{digest}", status_code=201)
async def put_blob(digest: Digest, request: Request, service: Coordinator, caller: Caller, response: Response) -> None:
    _require(caller, "admin", "ranks")
    if not await service.put_blob(digest, request.stream()):
        response.status_code = 200


@v1.head("/blobs/{digest}")
async def head_blob(digest: Digest, service: Coordinator, caller: Caller) -> Response:
    _require(caller, *READERS)
    return Response(headers={"Content-Length": str(await service.blob_size(digest)), "Etag": f'"{digest}"'})


@v1.get("/blobs/{digest}")
async def get_blob(digest: Digest, service: Coordinator, caller: Caller) -> Response:
    _require(caller, *READERS)
    size = await service.blob_size(digest)
    return StreamingResponse(
        await service.blob(digest),
        media_type="application/octet-stream",
        headers={"Content-Length": str(size), "Etag": f'"{digest}"'},
    )


# --- metrics ----------------------------------------------------------------------------------------------------------


@v1.post("/runs/{run}/metrics", status_code=204)
async def add_metrics(run: RunId, report: schemas.MetricReport, service: Coordinator, caller: Caller) -> None:
    _require(caller, "ranks", site=report.site, run=run)
    await service.add_metrics(run, report)


@v1.get("/runs/{run}/metrics")
async def metrics(
    run: RunId,
    service: Coordinator,
    caller: Caller,
    max_points: Annotated[int, Query(ge=1, le=_MAX_POINTS, description="of each series, evenly spaced")] = _MAX_POINTS,
) -> schemas.MetricPage:
    _require(caller, "admin", "observer", "ranks", run=run)
    return schemas.MetricPage(items=await service.metrics(run, max_points))
