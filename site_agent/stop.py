"""SIGTERM in a rank: the end of it, as an exception, but never in the middle of what must be whole."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["Stop"]

_EXIT_CODE = 128 + signal.SIGTERM


class Stop:
    """A context, in the main thread, in which SIGTERM raises SystemExit; while it is held, as soon as it is let go.

    Attributes:
        asked: whether SIGTERM has come.
    """

    def __init__(self) -> None:
        self.asked = False
        self._held = False
        self._before: Any = signal.SIG_DFL

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._ask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._before)

    def _ask(self, _: int, __: FrameType | None) -> None:
        self.asked = True
        self._raise_if_due()

    def _raise_if_due(self) -> None:
        if self.asked and not self._held:
            raise SystemExit(_EXIT_CODE)

    def hold(self) -> None:
        self._held = True

    def let_go(self) -> None:
        self._held = False
        self._raise_if_due()

    @contextlib.contextmanager
    def let(self) -> Iterator[None]:
        """For a wait: the end may come in here. Held again after it, if it was."""
        held = self._held
        self.let_go()
        try:
            yield
        finally:
            self._held = held
