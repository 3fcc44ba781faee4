"""Guards (rule A21): what sites report of their losses, and storage that is full, pauses a run with the reason.

Storage that is to drain first pauses nothing, but the run says what it waits for.
"""

import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from statistics import median

import structlog
from redis.exceptions import RedisError

from api.errors import ProblemError, StorageFullError, TooManyRequestsError
from api.schemas import MetricPoint, MetricReport, RunStatus
from api.specs import GuardsSpec
from coordinator.engine import Engine
from coordinator.events import GuardTripped, HeldBack, StorageFull
from coordinator.store import Store, unavailable

__all__ = ["Guards", "tripped"]

LOSSES = 50
"""A site's losses with which a new one is compared."""
_ENOUGH = 8
_LOSS = "loss"

log = structlog.get_logger()


def tripped(
    site: str, points: Sequence[MetricPoint], before: Sequence[float], guards: GuardsSpec
) -> GuardTripped | None:
    """What the first of the site's losses that is not as it should be does; `before`: its latest ones, finite."""
    losses = list(before)
    for point in points:
        if _LOSS not in point.values:
            continue
        loss = point.values[_LOSS]
        if loss is None or not math.isfinite(loss):
            if guards.nonfinite:
                return GuardTripped(point.step, f"the loss of site {site} is not finite at step {point.step}")
            continue
        middle = median(losses) if len(losses) >= _ENOUGH else math.inf
        if guards.spike is not None and loss > guards.spike * middle:
            because = f"the loss of site {site} is {loss:.4g} at step {point.step}, the median before {middle:.4g}"
            return GuardTripped(point.step, f"{because}: more than {guards.spike:g} times as much")
        losses = [*losses, loss][-LOSSES:]
    return None


class Guards:
    def __init__(self, store: Store, engine: Engine) -> None:
        self._store = store
        self._engine = engine

    async def look_at(self, run: str, report: MetricReport) -> None:
        """To be called before the points are stored."""
        state = (await self._store.load(run)).state
        if state.status is not RunStatus.RUNNING:
            return
        guards = state.spec.guards
        points = [point for point in report.points if point.step > state.unguarded_to]
        before = await self._store.series.latest(run, report.site, _LOSS, LOSSES) if guards.spike is not None else []
        event = tripped(report.site, points, before, guards)
        if event is not None:
            await self._engine.apply(run, event)

    @asynccontextmanager
    async def storage(self, run: str | None) -> AsyncIterator[None]:
        """What turns out in here of the storage, the run is told."""
        try:
            yield
        except (ProblemError, RedisError) as error:
            event = _of_storage(unavailable(error) if isinstance(error, RedisError) else error)
            if run is not None and event is not None:
                await self._tell(run, event)
            raise

    async def _tell(self, run: str, event: StorageFull | HeldBack) -> None:
        try:
            await self._engine.apply(run, event)
        except (ProblemError, RedisError) as error:
            log.error("cannot tell the run", run=run, because=event.because, error=str(error))


def _of_storage(problem: ProblemError) -> StorageFull | HeldBack | None:
    if isinstance(problem, StorageFullError):
        return StorageFull(problem.detail)
    return HeldBack(problem.detail) if isinstance(problem, TooManyRequestsError) else None
