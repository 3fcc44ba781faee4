"""`python -m coordinator`: Redis (its own unless told otherwise), the service, and uvicorn around it."""

import asyncio
import contextlib
import os
import secrets
import socket
import sys
from functools import partial
from pathlib import Path

import structlog
import uvicorn
import uvloop
from pydantic import ValidationError
from pydantic_settings import CliApp
from redis.exceptions import RedisError
from starlette.requests import Request
from starlette.responses import Response

from api.app import create_app
from api.errors import IsthmusError, faults_of
from api.middleware import problem_response
from coordinator.blobs import BlobDirectory
from coordinator.redis_server import EmbeddedRedis
from coordinator.service import CoordinatorService
from coordinator.settings import Settings
from coordinator.store import Store, hashed, unavailable

log = structlog.get_logger()


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 after SIGTERM or Ctrl-C, 1 if it could not start, 2 for settings that make no sense."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    try:
        settings = CliApp.run(Settings, cli_args=sys.argv[1:] if arguments is None else arguments)
    except ValidationError as error:
        for fault in faults_of(error.errors()):
            print(f"isthmus coordinator: {fault}", file=sys.stderr)  # noqa: T201
        return 2
    try:
        _run(settings)
    except IsthmusError as error:
        print(f"isthmus coordinator: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


def _run(settings: Settings) -> None:
    settings.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    listener = _listen(settings.host, settings.port)
    with contextlib.ExitStack() as stack:
        stack.callback(listener.close)
        embedded = None if settings.redis_url else stack.enter_context(EmbeddedRedis(settings.data_dir))
        uvloop.run(_serve(settings, embedded, listener))


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, proto=socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise IsthmusError(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another with --port (0: any free one)"
        ) from None
    return listener


async def _serve(settings: Settings, embedded: EmbeddedRedis | None, listener: socket.socket) -> None:
    redis_url = settings.redis_url or (embedded.url if embedded else "")
    store = Store(redis_url)
    await _reach(store, redis_url)
    service = CoordinatorService(store, BlobDirectory(settings.data_dir / "blobs"), settings)
    await _grant_tokens(store, settings)
    for warning in await store.warnings():
        log.warning(warning)
    await service.tick()
    app = create_app(service)
    app.add_exception_handler(RedisError, _unavailable)
    config = uvicorn.Config(
        app, log_config=None, access_log=False, timeout_graceful_shutdown=3, timeout_keep_alive=30, lifespan="off"
    )
    server = _Server(config, service)
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    _write(settings.data_dir / "url", url)
    log.info("coordinator listens", url=url, data_dir=str(settings.data_dir.absolute()))
    background = [asyncio.create_task(service.keep_ticking())]
    if embedded is not None:
        background.append(asyncio.create_task(_keep_alive(embedded)))
    for task in background:
        task.add_done_callback(partial(_end_with, server))
    await server.serve(sockets=[listener])
    for task in background:
        task.cancel()
    await asyncio.wait(background, timeout=2)
    await store.close()


async def _keep_alive(embedded: EmbeddedRedis) -> None:
    """The embedded Redis may be killed: it starts again with its data, and whoever waited for it goes on."""
    while True:
        await asyncio.sleep(0.5)
        if embedded.revive():
            log.error("the embedded redis had ended and was started again")


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


async def _reach(store: Store, url: str, patience_s: float = 60.0) -> None:
    """Waits for Redis, so that it may be started after the coordinator."""
    deadline = asyncio.get_running_loop().time() + patience_s
    while True:
        try:
            return await store.ping()
        except RedisError as error:
            if asyncio.get_running_loop().time() > deadline:
                raise IsthmusError(f"no Redis answers at {_without_password(url)}: {error}") from None
            log.warning("waiting for redis", url=_without_password(url), error=str(error))
        await asyncio.sleep(1.0)


def _without_password(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"


async def _grant_tokens(store: Store, settings: Settings) -> None:
    """Tokens come from the settings, or are made at first start and kept in files that only their owner can read."""
    given = {"admin": settings.admin_token, "join": settings.join_token, "observer": settings.observer_token}
    for scope, token in given.items():
        if token is None:
            path = settings.data_dir / f"{scope}-token"
            if not path.exists():
                _write(path, secrets.token_urlsafe(32), mode=0o600)
            token = path.read_text().strip()
            log.info("token", scope=scope, file=str(path.absolute()))
        await store.install(scope, hashed(token))


def _write(path: Path, text: str, mode: int = 0o644) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.touch(mode)
    draft.write_text(text + "\n")
    draft.replace(path)


if __name__ == "__main__":
    sys.exit(main())
