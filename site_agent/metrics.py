"""Metrics of rank 0: buffered, and sent about once a second with the totals of the session."""

import math
import secrets
import time
from collections.abc import Mapping

from api.client import CoordinatorClient
from api.schemas import MetricPoint
from site_agent.counting import CountingTransport
from site_agent.settings import Session

__all__ = ["Metrics"]

_EVERY_S = 1.0
_MOST = 1000
"""Points in one report."""


class Metrics:
    """Without a client, at the other ranks, everything here does nothing.

    Totals that go with every report: `bytes_up`, `bytes_down` (and of these `round_bytes_*`, `outer_bytes_*`: of outer
    rounds, `blob_bytes_*`: other blobs, such as entry 0), `wait_s` for the coordinator, `compute_s` (everything else
    since the first batch), `tokens` of this rank.
    """

    def __init__(self, session: Session, client: CoordinatorClient | None, transport: CountingTransport) -> None:
        self.tokens = 0
        self._session = session
        self._id = secrets.token_hex(8)
        self._client = client
        self._transport = transport
        self._points: list[MetricPoint] = []
        self._constants: dict[str, float] = {}
        self._started = self._sent = time.monotonic()

    def describe(self, **constants: float) -> None:
        self._constants.update(constants)

    def start(self, step: int) -> None:
        """The loop begins: its first report, from which bytes per step count, holds what went before."""
        self._started = time.monotonic()
        self.flush(step, wait_s=0.0)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self._client is not None:
            self._points.append(MetricPoint(step=step, values={name: _finite(v) for name, v in values.items()}))

    def flush_sometimes(self, step: int, wait_s: float) -> None:
        if time.monotonic() - self._sent >= _EVERY_S:
            self.flush(step, wait_s)

    def flush(self, step: int, wait_s: float) -> None:
        if self._client is None:
            return
        self.log(step, self._totals(wait_s))
        points, self._points = self._points, []
        for start in range(0, len(points), _MOST):
            some = points[start : start + _MOST]
            self._client.add_metrics(self._session.run, self._session.site, some, self._id)
        self._sent = time.monotonic()

    def _totals(self, wait_s: float) -> dict[str, float]:
        up, down = self._transport.up, self._transport.down
        return {
            "bytes_up": up.total(),
            "bytes_down": down.total(),
            "round_bytes_up": up["round"],
            "round_bytes_down": down["round"],
            "outer_bytes_up": up["outer"],
            "outer_bytes_down": down["outer"],
            "blob_bytes_up": up["blob"],
            "blob_bytes_down": down["blob"],
            "wait_s": wait_s,
            "compute_s": time.monotonic() - self._started - wait_s,
            "tokens": self.tokens,
            **self._constants,
        }


def _finite(value: float) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None
