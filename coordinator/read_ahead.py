"""Ranges of blobs that are far away: of those read one after the other, the next one is on its way meanwhile."""

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from threading import Lock, Thread

__all__ = ["ReadAhead"]

Fetch = Callable[[str, int, int], bytes]
"""Bytes start to stop (exclusive) of a blob, fewer if it ends before."""

_BLOBS = 8
"""Of which something is on its way, or waits to be read, at once."""
_LARGEST = 4 << 20
"""Bytes of a range that is followed by the next one."""


class ReadAhead:
    """One range of each blob, and of a few blobs, as long as the last one that was read of it: so memory is bounded.

    May be used by several threads.
    """

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._lock = Lock()
        self._ends: OrderedDict[str, int] = OrderedDict()
        """Where the last range of a blob ended; the blob that was read last is the last one."""
        self._coming: dict[str, tuple[int, int, Future[bytes]]] = {}
        """Of a blob, where the range begins and ends that is on its way, or waits."""

    def read(self, digest: str, start: int, stop: int) -> bytes:
        with self._lock:
            begins, ends, coming = self._coming.pop(digest, (0, 0, None))
            if self._ends.pop(digest, None) == start and stop - start <= _LARGEST:
                following = stop, 2 * stop - start
                self._coming[digest] = *following, _in_background(self._fetch, digest, *following)
            self._ends[digest] = stop
            if len(self._ends) > _BLOBS:
                self._coming.pop(self._ends.popitem(last=False)[0], None)
        if coming is None or begins != start or ends < stop or coming.exception() is not None:
            return self._fetch(digest, start, stop)
        return coming.result()[: stop - start]


def _in_background(fetch: Fetch, digest: str, start: int, stop: int) -> "Future[bytes]":
    """In a thread that does not keep the process alive."""
    future: Future[bytes] = Future()

    def run() -> None:
        try:
            future.set_result(fetch(digest, start, stop))
        except BaseException as error:  # noqa: BLE001  # whoever reads that range asks for it again
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future
