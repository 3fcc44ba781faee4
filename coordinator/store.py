"""Redis: run state by compare-and-set, logs, contributions of open rounds, sites, leases, tokens, metrics.

One Lua call commits a transition: the new state under its version and everything that goes with it. Nothing here
decides anything. Any Redis-compatible server from 6.2 on will do.
"""

import json
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import redis.asyncio
import structlog
from pydantic import ValidationError
from redis.exceptions import NoScriptError, OutOfMemoryError, RedisError

from api import schemas
from api.errors import NotFoundError, ProblemError, StorageFullError, UnavailableError
from api.schemas import RunStatus
from coordinator.arrivals import Arrival, Arrivals
from coordinator.audit import AuditLog
from coordinator.garbage import Garbage, superseded
from coordinator.log_store import LogStore, appended, ended, log_keys, payload_key
from coordinator.lua import ALSO_WHEN_FULL
from coordinator.news import News, NewsChannel, concern_agents
from coordinator.records import RunState
from coordinator.references import blobs_of, named_in
from coordinator.series import Series
from coordinator.site_records import SiteRecords
from coordinator.tokens import Tokens, hashed, token_key
from coordinator.transitions import Transition

__all__ = ["LEAST_OUTAGE_S", "Store", "Versioned", "unavailable"]

log = structlog.get_logger()

_ORPHAN_S = 3600
"""Seconds after which a payload that no committed state refers to is dropped."""
_ENDED_S = 3600
"""Seconds for which ranks may still ask how their run has ended."""
_STATES_KEPT = 64
_CLOCK_S = 1.0
"""Seconds for which Redis TIME is carried on by the clock of this process."""
LEAST_OUTAGE_S = 1.0
"""A shorter gap between two ticks is no outage, however short the interval: only a machine that is busy."""

# KEYS: the run, and payloads that are to be there; ARGV: expected version, new version, new state, operations as JSON.
# Answers 1, or 0 for a lost race. A server that is full refuses the first write of a script, and no later one, but
# never DEL: so what takes no room of its own is committed there, such as a pause.
_COMMIT = """
if redis.call('HGET', KEYS[1], 'version') ~= ARGV[1] then return 0 end
for number = 2, #KEYS do
  if redis.call('EXISTS', KEYS[number]) == 0 then return redis.error_reply('ERR a payload is missing') end
end
if #KEYS == 1 then redis.call('DEL', 'nothing') end
redis.call('HSET', KEYS[1], 'version', ARGV[2], 'state', ARGV[3])
for _, operation in ipairs(cjson.decode(ARGV[4])) do redis.call(unpack(operation)) end
return 1
"""

# KEYS: the run, all runs, an idempotency key if there is one. ARGV: state, the run's id, the time. Answers 0 if the key
# has made a run that is there no more.
_CREATE = """
local known = KEYS[3] and redis.call('GET', KEYS[3])
if known and string.sub(known, -5) == ' made' then return redis.call('EXISTS', KEYS[1]) end
if known then redis.call('SET', KEYS[3], known .. ' made', 'KEEPTTL') end
redis.call('HSETNX', KEYS[1], 'version', 0)
redis.call('HSETNX', KEYS[1], 'state', ARGV[1])
redis.call('ZADD', KEYS[2], 'NX', ARGV[3], ARGV[2])
return 1
"""

# KEYS: the run, and what belongs to it. ARGV: expected version, the run's id, the time; as JSON, which of the keys list
# segments, and to which other blobs it refers. Answers 1, or 0 for a lost race.
_DELETE = (
    ALSO_WHEN_FULL
    + """
if redis.call('HGET', KEYS[1], 'version') ~= ARGV[1] then return 0 end
local segments, blobs = unpack(cjson.decode(ARGV[4]))
for _, key in ipairs(segments) do
  for _, line in ipairs(redis.call('ZRANGE', key, 0, -1)) do
    local segment = cjson.decode(line)
    table.insert(blobs, segment.blob)
    for _, list in ipairs({segment.large, segment.anchors or {}}) do
      for _, blob in ipairs(list) do table.insert(blobs, blob) end
    end
  end
end
for _, blob in ipairs(blobs) do
  redis.call('ZADD', 'garbage', ARGV[3], blob)
  redis.call('ZREM', 'told:' .. blob, ARGV[2])
end
for _, key in ipairs(KEYS) do redis.call('DEL', key) end
redis.call('ZREM', 'runs', ARGV[2])
redis.call('SREM', 'active', ARGV[2])
redis.call('SREM', 'ended', ARGV[2])
return 1
"""
)

