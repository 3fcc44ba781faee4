"""Redis: the newest entries of logs, and which segments hold the others.

Part of `coordinator.store`; decides nothing either.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from api.payload import canonical_json
from coordinator.entries import Header
from coordinator.garbage import GARBAGE, GRACE_S
from coordinator.records import Record
from coordinator.references import blobs_of_entry

__all__ = ["LogStore", "Segment", "appended", "ended", "log_keys", "payload_key"]

Operation = list[Any]

# KEYS: run, next entry to be packed, segments, segments by step, blobs to be removed. ARGV: first and last entry, the
# segment as JSON, its first step or nothing, its blob, operations as JSON. Answers 1, or 0 if another was registered.
_REGISTER = """
if redis.call('EXISTS', KEYS[1]) == 0 or (redis.call('GET', KEYS[2]) or '1') ~= ARGV[1] then return 0 end
if redis.call('ZREM', KEYS[5], ARGV[5]) == 0 then return 0 end
redis.call('DEL', 'told:' .. ARGV[5])
redis.call('SET', KEYS[2], ARGV[2] + 1)
redis.call('ZADD', KEYS[3], ARGV[1], ARGV[3])
if ARGV[4] ~= '' then redis.call('ZADD', KEYS[4], ARGV[4], ARGV[3]) end
for _, operation in ipairs(cjson.decode(ARGV[6])) do redis.call(unpack(operation)) end
return 1
"""

# KEYS: segments, segments by step, last step that was dropped, blobs to be removed. ARGV: the segment as JSON, its last
# step or nothing, its blobs as JSON, when those may go. Nothing happens if it is not there.
_DROP = """
if redis.call('ZREM', KEYS[1], ARGV[1]) == 0 then return end
redis.call('ZREM', KEYS[2], ARGV[1])
if ARGV[2] ~= '' then redis.call('SET', KEYS[3], ARGV[2]) end
for _, blob in ipairs(cjson.decode(ARGV[3])) do redis.call('ZADD', KEYS[4], ARGV[4], blob) end
"""

_ENDED = "ended"


class Segment(Record):
    """Entries first..last are in a blob.

    `steps`: the first and the last step that has its entry there, if any. `large`: messages that are blobs themselves.
    `anchors`: the blobs that its entries name.
    """

    blob: str
    first: int
    last: int
    steps: tuple[int, int] | None
    large: tuple[str, ...] = ()
    anchors: tuple[str, ...] = ()

    @property
    def blobs(self) -> tuple[str, ...]:
        return (self.blob, *self.large, *self.anchors)


def payload_key(run: str, digest: str) -> str:
    return f"payload:{run}:{digest}"


def _key(kind: str, run: str, region: str) -> str:
    return f"{kind}:{run}:{region}"


def log_keys(run: str, region: str) -> list[str]:
    """All keys of a region's log but those of the messages themselves."""
    kinds = ("headers", "steps", "messages", "packed", "segments", "segment-steps", "dropped")
    return [_key(kind, run, region) for kind in kinds]


def appended(run: str, region: str, header: Header, messages: Sequence[str]) -> list[Operation]:
    """What a commit does for an entry; `messages` are digests of payloads or blobs, one per part."""
    seq = header["seq"]
    operations: list[Operation] = [["HSET", _key("headers", run, region), seq, canonical_json(header)]]
    if header["kind"] == "step":
        operations.append(["HSET", _key("steps", run, region), header["step"], seq])
    if messages:
        operations.append(["HSET", _key("messages", run, region), seq, json.dumps(list(messages))])
    return operations + [["PERSIST", payload_key(run, digest)] for digest in messages]


def ended(run: str) -> Operation:
    """Of a run that has ended, all entries are to be packed."""
    return ["SADD", _ENDED, run]


