"""The routes: who may ask, what is read, which status is answered. Everything else is the service's."""

from importlib.metadata import version
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response

from api import message, schemas, specs
from api.authentication import principal_of
from api.errors import InvalidError
from api.payload import MEDIA_TYPE
from api.permissions import GuardedRoute, allowed, require
from api.service import Principal, Scope, Service

__all__ = [
    "MAX_WAIT_S",
    "READERS",
    "Caller",
    "Coordinator",
    "Name",
    "Number",
    "RunId",
    "Wait",
    "attempt_of",
    "public",
    "v1",
]

MAX_WAIT_S = 30.0
_MAX_POINTS = 10_000

public = APIRouter()
v1 = APIRouter(route_class=GuardedRoute)


async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


Coordinator = Annotated[Service, Depends(_service)]


async def _caller(request: Request) -> Principal:
    return principal_of(request)


Caller = Annotated[Principal, Depends(_caller)]
Wait = Annotated[float, Query(ge=0, description=f"seconds to wait, at most {MAX_WAIT_S:.0f}")]
Name = Annotated[message.Name, Path()]
RunId = Annotated[str, Path(max_length=80)]
Number = Annotated[int, Path(ge=0, le=2**48)]


def attempt_of(principal: Principal) -> int:
    """Which attempt of a site's ranks is asking; their tokens say so."""
    assert principal.attempt is not None
    return principal.attempt


READERS: tuple[Scope, ...] = ("admin", "observer", "site", "ranks")


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
    return schemas.Version(version=version("isthmus"), protocols=list(message.SUPPORTED_PROTOCOLS))


# --- sites ------------------------------------------------------------------------------------------------------------


@v1.put("/sites/{site}")
@allowed("join", "admin", act="site.register")
async def register_site(site: Name, registration: schemas.SiteRegistration, service: Coordinator) -> schemas.Registered:
    return await service.register_site(site, registration)


@v1.get("/sites")
@allowed("admin", "observer")
async def list_sites(service: Coordinator) -> schemas.SitePage:
    return schemas.SitePage(items=await service.list_sites())


@v1.get("/sites/{site}")
@allowed("admin", "observer", "site")
async def get_site(site: Name, service: Coordinator) -> schemas.Site:
    return await service.site(site)


@v1.delete("/sites/{site}", status_code=204)
@allowed("admin", act="site.remove")
async def remove_site(site: Name, service: Coordinator) -> None:
    await service.remove_site(site)


@v1.post("/sites/{site}/heartbeat")
@allowed("site")
async def heartbeat(
    site: Name, body: schemas.Heartbeat, service: Coordinator, wait: Wait = 0
) -> schemas.HeartbeatReply:
    return await service.heartbeat(site, body, min(wait, MAX_WAIT_S))


@v1.post("/sites/{site}/leave", status_code=204)
@allowed("site")
async def leave(site: Name, service: Coordinator) -> None:
    await service.leave(site)


# --- runs -------------------------------------------------------------------------------------------------------------


@v1.post("/runs", status_code=201)
@allowed("admin", act="run.create")
async def create_run(
    spec: specs.RunSpec,
    service: Coordinator,
    response: Response,
    idempotency_key: Annotated[str | None, Header(max_length=128)] = None,
) -> schemas.Run:
    run = await service.create_run(spec, idempotency_key)
    response.headers["Location"] = f"runs/{run.id}"
    return run


@v1.get("/runs")
@allowed("admin", "observer")
async def list_runs(service: Coordinator) -> schemas.RunPage:
    return schemas.RunPage(items=await service.list_runs())


@v1.get("/runs/{run}")
@allowed(*READERS)
async def get_run(run: RunId, service: Coordinator) -> schemas.Run:
    return await service.run(run)


@v1.delete("/runs/{run}", status_code=204)
@allowed("admin", act="run.delete")
async def delete_run(run: RunId, service: Coordinator) -> None:
    await service.delete_run(run)


@v1.post("/runs/{run}/start", status_code=202)
@allowed("admin", act="run.start")
async def start_run(run: RunId, service: Coordinator) -> schemas.Run:
    return await service.start_run(run)


@v1.post("/runs/{run}/stop", status_code=202)
@allowed("admin", act="run.stop")
async def stop_run(run: RunId, service: Coordinator) -> schemas.Run:
    return await service.stop_run(run)


@v1.post("/runs/{run}/pause", status_code=202)
@allowed("admin", act="run.pause")
async def pause_run(run: RunId, service: Coordinator) -> schemas.Run:
    return await service.pause_run(run)


@v1.post("/runs/{run}/resume", status_code=202)
@allowed("admin", act="run.resume")
async def resume_run(run: RunId, service: Coordinator) -> schemas.Run:
    return await service.resume_run(run)


