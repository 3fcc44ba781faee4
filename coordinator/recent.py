"""What this process has read or made of late, so that it need not read it again. Nothing relies on it being there."""

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from algorithms.updates import SparseUpdate

__all__ = ["Bounded", "Recent", "Update", "bytes_of"]

_CONTRIBUTIONS = 64 << 20
_UPDATES = 32 << 20
_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


class Bounded(Generic[_K, _V]):
    """Values of at most `most` bytes together; the oldest give way. One that is larger by itself is not kept."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._total = 0
        self._kept: OrderedDict[_K, tuple[_V, int]] = OrderedDict()

    def put(self, key: _K, value: _V, size: int) -> None:
        self.drop(key)
        if size > self._most:
            return
        self._kept[key] = (value, size)
        self._total += size
        while self._total > self._most:
            self.drop(next(iter(self._kept)))

    def get(self, key: _K) -> _V | None:
        found = self._kept.get(key)
        return None if found is None else found[0]

    def drop(self, key: _K) -> None:
        """Whether it is there or not."""
        found = self._kept.pop(key, None)
        if found is not None:
            self._total -= found[1]


@dataclass(frozen=True)
class Update:
    """The message of a step entry, its SHA-256, and the milliseconds that went into it, by what was done."""

    message: bytes
    sha256: str
    timing: Mapping[str, float]
    ready: float
    """When it was committed, by `time.perf_counter`."""


class Recent:
    """Attributes:
    contributions: validated, of rounds that are not aggregated, by run and digest of the message.
    updates: messages of step entries, by run, region, step and part.
    """

    def __init__(self) -> None:
        self.contributions: Bounded[tuple[str, str], SparseUpdate] = Bounded(_CONTRIBUTIONS)
        self.updates: Bounded[tuple[str, str, int, int], Update] = Bounded(_UPDATES)


def bytes_of(update: SparseUpdate) -> int:
    """What its arrays take in memory."""
    return sum(array.nbytes for part in update.shapes.values() for array in vars(part).values())
