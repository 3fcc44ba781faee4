"""Several processes that serve on one socket, and the parent that starts them again when they die.

Not uvicorn's own supervisor: its workers run no background work, outlive a parent that is killed, and need the
application as an import path.
"""

import asyncio
import socket
import sys
from contextlib import suppress

import structlog

from coordinator.ending import SIGNALS, until_one_ends
from coordinator.settings import Settings

__all__ = ["supervise"]

_PAUSE_S = 1.0
"""Before a worker that has died is replaced; the others serve meanwhile."""
_GRACE_S = 4.0

log = structlog.get_logger()


async def supervise(settings: Settings, redis_url: str, listener: socket.socket) -> None:
    """Keeps `settings.workers` of them running until SIGTERM or Ctrl-C; then ends them, within seconds."""
    theirs = settings.model_copy(update={"redis_url": redis_url}).model_dump_json().encode()
    told = asyncio.Event()
    for number in SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    await until_one_ends(told.wait(), *(_keep(theirs, listener) for _ in range(settings.workers)))


async def _keep(settings: bytes, listener: socket.socket) -> None:
    while True:
        worker = await _start(settings, listener)
        try:
            code = await worker.wait()
        except asyncio.CancelledError:
            await _end(worker)
            raise
        log.error("a worker has ended, another one follows", pid=worker.pid, exit_code=code)
        await asyncio.sleep(_PAUSE_S)


async def _start(settings: bytes, listener: socket.socket) -> asyncio.subprocess.Process:
    """Standard input stays open for as long as this process lives: its end is how a worker learns of ours."""
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "coordinator.worker", str(listener.fileno())),
        stdin=asyncio.subprocess.PIPE,
        pass_fds=[listener.fileno()],
        start_new_session=True,  # Ctrl-C at a terminal is for us, who tell them
    )
    assert worker.stdin is not None
    with suppress(ConnectionError):  # it has died, which `wait` will say
        worker.stdin.write(settings + b"\n")
        await worker.stdin.drain()
    return worker


async def _end(worker: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        worker.terminate()
    try:
        async with asyncio.timeout(_GRACE_S):
            await worker.wait()
    except TimeoutError:
        log.error("a worker did not end when told to and was killed", pid=worker.pid)
        with suppress(ProcessLookupError):
            worker.kill()
        await worker.wait()
