"""How a process of the coordinator ends: when told to by a signal, or with the first of its tasks that ends."""

import asyncio
import signal
from collections.abc import Coroutine
from types import FrameType
from typing import Any, NoReturn

__all__ = ["SIGNALS", "end_on_signals", "until_one_ends"]

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def end_on_signals() -> None:
    """Until somebody else handles them: this process ends by way of its `finally` clauses, with exit status 0."""
    for number in SIGNALS:
        signal.signal(number, _end)


def _end(_: int, __: FrameType | None) -> NoReturn:
    raise SystemExit(0)


async def until_one_ends(*work: Coroutine[Any, Any, Any]) -> None:
    """Does all of it at once; when one ends, cancels the others and raises what that one has raised."""
    tasks = [asyncio.ensure_future(part) for part in work]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in ended:
        task.result()
