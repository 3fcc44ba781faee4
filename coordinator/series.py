"""Metrics in Redis: each name of each site is a series, a list of its own; `metrics:RUN` is the set of them."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from api import schemas

__all__ = ["Series"]

SERIES_POINTS = 20_000
"""Of one metric of one site, at most."""

# KEYS: a series. ARGV: how many points it may have. The first of each of at most half as many equal ranges of steps
# stays, and the last; every second one if that helps too little, since steps go back and forth. The lengths of ranges
# are powers of two, so that thinning again and again opens no gaps.
_THIN = """
local lines, most = redis.call('LRANGE', KEYS[1], 0, -1), tonumber(ARGV[1])
if #lines <= most then return end
local function step(line) return tonumber(string.match(line, '%d+')) end
local first = step(lines[1])
local width = 1
while math.abs(step(lines[#lines]) - first) / width > most / 2 do width = width * 2 end
local kept, range = {}, nil
for number, line in ipairs(lines) do
  local own = math.floor((step(line) - first) / width)
  if own ~= range or number == #lines then table.insert(kept, line) end
  range = own
end
if #kept > most * 3 / 4 then
  kept = {}
  for number = 1, #lines - 1, 2 do table.insert(kept, lines[number]) end
  table.insert(kept, lines[#lines])
end
redis.call('DEL', KEYS[1])
for start = 1, #kept, 1000 do redis.call('RPUSH', KEYS[1], unpack(kept, start, math.min(start + 999, #kept))) end
"""


class Series:
    def __init__(self, redis: Any) -> None:
        self._redis = redis
        self._thin = redis.register_script(_THIN)

    async def add(self, run: str, points: Sequence[schemas.StoredPoint]) -> None:
        """Each name of each site is a series, a list of its own; `metrics:RUN` is the set of them.

        A series that becomes too long is thinned evenly, so that it always covers the whole run.
        """
        pipe = self._redis.pipeline(transaction=True)
        names: list[str] = []
        for point in points:
            for name, value in point.values.items():
                series = f"metric:{run}:{point.site}:{name}"
                pipe.sadd(f"metrics:{run}", series)
                pipe.rpush(series, json.dumps([point.step, point.at.timestamp(), value]))
                names.append(series)
        lengths = dict(zip(names, (await pipe.execute())[1::2], strict=True))
        for series in (series for series, length in lengths.items() if length > SERIES_POINTS):
            await self._thin(keys=[series], args=[SERIES_POINTS])

    async def latest(self, run: str, site: str, name: str, most: int) -> list[float]:
        """The newest values of one series that are finite, oldest first."""
        lines = await self._redis.lrange(f"metric:{run}:{site}:{name}", -most, -1)
        return [value for line in lines if (value := json.loads(line)[2]) is not None]

    async def all(self, run: str, most: int) -> list[schemas.StoredPoint]:
        """By step and site; of a series longer than `most` evenly spaced points, the first and the last among them."""
        merged: dict[tuple[int, str, float], dict[str, float | None]] = {}
        for series in sorted(await self._redis.smembers(f"metrics:{run}")):
            site, name = series.decode().removeprefix(f"metric:{run}:").split(":", 1)
            for line in _thinned(await self._redis.lrange(series, 0, -1), most):
                step, at, value = json.loads(line)
                merged.setdefault((step, site, at), {})[name] = value
        return [
            schemas.StoredPoint(site=site, step=step, at=datetime.fromtimestamp(at, UTC), values=values)
            for (step, site, at), values in sorted(merged.items())
        ]


def _thinned(lines: Sequence[bytes], most: int) -> Sequence[bytes]:
    if len(lines) <= most:
        return lines
    stride = -(-len(lines) // max(most - 1, 1))
    return [*lines[:-1:stride], lines[-1]]
