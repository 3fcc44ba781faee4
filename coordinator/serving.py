"""What one process serves: the service, its background work, and uvicorn around it, on a socket that is open."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Iterator
from functools import partial

import numpy as np
import structlog
import uvicorn
from redis.exceptions import RedisError
from starlette.requests import Request
from starlette.responses import Response

from api.app import create_app
from api.middleware import problem_response
from api.rates import Rates
from coordinator.blob_stores import blob_store
from coordinator.connections import BoundedConnection
from coordinator.ending import SIGNALS
from coordinator.service import CoordinatorService
from coordinator.settings import Settings
from coordinator.store import Store, unavailable

__all__ = ["serve"]

log = structlog.get_logger()

_KEPT = 4 << 20
"""Bytes of blocks that are not given back to the kernel as soon as they are free."""


async def serve(settings: Settings, redis_url: str, listener: socket.socket) -> None:
    """Until SIGTERM or Ctrl-C, or until the background work fails."""
    _keep_freed_memory()
    store = Store(redis_url)
    service = CoordinatorService(store, blob_store(settings), settings)
    await service.tick()
    app = create_app(service, Rates(settings.rate_limit, settings.failure_limit))
    app.add_exception_handler(RedisError, _unavailable)
    config = uvicorn.Config(
        app,
        http=BoundedConnection,
        ws="none",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=3,
        timeout_keep_alive=30,
        lifespan="off",
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
    )
    server = _Server(config, service)
    background = [asyncio.create_task(work()) for work in (service.keep_ticking, service.keep_listening)]
    for task in background:
        task.add_done_callback(partial(_end_with, server))
    try:
        await server.serve(sockets=[listener])
    finally:
        for task in background:
            task.cancel()
        await asyncio.wait(background, timeout=1)
        await store.close()


def _keep_freed_memory() -> None:
    """glibc maps blocks that are larger than all that were freed before, so that every use of one costs page faults:
    a fifth of the time of aggregating. Now one of this size was freed (mallopt(3), M_MMAP_THRESHOLD).
    """
    np.empty(_KEPT, np.uint8)


def _end_with(server: uvicorn.Server, task: asyncio.Task[None]) -> None:
    """A coordinator whose background work has failed must not look alive: whoever supervises it starts it again."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("background work failed, ending", exc_info=error)
        server.should_exit = True


async def _unavailable(_: Request, error: Exception) -> Response:
    return problem_response(unavailable(error))


class _Server(uvicorn.Server):
    """Answers open polls as soon as it is told to end, so that the end takes no longer than the work in hand."""

    def __init__(self, config: uvicorn.Config, service: CoordinatorService) -> None:
        super().__init__(config)
        self._service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._service.close()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, which would raise the signal once more when all is answered: our callers clean up, too."""
        before = {number: signal.signal(number, self.handle_exit) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
