"""`python -m coordinator`: Redis (its own unless told otherwise), the socket, the tokens, and who serves on it."""

import asyncio
import contextlib
import secrets
import socket
import sys
from pathlib import Path
from typing import Literal

import structlog
import uvloop
from pydantic import ValidationError
from pydantic_settings import CliApp
from redis.exceptions import RedisError

from algorithms import kernels
from api.errors import IsthmusError, faults_of
from api.logs import log_to_stderr
from api.output_file import make_directory
from coordinator.blob_stores import blob_store
from coordinator.ending import end_on_signals, until_one_ends
from coordinator.redis_server import EmbeddedRedis
from coordinator.serving import serve
from coordinator.settings import Settings
from coordinator.store import Store
from coordinator.tls import check_certificate, is_loopback
from coordinator.tokens import hashed
from coordinator.workers import supervise

log = structlog.get_logger()


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 after SIGTERM or Ctrl-C, 1 if it could not start, 2 for settings that make no sense."""
    log_to_stderr()
    try:
        settings = CliApp.run(Settings, cli_args=sys.argv[1:] if arguments is None else arguments)
    except ValidationError as error:
        for fault in faults_of(error.errors()):
            print(f"isthmus coordinator: {fault}", file=sys.stderr)  # noqa: T201
        return 2
    end_on_signals()
    try:
        _run(settings)
    except IsthmusError as error:
        print(f"isthmus coordinator: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


def _run(settings: Settings) -> None:
    if settings.tls_cert is not None and settings.tls_key is not None:
        check_certificate(settings.tls_cert, settings.tls_key)
    elif not is_loopback(settings.host):
        log.warning(
            "without --tls-cert tokens cross the network in the clear, unless a proxy does TLS", host=settings.host
        )
    make_directory(settings.data_dir, 0o700)
    listener = _listen(settings.host, settings.port)
    with contextlib.ExitStack() as stack:
        stack.callback(listener.close)
        embedded = None if settings.redis_url else stack.enter_context(EmbeddedRedis(settings.data_dir))
        uvloop.run(_coordinate(settings, embedded, listener))


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


async def _coordinate(settings: Settings, embedded: EmbeddedRedis | None, listener: socket.socket) -> None:
    """What is done once, however many processes serve, and then they."""
    redis_url = settings.redis_url or (embedded.url if embedded else "")
    await _prepare(settings, redis_url)
    host, port = listener.getsockname()[:2]
    url = f"{'https' if settings.tls_cert else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
    _write(settings.data_dir / "url", url)
    log.info("coordinator listens", url=url, data_dir=str(settings.data_dir.absolute()))
    serving = serve if settings.workers == 1 else supervise
    work = [serving(settings, redis_url, listener)]
    if embedded is not None:
        work.append(_keep_alive(embedded))
    await until_one_ends(*work)


async def _keep_alive(embedded: EmbeddedRedis) -> None:
    """The embedded Redis may be killed: it starts again with its data, and whoever waited for it goes on."""
    while True:
        await asyncio.sleep(0.5)
        if embedded.revive():
            log.error("the embedded redis had ended and was started again")


async def _prepare(settings: Settings, redis_url: str) -> None:
    store = Store(redis_url)
    try:
        await _reach(store, redis_url)
        await _grant_tokens(store, settings)
        await blob_store(settings).check()
        for warning in await store.warnings():
            log.warning(warning)
        if kernels.compiled is None:
            log.warning(
                "rounds are aggregated by numpy alone, more slowly: install Isthmus where there is a C compiler"
            )
    finally:
        await store.close()


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
    given: dict[Literal["admin", "join", "observer"], str | None] = {
        "admin": settings.admin_token,
        "join": settings.join_token,
        "observer": settings.observer_token,
    }
    for scope, token in given.items():
        if token is None:
            path = settings.data_dir / f"{scope}-token"
            if not path.exists():
                _create(path, secrets.token_urlsafe(32))
            token = path.read_text().strip()
            log.info("token", scope=scope, file=str(path.absolute()))
        await store.tokens.install(scope, hashed(token), await store.now())


def _create(path: Path, secret: str) -> None:
    """Unless another coordinator that shares the directory has just done so."""
    draft = _draft(path, secret, mode=0o600)
    with contextlib.suppress(FileExistsError):
        path.hardlink_to(draft)
    draft.unlink()


def _write(path: Path, text: str) -> None:
    _draft(path, text, mode=0o644).replace(path)


def _draft(path: Path, text: str, mode: int) -> Path:
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    draft.touch(mode)
    draft.write_text(text + "\n")
    return draft


if __name__ == "__main__":
    sys.exit(main())
