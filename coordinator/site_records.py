"""Registered sites in Redis, and how long each is thought to be there: `sites` by name, `leases` by time in ms."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from pydantic import Field

from coordinator.lua import ZADD
from coordinator.records import Record
from coordinator.tokens import token_key

__all__ = ["SiteRecord", "SiteRecords"]


class SiteRecord(Record):
    name: str
    region: str
    tasks: list[str]
    ranks: int
    secret_hash: str
    registered_at: datetime
    left: bool = False
    versions: dict[str, str] = Field(default_factory=dict)


class SiteRecords:
    def __init__(self, redis: Any) -> None:
        self._redis = redis
        self._renew = redis.register_script(ZADD)

    async def save(self, site: SiteRecord) -> None:
        await self._redis.hset("sites", site.name, site.model_dump_json())

    async def find(self, name: str) -> SiteRecord | None:
        line = await self._redis.hget("sites", name)
        return None if line is None else SiteRecord.model_validate_json(line)

    async def all(self) -> list[SiteRecord]:
        lines = await self._redis.hgetall("sites")
        return sorted((SiteRecord.model_validate_json(line) for line in lines.values()), key=lambda site: site.name)

    async def remove(self, site: SiteRecord, seats: Sequence[str]) -> None:
        """With its token and those of its ranks, which are the `seats`."""
        pipe = self._redis.pipeline(transaction=True)
        pipe.hdel("sites", site.name)
        pipe.zrem("leases", site.name)
        pipe.delete(*map(token_key, [site.secret_hash, *seats]))
        await pipe.execute()

    async def renew_lease(self, site: str, until: datetime, *, if_there: bool = False) -> None:
        """`if_there`: not if the site has left."""
        ms = int(until.timestamp() * 1000)
        await self._renew(keys=["leases"], args=[*(["XX"] if if_there else []), ms, site])

    async def leases(self) -> dict[str, datetime]:
        pairs = await self._redis.zrange("leases", 0, -1, withscores=True)
        return {site.decode(): datetime.fromtimestamp(ms / 1000, UTC) for site, ms in pairs}

    async def end_lease(self, site: str) -> None:
        await self._redis.zrem("leases", site)
