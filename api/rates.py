"""How often a token and an address may ask. Counted in this process: each of several workers counts for itself.

An address whose tokens were wrong too often is not asked for its token any more, but for one that was good before: so
guessing is slow, and whoever shares an address with a stranger goes on.
"""

import math

from limits import RateLimitItem, RateLimitItemPerSecond
from limits.storage import MemoryStorage
from limits.strategies import FixedWindowRateLimiter

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
        self._requests = RateLimitItemPerSecond(math.ceil(requests * _WINDOW_S / 60), _WINDOW_S)
        self._failures = RateLimitItemPerSecond(failures, _FAILURE_WINDOW_S)
        self._counts = FixedWindowRateLimiter(MemoryStorage())
        self._known: set[str] = set()

    def admit(self, address: str, token_hash: str) -> None:
        """Raises TooManyRequestsError for a token not known to be good from an address that failed too often."""
        if token_hash not in self._known and not self._counts.test(self._failures, address):
            because = f"too many requests from {address} had no token, or one that is not good: use another"
            raise _refusal(because, self._failures)

    def failed(self, address: str, token_hash: str) -> None:
        self._known.discard(token_hash)
        self._counts.hit(self._failures, address)

    def count(self, token_hash: str, name: str) -> None:
        """Of a good token. Raises TooManyRequestsError if it was used too often."""
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known.add(token_hash)
        if not self._counts.hit(self._requests, token_hash):
            because = (
                f"more than {self._per_minute} requests a minute with the token of {name}: ask less often, or let the "
                "coordinator's operator raise ISTHMUS_RATE_LIMIT"
            )
            raise _refusal(because, self._requests)


def _refusal(because: str, limit: RateLimitItem) -> TooManyRequestsError:
    after = limit.get_expiry()
    detail = f"{because}; try again in {after} s"
    return TooManyRequestsError("rate_limited", detail, context={"retry_after_s": after})
