"""Back-pressure: new parts of contributions wait while Redis holds more than its budget."""

import asyncio
from functools import lru_cache

from algorithms.layout import ParameterLayout
from algorithms.traffic import contribution_bytes
from api.errors import StorageFullError, TooManyRequestsError
from api.specs import OptimizerSpec
from coordinator.records import RunState
from coordinator.store import Store

__all__ = ["Pressure"]

_bytes_of_one = lru_cache(maxsize=64)(contribution_bytes)
_READING_S = 1.0
"""How old a reading of Redis's memory may be."""


class Pressure:
    def __init__(self, store: Store, budget_mb: int) -> None:
        self._store = store
        self._budget_mb = budget_mb
        self._reading: tuple[float, int] | None = None

    async def require_room(self, state: RunState, layout: ParameterLayout, optimizer: OptimizerSpec) -> None:
        """For one more part.

        Raises:
            StorageFullError: the contributions of one round of this run are more than the budget, so they never fit.
            TooManyRequestsError: there is no room now.
        """
        budget = self._budget_mb << 20
        sites = max(len(state.live()), 1)
        needed = sites * _bytes_of_one(layout, optimizer.k, optimizer.codec, optimizer.indices)
        if needed > budget:
            raise StorageFullError(
                "round_too_large",
                f"the contributions of {sites} sites to one round take {needed >> 20} MiB, redis_budget_mb is "
                f"{self._budget_mb}: raise it, or lower optimizer.k",
            )
        if (used := await self._used()) > budget:
            raise TooManyRequestsError(
                "redis_full",
                f"Redis holds {used >> 20} MiB, redis_budget_mb is {self._budget_mb}: no part is taken before it "
                "drains; if it does not, raise redis_budget_mb or delete old runs",
                context={"retry_after_s": _READING_S},
            )

    async def _used(self) -> int:
        now = asyncio.get_running_loop().time()
        if self._reading is None or now - self._reading[0] >= _READING_S:
            self._reading = now, await self._store.used_bytes()
        return self._reading[1]
