"""What Lua calls to Redis have in common."""

__all__ = ["ALSO_WHEN_FULL", "ZADD"]

ALSO_WHEN_FULL = "redis.call('DEL', 'nothing')\n"
"""Begins a script that is to be run by a Redis at its `maxmemory`, too.

Such a server refuses the first write of a script if it may take memory, but no later one; and it never refuses DEL.
"""

# KEYS: a sorted set. ARGV: the arguments of ZADD.
ZADD = ALSO_WHEN_FULL + "redis.call('ZADD', KEYS[1], unpack(ARGV))"
