"""Metrics in Redis: each name of each site is a series, a list of its own; `metrics:RUN` is the set of them."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

from api import schemas

__all__ = ["Series"]

SERIES_POINTS = 20_000
"""Of one metric of one site, at most."""

# KEYS: a series. ARGV: how many points it may have. The first of each of at most half as many equal ranges of steps
# stays, and the last of each session; every second one, and these, if that helps too little, since steps go back and
# forth; without them, if sessions are too many. The lengths of ranges are powers of two, so that thinning again and
# again opens no gaps.
_THIN = """
local lines, most = redis.call('LRANGE', KEYS[1], 0, -1), tonumber(ARGV[1])
if #lines <= most then return end
local function step(line) return tonumber(string.match(line, '%d+')) end
local function session(line) return line and string.match(line, '"%x*"') end
local function last(number) return session(lines[number]) ~= session(lines[number + 1]) end
local first = step(lines[1])
local width = 1
while math.abs(step(lines[#lines]) - first) / width > most / 2 do width = width * 2 end
local function range(number) return lines[number] and math.floor((step(lines[number]) - first) / width) end
local kept = {}
local function keep(wanted)
  kept = {}
  for number, line in ipairs(lines) do if wanted(number) then table.insert(kept, line) end end
  return #kept <= most * 3 / 4
end
local _ = keep(function(number) return range(number) ~= range(number - 1) or last(number) end)
  or keep(function(number) return number % 2 == 1 or last(number) end)
  or keep(function(number) return number % 2 == 1 or number == #lines end)
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
                pipe.rpush(series, json.dumps([point.step, point.at.timestamp(), value, point.session]))
                names.append(series)
        lengths = dict(zip(names, (await pipe.execute())[1::2], strict=True))
        for series in (series for series, length in lengths.items() if length > SERIES_POINTS):
            await self._thin(keys=[series], args=[SERIES_POINTS])

    async def latest(self, run: str, site: str, name: str, most: int) -> list[float]:
        """The newest values of one series that are finite, oldest first."""
        lines = await self._redis.lrange(f"metric:{run}:{site}:{name}", -most, -1)
        return [value for line in lines if (value := json.loads(line)[2]) is not None]

    async def all(self, run: str, most: int) -> list[schemas.StoredPoint]:
        """By step and site; of a series longer than `most` evenly spaced points, the first and the last among them.

        And the last of each session, with its totals, unless these are half of the points.
        """
        merged: dict[tuple[int, str, float, str], dict[str, float | None]] = {}
        for series in sorted(await self._redis.smembers(f"metrics:{run}")):
            site, name = series.decode().removeprefix(f"metric:{run}:").split(":", 1)
            for line in _thinned(await self._redis.lrange(series, 0, -1), most):
                step, at, value, *session = json.loads(line)  # none in what was stored before sessions were told
                merged.setdefault((step, site, at, "".join(session)), {})[name] = value
        return [
            schemas.StoredPoint(
                site=site, session=session, step=step, at=datetime.fromtimestamp(at, UTC), values=values
            )
            for (step, site, at, session), values in sorted(merged.items())
        ]


def _thinned(lines: Sequence[bytes], most: int) -> Sequence[bytes]:
    if len(lines) <= most:
        return lines
    sessions = [line.rpartition(b",")[2] for line in lines]
    ends = [number for number, (own, following) in enumerate(pairwise(sessions)) if own != following]
    ends = [*(ends if len(ends) < most // 2 else []), len(lines) - 1]
    stride = -(-len(lines) // max(most - len(ends), 1))
    return [lines[number] for number in sorted({*range(0, len(lines) - 1, stride), *ends})]
