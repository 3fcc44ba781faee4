"""Commits made known to other processes, by Redis pub/sub. It only saves time: nothing may rely on being told."""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog
from redis.exceptions import RedisError

from coordinator.records import RunState

__all__ = ["News", "NewsChannel", "concern_agents"]

_CHANNEL = "isthmus:commits"
_PING_S = 15.0
_AGAIN_S = 1.0

log = structlog.get_logger()


@dataclass(frozen=True)
class News:
    """A run has changed; `agents`: what sites should be running, too."""

    run: str
    agents: bool


class NewsChannel:
    """One process's end: it hears what others publish, not what it publishes itself."""

    def __init__(self, redis: Any) -> None:
        self._redis = redis
        self._name = secrets.token_hex(4)

    def publication(self, run: str, *, agents: bool) -> list[str]:
        """The command that makes a commit known, to be run within it."""
        return ["PUBLISH", _CHANNEL, f"{self._name} {agents:d} {run}"]

    async def listen(self, heard: Callable[[News], None]) -> None:
        """For ever, also across restarts of Redis."""
        while True:
            try:
                async with self._redis.pubsub(ignore_subscribe_messages=True) as channel:
                    await channel.subscribe(_CHANNEL)
                    while True:
                        message = await channel.get_message(timeout=_PING_S)
                        if message is not None and (news := self._read(message["data"].decode())) is not None:
                            heard(news)
            except RedisError as error:
                log.warning("commits of other processes are heard of late until redis is back", error=str(error))
                await asyncio.sleep(_AGAIN_S)

    def _read(self, line: str) -> News | None:
        sender, agents, run = line.split()
        return None if sender == self._name else News(run, agents == "1")


def concern_agents(before: RunState, after: RunState) -> bool:
    return (before.status, before.assigned) != (after.status, after.assigned)
