"""Parts of contributions that have arrived, in Redis: a key for each contribution, which is no part of a run's state.

Its fields: `header`, what all parts must agree in, and by number each part's digest and sum of squares. It is gone when
the round closes, or an hour after the last part.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from api.errors import ConflictError, InvalidError

__all__ = ["Arrival", "Arrivals", "Part"]

# KEYS: the contribution. ARGV: a part's number, digest and squares; digest of the common header; lifetime in seconds;
# prefix of payloads. Answers all parts; or what differs.
_ADD = """
if redis.call('HSETNX', KEYS[1], 'header', ARGV[4]) == 0 and redis.call('HGET', KEYS[1], 'header') ~= ARGV[4] then
  return 'header'
end
local record = ARGV[2] .. ' ' .. ARGV[3]
if redis.call('HSETNX', KEYS[1], ARGV[1], record) == 0 and redis.call('HGET', KEYS[1], ARGV[1]) ~= record then
  return 'part'
end
redis.call('EXPIRE', KEYS[1], ARGV[5])
local fields = redis.call('HGETALL', KEYS[1])
for i = 1, #fields, 2 do
  local payload = ARGV[6] .. string.sub(fields[i + 1], 1, 64)
  if redis.call('TTL', payload) >= 0 then redis.call('EXPIRE', payload, ARGV[5]) end
end
return fields
"""

# KEYS: contributions. ARGV: prefix of payloads.
_DROP = """
for _, key in ipairs(KEYS) do
  for _, record in ipairs(redis.call('HVALS', key)) do redis.call('DEL', ARGV[1] .. string.sub(record, 1, 64)) end
  redis.call('DEL', key)
end
"""

_LIFETIME_S = 3600


@dataclass(frozen=True)
class Arrival:
    """Whose contribution it is.

    `seat`: of the ranks that send it, `seq`: of the last entry that they have applied; others send other bytes.
    """

    run: str
    region: str
    step: int
    site: str
    seat: str
    seq: int

    @property
    def key(self) -> str:
        return f"arrival:{self.run}:{self.region}:{self.step}:{self.site}:{self.seat}:{self.seq}"


@dataclass(frozen=True)
class Part:
    digest: str
    squares: float


class Arrivals:
    def __init__(self, redis: Any) -> None:
        self._redis = redis
        self._add = redis.register_script(_ADD)
        self._drop = redis.register_script(_DROP)

    async def add(self, arrival: Arrival, number: int, part: Part, header: str) -> dict[int, Part]:
        """All parts that are there, this one among them; its payload is in the store already.

        Raises:
            ConflictError: another body is there for this part.
            InvalidError: its header is not that of the parts before.
        """
        arguments = [number, part.digest, part.squares.hex(), header, _LIFETIME_S, f"payload:{arrival.run}:"]
        answer = await self._add(keys=[arrival.key], args=arguments)
        if answer == b"part":
            raise ConflictError(
                "other_bytes", f"site {arrival.site} has already sent part {number} of step {arrival.step}, other bytes"
            )
        if answer == b"header":
            raise InvalidError(
                "parts_differ",
                f"part {number} of step {arrival.step} from site {arrival.site} has another header than those before: "
                "tokens, absent tensors and position are those of the whole contribution",
            )
        records = dict(zip(answer[::2], answer[1::2], strict=True))
        return {int(name): _part(record) for name, record in records.items() if name != b"header"}

    async def drop(self, arrivals: Iterable[Arrival]) -> None:
        """Forgets contributions of a run, complete or not, and their payloads."""
        dropped = list(arrivals)
        if dropped:
            await self._drop(keys=[arrival.key for arrival in dropped], args=[f"payload:{dropped[0].run}:"])


def _part(record: bytes) -> Part:
    digest, squares = record.decode().split()
    return Part(digest, float.fromhex(squares))
