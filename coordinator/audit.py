"""Administrative acts in Redis: two capped streams, so that nobody but administrators can push out what they did."""

import json
from datetime import UTC, datetime
from typing import Any

from api.access import AuditEvent, AuditPage
from api.payload import canonical_json
from api.service import Principal
from coordinator.lua import ALSO_WHEN_FULL

__all__ = ["AuditLog"]

_STREAMS = {"audit:admins": 10_000, "audit:others": 2_000}
"""How many events each one keeps."""

# KEYS: the number of the last event, a stream. ARGV: its length, the event. Numbers are common to both streams.
_APPEND = (
    ALSO_WHEN_FULL
    + """
local number = redis.call('INCR', KEYS[1])
local time = redis.call('TIME')
redis.call('XADD', KEYS[2], 'MAXLEN', ARGV[1], number .. '-0', 'at', time[1], 'event', ARGV[2])
"""
)


class AuditLog:
    def __init__(self, redis: Any) -> None:
        self._redis = redis
        self._append = redis.register_script(_APPEND)

    async def append(self, principal: Principal, act: str, target: str, status: int) -> None:
        stream = "audit:admins" if principal.scope == "admin" else "audit:others"
        event = {
            "token": principal.token,
            "name": principal.who,
            "scope": principal.scope,
            "act": act,
            "target": target,
            "status": status,
        }
        await self._append(keys=["audit:number", stream], args=[_STREAMS[stream], canonical_json(event)])

    async def page(self, before: int | None, limit: int) -> AuditPage:
        """Newest first, from the one before the number `before`."""
        newest = "+" if before is None else f"({before}-0"
        events = []
        for stream in _STREAMS:
            lines = await self._redis.xrevrange(stream, max=newest, count=limit)
            events += [_event(number.decode(), fields) for number, fields in lines]
        items = sorted(events, key=lambda event: event.id, reverse=True)[:limit]
        return AuditPage(items=items, next_cursor=str(items[-1].id) if len(items) == limit else None)


def _event(number: str, fields: dict[bytes, bytes]) -> AuditEvent:
    at = datetime.fromtimestamp(int(fields[b"at"]), UTC)
    return AuditEvent(id=int(number.partition("-")[0]), at=at, **json.loads(fields[b"event"]))