# ARGV: the lifetime of a payload in seconds, which begins anew unless a committed state refers to it. Answers whether
# it is there.
_KEEP = """
if redis.call('TTL', KEYS[1]) >= 0 then redis.call('EXPIRE', KEYS[1], ARGV[1]) end
return redis.call('EXISTS', KEYS[1])
"""

# KEYS: last tick, leases. ARGV: the longest gap that is no outage and the length of a lease, in ms. After an outage all
# leases shift by its length (A6), but for those that were renewed since. Answers the time and the length of the outage,
# or 0, in ms.
_TICK = (
    ALSO_WHEN_FULL
    + """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local last = tonumber(redis.call('GET', KEYS[1]) or now)
redis.call('SET', KEYS[1], math.max(now, last))
local gap = now - last
if gap <= tonumber(ARGV[1]) then
  gap = 0
else
  for _, site in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do
    local shifted = redis.call('ZSCORE', KEYS[2], site) + gap
    redis.call('ZADD', KEYS[2], math.min(shifted, now + ARGV[2]), site)
  end
end
return {math.max(now, last), gap}
"""
)


@dataclass(frozen=True)
class Versioned:
    """A run's state and the version that a commit must find unchanged.

    No two states have the same version, not even if Redis has lost the last second and time goes on from there.
    """

    state: RunState
    version: str

    def next(self, state: RunState) -> "Versioned":
        return Versioned(state, f"{int(self.version.partition('-')[0]) + 1}-{secrets.token_hex(6)}")


def unavailable(error: Exception) -> ProblemError:
    """What is answered while Redis is away, or full; our log has the cause."""
    if isinstance(error, OutOfMemoryError) or "OOM command not allowed" in str(error):
        log.error("redis is full", error=str(error))
        return StorageFullError(
            "redis_out_of_memory",
            "Redis has reached its maxmemory and takes nothing more: raise it, or delete old runs",
        )
    log.warning("redis cannot be reached", error=str(error))
    return UnavailableError("redis_unavailable", "Redis cannot be reached right now; try again")