@v1.post("/runs/{run}/changes", status_code=202)
@allowed("admin", act="run.change")
async def change_run(run: RunId, change: specs.Change, service: Coordinator) -> schemas.Run:
    return await service.change_run(run, change)


@v1.put("/runs/{run}/sites/{site}", status_code=202)
@allowed("admin", act="run.add-site")
async def add_site(run: RunId, site: Name, service: Coordinator) -> schemas.Run:
    return await service.add_site(run, site)


@v1.delete("/runs/{run}/sites/{site}", status_code=202)
@allowed("admin", act="run.remove-site")
async def exclude_site(run: RunId, site: Name, service: Coordinator) -> schemas.Run:
    return await service.exclude_site(run, site)


@v1.get("/runs/{run}/sites")
@allowed(*READERS)
async def run_sites(run: RunId, service: Coordinator) -> list[schemas.MemberView]:
    return (await service.run(run)).members


@v1.get("/runs/{run}/outer-rounds")
@allowed("admin", "observer")
async def outer_rounds(run: RunId, service: Coordinator) -> schemas.OuterRoundPage:
    return schemas.OuterRoundPage(items=await service.outer_rounds(run))


@v1.get("/runs/{run}/layout")
@allowed("admin", "observer", "ranks")
async def layout(run: RunId, service: Coordinator) -> schemas.RunLayout:
    return await service.layout(run)


@v1.get("/runs/{run}/model")
@allowed("admin", "observer")
async def model(run: RunId, service: Coordinator) -> schemas.Model:
    return await service.model(run)


# --- a site's part in a run -------------------------------------------------------------------------------------------


@v1.put("/runs/{run}/sites/{site}/seat", status_code=204)
@allowed("site")
async def take_seat(run: RunId, site: Name, seat: schemas.Seat, service: Coordinator) -> None:
    await service.take_seat(run, site, seat)


@v1.put("/runs/{run}/sites/{site}/layout")
@allowed("ranks")
async def join(run: RunId, site: Name, request: schemas.JoinRequest, service: Coordinator) -> schemas.JoinReply:
    return await service.join(run, site, request)


@v1.post("/runs/{run}/sites/{site}/caught-up")
@allowed("ranks")
async def caught_up(run: RunId, site: Name, report: schemas.CaughtUp, service: Coordinator) -> schemas.CaughtUpReply:
    return await service.caught_up(run, site, report)


@v1.put("/runs/{run}/sites/{site}/start", status_code=204)
@allowed("ranks")
async def upload_start(
    run: RunId, site: Name, start: schemas.StartUpload, service: Coordinator, caller: Caller
) -> None:
    await service.upload_start(run, site, attempt_of(caller), start)


@v1.put("/runs/{run}/sites/{site}/final")
@allowed("ranks")
async def report_final(
    run: RunId, site: Name, report: schemas.FinalReport, service: Coordinator, caller: Caller
) -> schemas.FinalReply:
    return await service.report_final(run, site, attempt_of(caller), report)


@v1.get("/runs/{run}/regions/{region}/log")
@allowed("admin", "observer", "ranks")
async def log(
    run: RunId,
    region: Name,
    service: Coordinator,
    start: Annotated[int, Query(alias="from", ge=0, le=2**48)] = 0,
    stop: Annotated[int | None, Query(alias="to", ge=0, le=2**48)] = None,
    wait: Wait = 0,
) -> schemas.LogPage:
    if stop is not None and stop <= start:
        raise InvalidError("empty_range", f"to = {stop} must be greater than from = {start}")
    return await service.log(run, region, start, stop, min(wait, MAX_WAIT_S))


@v1.get("/runs/{run}/regions/{region}/log/{seq}/parts/{part}")
@allowed("admin", "observer", "ranks")
async def entry(run: RunId, region: Name, seq: Number, part: Number, service: Coordinator) -> Response:
    return Response(await service.entry(run, region, seq, part), media_type=MEDIA_TYPE)


@v1.put("/runs/{run}/outer-rounds/{number}/fragments/{fragment}/sites/{site}")
@allowed("ranks")
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
    place = (run, number, fragment, site, attempt_of(caller))
    return await service.announce(*place, announcement, min(wait, MAX_WAIT_S))


# --- metrics ----------------------------------------------------------------------------------------------------------


@v1.post("/runs/{run}/metrics", status_code=204)
@allowed("ranks")
async def add_metrics(run: RunId, report: schemas.MetricReport, service: Coordinator, caller: Caller) -> None:
    require(caller, "ranks", site=report.site)
    await service.add_metrics(run, report)


@v1.get("/runs/{run}/metrics")
@allowed("admin", "observer", "ranks")
async def metrics(
    run: RunId,
    service: Coordinator,
    max_points: Annotated[int, Query(ge=1, le=_MAX_POINTS, description="of each series, evenly spaced")] = _MAX_POINTS,
) -> schemas.MetricPage:
    return schemas.MetricPage(items=await service.metrics(run, max_points))
