"""Routes about snapshots of runs."""

from fastapi import APIRouter

from api import schemas
from api.permissions import GuardedRoute, allowed
from api.routes import Caller, Coordinator, Name, Number, RunId, attempt_of

__all__ = ["v1"]

v1 = APIRouter(route_class=GuardedRoute)


@v1.post("/runs/{run}/snapshots", status_code=202)
@allowed("admin", act="run.snapshot")
async def request_snapshot(run: RunId, service: Coordinator) -> schemas.SnapshotPage:
    return await service.snapshots.request(run)


@v1.get("/runs/{run}/snapshots")
@allowed("admin", "observer")
async def list_snapshots(run: RunId, service: Coordinator) -> schemas.SnapshotPage:
    return await service.snapshots.all(run)


@v1.put("/runs/{run}/snapshots/{number}/sites/{site}", status_code=204)
@allowed("ranks")
async def take_snapshot(
    run: RunId, number: Number, site: Name, upload: schemas.SnapshotUpload, service: Coordinator, caller: Caller
) -> None:
    await service.snapshots.take(run, number, site, attempt_of(caller), upload)