class Store:
    """All access to Redis. Methods raise `redis.exceptions.RedisError` when it cannot be reached."""

    def __init__(self, url: str) -> None:
        pool = redis.asyncio.BlockingConnectionPool.from_url(
            url, max_connections=64, timeout=10, health_check_interval=15, socket_connect_timeout=20
        )
        self._redis: Any = redis.asyncio.Redis(connection_pool=pool)
        self._news = NewsChannel(self._redis)
        self.arrivals = Arrivals(self._redis)
        self.tokens = Tokens(self._redis)
        self.audit = AuditLog(self._redis)
        self.series = Series(self._redis)
        self.sites = SiteRecords(self._redis)
        self._commit = self._redis.register_script(_COMMIT)
        self._create = self._redis.register_script(_CREATE)
        self._delete = self._redis.register_script(_DELETE)
        self._keep = self._redis.register_script(_KEEP)
        self._tick = self._redis.register_script(_TICK)
        self.log = LogStore(self._redis)
        self.garbage = Garbage(self._redis)
        self._states: OrderedDict[str, Versioned] = OrderedDict()
        self._clock: tuple[float, datetime] | None = None

    async def close(self) -> None:
        await self._redis.aclose(close_connection_pool=True)

    async def listen(self, heard: Callable[[News], None]) -> None:
        """Calls `heard` for the commits of other processes, for ever; some may be missed."""
        await self._news.listen(heard)

    async def ping(self) -> None:
        await self._redis.ping()

    async def used_bytes(self) -> int:
        """Memory that Redis has taken."""
        return int((await self._redis.info("memory"))["used_memory"])

    async def warnings(self) -> list[str]:
        """What this server promises less than needed: durability and no eviction."""
        found = []
        try:
            config = await self._redis.config_get("append*", "maxmemory-policy")
        except RedisError as error:
            return [f"cannot read the Redis configuration ({error}); make sure that it persists and never evicts"]
        if (config.get("appendonly"), config.get("appendfsync")) != ("yes", "always"):
            found.append("Redis does not run with appendonly yes and appendfsync always: a crash may lose rounds")
        if config.get("maxmemory-policy") != "noeviction":
            found.append("Redis may evict keys: set maxmemory-policy noeviction")
        return found

    async def now(self) -> datetime:
        """Redis TIME, asked for once a second at most."""
        if self._clock is not None and (elapsed := time.monotonic() - self._clock[0]) < _CLOCK_S:
            return self._clock[1] + timedelta(seconds=elapsed)
        seconds, microseconds = await self._redis.time()
        now = datetime.fromtimestamp(seconds + microseconds / 1e6, UTC)
        self._clock = (time.monotonic(), now)
        return now

    async def tick(self, interval_s: float, lease_s: float) -> tuple[datetime, float]:
        """Redis TIME, and the seconds for which nobody had ticked if that was an outage: more than two intervals.

        All leases have been shifted by them.
        """
        longest_s = max(2 * interval_s, LEAST_OUTAGE_S)
        ms, gap = await self._tick(keys=["tick", "leases"], args=[int(longest_s * 1000), int(lease_s * 1000)])
        return datetime.fromtimestamp(ms / 1000, UTC), gap / 1000

    # --- runs ---------------------------------------------------------------------------------------------------------

    async def create_run(self, state: RunState, idempotency_key: str | None = None) -> bool:
        """Nothing happens if the run is there; False if it was made with this key before, and deleted."""
        keys = [_run(state.id), "runs", *([] if idempotency_key is None else [_idempotency(idempotency_key)])]
        return bool(
            await self._create(keys=keys, args=[state.model_dump_json(), state.id, state.created_at.timestamp()])
        )

    def seen(self, run: str) -> Versioned | None:
        """The newest state of the run that this process has read or written; there may be newer ones."""
        return self._states.get(run)

    def forget(self, run: str) -> None:
        """Another process has changed it."""
        self._states.pop(run, None)
        self.tokens.forget()

    async def load(self, run: str) -> Versioned:
        """The run's state; read and parsed only if it is not the one that was seen last."""
        seen = self.seen(run)
        if seen is not None and await self._redis.hget(_run(run), "version") == seen.version.encode():
            return seen
        version, state = await self._redis.hmget(_run(run), "version", "state")
        if state is None:
            self._states.pop(run, None)
            raise NotFoundError(
                "run_not_found", f"there is no run {run!r}; `isthmus run list` shows the runs there are"
            )
        found = Versioned(RunState.model_validate_json(state), version.decode())
        if self.seen(run) is seen:  # or else somebody has written or read another one meanwhile, which may be newer
            self._see(found)
        return found

    def _see(self, found: Versioned) -> None:
        self._states[found.state.id] = found
        self._states.move_to_end(found.state.id)
        while len(self._states) > _STATES_KEPT:
            self._states.popitem(last=False)

    async def runs(self) -> list[str]:
        """Newest first."""
        return [run.decode() for run in await self._redis.zrevrange("runs", 0, -1)]

    async def active(self) -> list[RunState]:
        """Runs that were started and are not at an end."""
        states = []
        for run in sorted(await self._redis.smembers("active")):
            try:
                states.append((await self.load(run.decode())).state)
            except NotFoundError:  # deleted meanwhile
                continue
            except ValidationError as error:
                log.error("run cannot be read and is left alone", run=run.decode(), error=str(error))
        return states

    async def commit(
        self,
        before: Versioned,
        after: Transition,
        messages: Mapping[tuple[str, int], Sequence[str]] | None = None,
        payloads: Mapping[str, bytes] | None = None,
    ) -> bool:
        """Replaces the state, unless somebody else did.

        Args:
            messages: digests of an entry's messages, by region and seq.
            payloads: by digest, what is not stored yet; what neither the new state nor an entry refers to never is.
        """
        state = after.state
        operations: list[list[Any]] = []
        for region, header in after.entries:
            operations += appended(state.id, region, header, (messages or {}).get((region, header["seq"]), ()))
        sent, tokens = _contributions(state), _tokens(state)
        operations += [["DEL", payload_key(state.id, digest)] for digest in _contributions(before.state) - sent]
        operations += [["PERSIST", payload_key(state.id, digest)] for digest in sent - _contributions(before.state)]
        operations += [["DEL", token] for token in _tokens(before.state) - tokens]
        operations += [["PERSIST", token] for token in tokens - _tokens(before.state)]
        if state.status.terminal:
            operations += [["SREM", "active", state.id], ended(state.id)]
            operations += [["DEL", payload_key(state.id, digest)] for digest in sent]
            operations += [["EXPIRE", token, _ENDED_S] for token in tokens]
        elif state.status is not RunStatus.PENDING:
            operations.append(["SADD", "active", state.id])
        if gone := blobs_of(before.state) - blobs_of(state):
            operations += superseded(state.id, gone, await self.now())
        if after.outer_round is not None:
            operations.append(["RPUSH", f"outer-rounds:{state.id}", after.outer_round.model_dump_json()])
        operations.append(self._news.publication(state.id, agents=concern_agents(before.state, state)))
        committed = before.next(state)
        needed = sent.union(*(messages or {}).values())
        bodies = {payload_key(state.id, digest): body for digest, body in (payloads or {}).items() if digest in needed}
        texts = (before.version, committed.version, state.model_dump_json(), json.dumps(operations))
        if not await self._committed([_run(state.id), *bodies], texts, bodies):
            return False
        if self.seen(state.id) in (before, None):  # or else somebody has read a newer one meanwhile
            self._see(committed)
        if not tokens >= _tokens(before.state):
            self.tokens.forget()
        await self.arrivals.drop(_closed_arrivals(before.state, state))
        return True

    async def _committed(self, keys: Sequence[str], texts: Sequence[str], bodies: Mapping[str, bytes]) -> bool:
        """Payloads go along, but not through the script, which would copy and hash them (A5)."""
        pipe = self._redis.pipeline(transaction=False)
        for name, body in bodies.items():
            pipe.set(name, body, nx=True, ex=_ORPHAN_S)
        pipe.evalsha(self._commit.sha, len(keys), *keys, *texts)
        try:
            return bool((await pipe.execute())[-1])
        except NoScriptError:
            await self._redis.script_load(_COMMIT)
            return await self._committed(keys, texts, bodies)

    async def delete_run(self, run: Versioned) -> bool:
        """Unless somebody has changed it."""
        state = run.state
        self.tokens.forget()
        series = await self._redis.smembers(f"metrics:{state.id}")
        keys = [_run(state.id), f"outer-rounds:{state.id}", f"metrics:{state.id}", *(key.decode() for key in series)]
        keys += _tokens(state)
        blobs = blobs_of(state)
        for region in state.regions:
            keys += log_keys(state.id, region)
            payloads = await self.log.payloads(state.id, {0: await self.log.all_messages(state.id, region)})
            keys += [payload_key(state.id, digest) for digest in payloads]
            blobs |= {digest for digest, body in payloads.items() if body is None}
            blobs |= await self.log.blobs_of_entries(state.id, region)
        segments = [key for key in keys if key.startswith("segments:")]
        now = int((await self.now()).timestamp())
        return bool(
            await self._delete(keys=keys, args=[run.version, state.id, now, json.dumps([segments, sorted(blobs)])])
        )

    async def referred(self) -> set[str]:
        """Digests of all blobs to which something refers; what has come to refer to one meanwhile may be missing."""
        found: set[str] = set()
        for run in await self.runs():
            text = (await self._redis.hget(_run(run), "state") or b"{}").decode()
            found |= named_in(text)
            for region in json.loads(text).get("regions", {}):
                found |= await self.log.referred(run, region)
        return found

    async def remember(self, key: str, value: str) -> str:
        """The value first stored under an idempotency key: this one, or an earlier one."""
        name = _idempotency(key)
        await self._redis.set(name, value, nx=True, ex=86_400)
        return str((await self._redis.get(name)).decode().removesuffix(" made"))

    # --- rounds and logs ----------------------------------------------------------------------------------------------

    async def put_payload(self, run: str, digest: str, body: bytes) -> None:
        """Kept for good only once a committed state refers to it (A5)."""
        name = payload_key(run, digest)
        while not await self._redis.set(name, body, nx=True, ex=_ORPHAN_S):
            if await self._keep(keys=[name], args=[_ORPHAN_S]):
                break

    async def payload(self, run: str, digest: str) -> bytes | None:
        body: bytes | None = await self._redis.get(payload_key(run, digest))
        return body

    async def outer_rounds(self, run: str) -> list[schemas.OuterRound]:
        lines = await self._redis.lrange(f"outer-rounds:{run}", 0, -1)
        return [schemas.OuterRound.model_validate_json(line) for line in lines]


def _idempotency(key: str) -> str:
    return f"idempotency:{hashed(key)}"


def _contributions(state: RunState) -> set[str]:
    return {
        part
        for region in state.regions.values()
        if region.round is not None
        for sent in region.round.contributions.values()
        for part in sent.parts
    }


def _closed_arrivals(before: RunState, after: RunState) -> list[Arrival]:
    """Of rounds that are closed, and whose contributions have several parts."""
    return [
        Arrival(before.id, region.name, region.round.step, member.site, member.seat, region.head.seq)
        for region in before.regions.values()
        if region.round is not None and region.head is not None
        if any(len(sent.parts) > 1 for sent in region.round.contributions.values())
        if after.status.terminal or after.regions[region.name].step >= region.round.step
        for member in before.members.values()
        if member.region == region.name and member.seat is not None
    ]


def _tokens(state: RunState) -> set[str]:
    return {token_key(member.seat) for member in state.members.values() if member.seat is not None}


def _run(run: str) -> str:
    return f"run:{run}"
