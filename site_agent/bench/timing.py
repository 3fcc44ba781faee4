"""CPU time in interleaved rounds: medians, the spread, and ratios of what ran in the same round."""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Figure", "Samples", "figure", "rounded"]

Figure = dict[str, float]
"""`median`, `low` and `high` of the rounds."""


def rounded(value: float) -> float:
    """Four significant digits."""
    return float(f"{value:.4g}")


def figure(values: list[float]) -> Figure:
    return {
        "median": rounded(statistics.median(values)),
        "low": rounded(min(values)),
        "high": rounded(max(values)),
    }


class Samples:
    """CPU time of this process by name, in milliseconds, once per round.

    Whatever is compared runs in turn, so that a machine that slows down for a while slows both.
    """

    def __init__(self, parameters: int) -> None:
        self._millions = parameters / 1e6
        self._times: dict[str, list[float]] = {}

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        started = time.process_time()
        yield
        self._times.setdefault(name, []).append((time.process_time() - started) * 1e3)

    def add(self, total: str, *parts: str) -> None:
        """Names the sum of parts that were timed one by one."""
        self._times[total] = [sum(times) for times in zip(*(self._times[part] for part in parts), strict=True)]

    @property
    def names(self) -> set[str]:
        return set(self._times)

    def total(self, name: str) -> float:
        """Milliseconds, the median."""
        return rounded(statistics.median(self._times[name]))

    def per_million(self) -> dict[str, Figure]:
        """Milliseconds per million parameters of everything that was timed."""
        return {name: figure([value / self._millions for value in times]) for name, times in self._times.items()}

    def ratio(self, slow: str, fast: str) -> Figure:
        """How many times longer `slow` took than `fast`, round by round."""
        return figure([one / other for one, other in zip(self._times[slow], self._times[fast], strict=True)])
