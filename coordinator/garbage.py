"""Redis: which blobs may have to be removed and when, which are being removed, and how many bytes there are.

Part of `coordinator.store`; decides nothing. `garbage` has a digest from before it is written until something refers to
it and its time has come; `told:DIGEST` has until when each run relies on it; `removing` has what is being looked at, of
which nobody is told meanwhile; `blobs` has all sizes and their `total`.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

__all__ = ["GARBAGE", "GRACE_S", "TOLD_S", "Garbage", "QuotaExceeded", "superseded"]

TOLD_S = 3600
"""Seconds for which whoever was told that a blob is there may rely on it."""
GRACE_S = 600
"""Seconds for which what nothing refers to any more stays for those who are reading it."""
GARBAGE = "garbage"

_ABANDONED_S = 60
_BATCH = 64
_LOOK_AGAIN_S = 0.05

# KEYS: blobs to be removed, those being removed, until when runs rely on this one, sizes. ARGV: the digest, the run,
# the seconds; its size and the quota in bytes, or nothing. Answers 'removing', 'told', or the total that is too much.
_TELL = """
if redis.call('ZSCORE', KEYS[2], ARGV[1]) then return 'removing' end
if ARGV[4] ~= '' and redis.call('HEXISTS', KEYS[4], ARGV[1]) == 0 then
  local total = (redis.call('HGET', KEYS[4], 'total') or 0) + ARGV[4]
  if ARGV[5] ~= '' and total > tonumber(ARGV[5]) then return string.format('%.0f', total) end
  redis.call('HSET', KEYS[4], ARGV[1], ARGV[4])
  redis.call('HINCRBY', KEYS[4], 'total', ARGV[4])
end
local till = redis.call('TIME')[1] + ARGV[3]
redis.call('ZADD', KEYS[1], 'GT', till, ARGV[1])
redis.call('ZADD', KEYS[3], 'GT', till, ARGV[2])
redis.call('EXPIRE', KEYS[3], ARGV[3])
return 'told'
"""

# KEYS: blobs to be removed, those being removed. ARGV: how many at most; seconds after which a process that is removing
# them must have died. Answers those that are due.
_CLAIM = """
local now = tonumber(redis.call('TIME')[1])
local claimed = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now - ARGV[2], 'LIMIT', 0, ARGV[1])
for _, digest in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[1])) do
  local told = redis.call('ZREVRANGE', 'told:' .. digest, 0, 0, 'WITHSCORES')
  if told[2] and tonumber(told[2]) > now then
    redis.call('ZADD', KEYS[1], told[2], digest)
  else
    redis.call('ZREM', KEYS[1], digest)
    table.insert(claimed, digest)
  end
end
for _, digest in ipairs(claimed) do redis.call('ZADD', KEYS[2], now, digest) end
return claimed
"""

# KEYS: those being removed, sizes. ARGV: the digest, and whether it is gone.
_RELEASE = """
redis.call('ZREM', KEYS[1], ARGV[1])
local size = redis.call('HGET', KEYS[2], ARGV[1])
if ARGV[2] == '0' or not size then return end
redis.call('HDEL', KEYS[2], ARGV[1])
if redis.call('HINCRBY', KEYS[2], 'total', -size) == 0 then redis.call('HDEL', KEYS[2], 'total') end
"""


@dataclass(frozen=True)
class QuotaExceeded(Exception):
    """`total`: bytes that there would be."""

    total: int


def superseded(run: str, digests: Iterable[str], now: datetime) -> list[list[Any]]:
    """What a commit does for blobs to which a run has ceased to refer, and on which it relies no more."""
    at = now.timestamp() + GRACE_S
    operations: list[list[Any]] = []
    for digest in sorted(digests):
        operations += [["ZREM", _told(digest), run], ["ZADD", GARBAGE, at, digest]]
    return operations


class Garbage:
    def __init__(self, redis: Any) -> None:
        self._redis = redis
        self._tell = redis.register_script(_TELL)
        self._claim = redis.register_script(_CLAIM)
        self._release = redis.register_script(_RELEASE)

    async def tell(self, digest: str, run: str) -> None:
        """From now on the blob, if it is there, stays for an hour at least; waits while it is being removed."""
        await self._told(digest, run, "", "")

    async def admit(self, digest: str, run: str, size: int, quota: int | None) -> None:
        """As `tell`, before the blob is written. Raises QuotaExceeded if that were more than `quota` bytes."""
        await self._told(digest, run, size, "" if quota is None else quota)

    async def _told(self, digest: str, run: str, size: int | str, quota: int | str) -> None:
        keys = [GARBAGE, "removing", _told(digest), "blobs"]
        while True:
            answer = (await self._tell(keys=keys, args=[digest, run, TOLD_S, size, quota])).decode()
            if answer == "told":
                return
            if answer != "removing":
                raise QuotaExceeded(int(answer))
            await asyncio.sleep(_LOOK_AGAIN_S)

    async def total(self) -> int:
        """Bytes of all blobs."""
        return int(await self._redis.hget("blobs", "total") or 0)

    async def claim(self) -> list[str]:
        """Some of those whose time has come; nobody is told of them until they are released."""
        claimed = await self._claim(keys=[GARBAGE, "removing"], args=[_BATCH, _ABANDONED_S])
        return [digest.decode() for digest in claimed]

    async def release(self, digest: str, *, removed: bool) -> None:
        await self._release(keys=["removing", "blobs"], args=[digest, int(removed)])


def _told(digest: str) -> str:
    return f"told:{digest}"
