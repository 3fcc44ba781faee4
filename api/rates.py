"""How often a token and an address may ask. Counted in this process: each of several workers counts for itself.

An address whose tokens were wrong too often is not asked for its token any more, but for one that was good before: so
guessing is slow, and whoever shares an address with a stranger goes on.
"""

import math
import time

from api.errors import TooManyRequestsError

__all__ = ["Rates"]

_WINDOW_S = 10
"""So long at most does a client wait that was too fast."""
_FAILURE_WINDOW_S = 60
_MOST_KNOWN = 100_000


class Rates:
    """Counts requests.

    Args:
        requests: a minute, per token.
        failures: a minute, per address: requests without a token, or with one that is not good.
    """

    def __init__(self, requests: int, failures: int) -> None:
        self._per_minute = requests
        self._requests = _Window(math.ceil(requests * _WINDOW_S / 60), _WINDOW_S)
        self._failures = _Window(failures, _FAILURE_WINDOW_S)
        self._known: set[str] = set()

    def admit(self, address: str, token_hash: str) -> None:
        """Raises TooManyRequestsError for a token not known to be good from an address that failed too often."""
        if token_hash not in self._known and self._failures.is_full(address):
            because = (
                f"too many requests from {address} had no token, or one that is not good; until that is forgotten only "
                "a token that was used here before is looked at: wait, and if this one is not good, use another"
            )
            raise _refusal(because, _FAILURE_WINDOW_S)

    def failed(self, address: str, token_hash: str) -> None:
        self._known.discard(token_hash)
        self._failures.count(address)

    def count(self, token_hash: str, name: str) -> None:
        """Of a good token. Raises TooManyRequestsError if it was used too often."""
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known.add(token_hash)
        if self._requests.is_full(token_hash):
            because = (
                f"more than {self._per_minute} requests a minute with the token of {name}: ask less often, or let the "
                "coordinator's operator raise ISTHMUS_RATE_LIMIT"
            )
            raise _refusal(because, _WINDOW_S)
        self._requests.count(token_hash)


class _Window:
    """Counts up to `most` of each key, until `length_s` seconds after the first of all; then anew."""

    def __init__(self, most: int, length_s: float) -> None:
        self._most = most
        self._length_s = length_s
        self._ends = 0.0
        self._counts: dict[str, int] = {}

    def is_full(self, key: str) -> bool:
        return time.monotonic() < self._ends and self._counts.get(key, 0) >= self._most

    def count(self, key: str) -> None:
        now = time.monotonic()
        if now >= self._ends:
            self._ends = now + self._length_s
            self._counts.clear()
        self._counts[key] = self._counts.get(key, 0) + 1


def _refusal(because: str, after_s: int) -> TooManyRequestsError:
    detail = f"{because}; try again in {after_s} s"
    return TooManyRequestsError("rate_limited", detail, context={"retry_after_s": after_s})