class LogStore:
    def __init__(self, redis: Any) -> None:
        self._redis = redis
        self._register = redis.register_script(_REGISTER)
        self._drop = redis.register_script(_DROP)

    # --- the newest entries -------------------------------------------------------------------------------------------

    async def headers(self, run: str, region: str, seqs: Sequence[int]) -> dict[int, Header]:
        """Of those entries that are in Redis."""
        lines = await self._redis.hmget(_key("headers", run, region), seqs) if seqs else []
        return {seq: json.loads(line) for seq, line in zip(seqs, lines, strict=True) if line is not None}

    async def seq_of_step(self, run: str, region: str, step: int) -> int | None:
        seq = await self._redis.hget(_key("steps", run, region), step)
        return None if seq is None else int(seq)

    async def messages(self, run: str, region: str, seqs: Sequence[int]) -> dict[int, list[str]]:
        """Digests of the messages of entries, one per part; an entry without arrays has none."""
        lines = await self._redis.hmget(_key("messages", run, region), seqs) if seqs else []
        return {seq: [] if line is None else json.loads(line) for seq, line in zip(seqs, lines, strict=True)}

    async def all_messages(self, run: str, region: str) -> list[str]:
        """Digests of the messages of all entries in Redis."""
        return [
            digest for line in await self._redis.hvals(_key("messages", run, region)) for digest in json.loads(line)
        ]

    async def sizes(self, run: str, region: str, seqs: Sequence[int]) -> dict[int, int]:
        """Bytes that the messages of entries take in Redis."""
        messages = await self.messages(run, region, seqs)
        lengths = await self._of_payloads("strlen", run, messages)
        return {seq: sum(lengths[digest] for digest in digests) for seq, digests in messages.items()}

    async def payloads(self, run: str, messages: Mapping[int, Sequence[str]]) -> dict[str, bytes | None]:
        """By digest; None for those that are not in Redis."""
        return await self._of_payloads("get", run, messages)

    async def _of_payloads(self, command: str, run: str, messages: Mapping[int, Sequence[str]]) -> dict[str, Any]:
        digests = [digest for parts in messages.values() for digest in parts]
        pipe = self._redis.pipeline(transaction=False)
        for digest in digests:
            getattr(pipe, command)(payload_key(run, digest))
        return dict(zip(digests, await pipe.execute(), strict=True))

    # --- segments -----------------------------------------------------------------------------------------------------

    async def packed(self, run: str, region: str) -> int:
        """The first entry that is in no segment; entry 0 never is, since all who join ask for it."""
        return int(await self._redis.get(_key("packed", run, region)) or 1)

    async def segment_at(self, run: str, region: str, seq: int) -> Segment | None:
        found = await self._last_up_to("segments", run, region, seq)
        return found if found is not None and seq <= found.last else None

    async def segment_of_step(self, run: str, region: str, step: int) -> Segment | None:
        found = await self._last_up_to("segment-steps", run, region, step)
        return found if found is not None and found.steps is not None and step <= found.steps[1] else None

    async def _last_up_to(self, kind: str, run: str, region: str, score: int) -> Segment | None:
        lines = await self._redis.zrevrangebyscore(_key(kind, run, region), score, "-inf", start=0, num=1)
        return Segment.model_validate_json(lines[0]) if lines else None

    async def oldest_segment(self, run: str, region: str) -> Segment | None:
        lines = await self._redis.zrange(_key("segments", run, region), 0, 0)
        return Segment.model_validate_json(lines[0]) if lines else None

    async def dropped(self, run: str, region: str) -> int:
        """The last step whose entry is there no more; 0 if none."""
        return int(await self._redis.get(_key("dropped", run, region)) or 0)

    async def register(
        self, run: str, region: str, segment: Segment, steps: Iterable[int], messages: Iterable[str]
    ) -> bool:
        """The segment takes the place of what Redis has of its entries; False if another one has.

        Its blob must still be on the list `garbage`, and is taken off it.
        """
        seqs = range(segment.first, segment.last + 1)
        operations = [
            *_in_groups("HDEL", _key("headers", run, region), seqs),
            *_in_groups("HDEL", _key("messages", run, region), seqs),
            *_in_groups("HDEL", _key("steps", run, region), steps),
            *[["DEL", payload_key(run, digest)] for digest in messages],
        ]
        kinds = ("packed", "segments", "segment-steps")
        keys = [f"run:{run}", *(_key(kind, run, region) for kind in kinds), GARBAGE]
        first_step = "" if segment.steps is None else segment.steps[0]
        line = segment.model_dump_json()
        arguments = [segment.first, segment.last, line, first_step, segment.blob, json.dumps(operations)]
        return bool(await self._register(keys=keys, args=arguments))

    async def drop(self, run: str, region: str, segment: Segment, now: datetime) -> None:
        """Its entries are gone; its blobs go a while after."""
        keys = [*(_key(kind, run, region) for kind in ("segments", "segment-steps", "dropped")), GARBAGE]
        last_step = "" if segment.steps is None else segment.steps[1]
        line, at = segment.model_dump_json(exclude_unset=True), now.timestamp() + GRACE_S
        await self._drop(keys=keys, args=[line, last_step, json.dumps(segment.blobs), at])

    # --- references ---------------------------------------------------------------------------------------------------

    async def blobs_of_entries(self, run: str, region: str) -> set[str]:
        """Digests of the blobs that the entries in Redis name."""
        lines = await self._redis.hvals(_key("headers", run, region))
        return {digest for line in lines for digest in blobs_of_entry(json.loads(line))}

    async def referred(self, run: str, region: str) -> set[str]:
        """Digests of the blobs to which the log refers; what is packed meanwhile is among them."""
        found = await self.blobs_of_entries(run, region) | set(await self.all_messages(run, region))
        for line in await self._redis.zrange(_key("segments", run, region), 0, -1):
            found |= set(Segment.model_validate_json(line).blobs)
        return found

    # --- what is left to do -------------------------------------------------------------------------------------------

    async def ended(self) -> list[str]:
        """Runs that have ended and may have entries that are in no segment."""
        return sorted(run.decode() for run in await self._redis.smembers(_ENDED))

    async def all_packed(self, run: str) -> None:
        await self._redis.srem(_ENDED, run)


def _in_groups(command: str, key: str, fields: Iterable[int]) -> list[Operation]:
    """Of a few hundred, since Lua unpacks no more than a few thousand."""
    given = list(fields)
    return [[command, key, *given[start : start + 500]] for start in range(0, len(given), 500)]
