"""Work that takes a few ms at most is done in the event loop: a thread would cost as much, sharing the interpreter."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["in_place"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


async def in_place(work: Callable[_P, _T], *arguments: _P.args, **options: _P.kwargs) -> _T:
    """Called as `asyncio.to_thread`."""
    return work(*arguments, **options)
