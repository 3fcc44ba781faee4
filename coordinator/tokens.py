"""Tokens in Redis: `token:HASH` is whom a token stands for, `tokens` lists those that people hold. No secret is here.

Expiry is Redis's: a token that has expired is gone, as if it had never been. Tokens of ranks, which ask at every step,
are believed for a second, unless this process knows better; all others are looked up at every request.
"""

import hashlib
import hmac
import json
import time
from datetime import datetime
from typing import Any, Literal

from api.access import Token
from api.errors import ConflictError, NotFoundError
from api.payload import canonical_json

__all__ = ["Tokens", "hashed", "token_key"]

_ORPHAN_S = 3600
"""Seconds after which a token that no committed state refers to is dropped."""
_BELIEVED_S = 1.0
_MOST_BELIEVED = 10_000


class _Record(Token):
    hash: str


def hashed(secret: str) -> str:
    """What is stored of a token: SHA-256 suffices, since tokens are long and random."""
    return hashlib.sha256(secret.encode()).hexdigest()


def token_key(secret_hash: str) -> str:
    return f"token:{secret_hash}"


class Tokens:
    def __init__(self, redis: Any) -> None:
        self._redis = redis
        self._believed: dict[str, tuple[dict[str, Any], float]] = {}
        """Whom the token of a hash stands for, and until when that holds by `time.monotonic`."""

    async def principal(self, secret_hash: str) -> dict[str, Any] | None:
        believed, now = self._believed, time.monotonic()
        if secret_hash in believed and now < believed[secret_hash][1]:
            return believed[secret_hash][0]
        line = await self._redis.get(token_key(secret_hash))
        principal: dict[str, Any] | None = None if line is None else json.loads(line)
        if principal is not None and principal["scope"] == "ranks":
            if len(believed) >= _MOST_BELIEVED:
                believed.clear()
            believed[secret_hash] = principal, now + _BELIEVED_S  # of no use if `forget` came in between
        return principal

    def forget(self) -> None:
        """Some ranks may have lost their tokens: all are looked up again."""
        self._believed = {}

    async def claim(self, secret_hash: str, principal: dict[str, Any], *, for_good: bool = True) -> None:
        """Makes a secret the token of `principal`; if not for good, until a committed state refers to it, or an hour.

        Raises:
            ConflictError: it is a token of somebody else.
        """
        name, line = token_key(secret_hash), canonical_json(principal)
        await self._redis.set(name, line, nx=True, ex=None if for_good else _ORPHAN_S)
        if await self._redis.get(name) != line.encode():
            raise ConflictError("secret_taken", "this secret is in use as another token: make a new one at random")

    # --- tokens that people hold --------------------------------------------------------------------------------------

    async def issue(self, token: Token, secret_hash: str) -> None:
        """Makes a secret the token that is described, in place of an earlier one of the same id."""
        before = await self._find(token.id)
        record = _Record(**token.model_dump(), hash=secret_hash)
        principal = {"scope": token.scope, "token": token.id, "name": token.name}
        lifetime = None if token.expires_at is None else int((token.expires_at - token.created_at).total_seconds())
        pipe = self._redis.pipeline(transaction=True)
        if before is not None and before.hash != secret_hash:
            pipe.delete(token_key(before.hash))
        pipe.set(token_key(secret_hash), canonical_json(principal), ex=lifetime)
        pipe.hset("tokens", token.id, record.model_dump_json())
        await pipe.execute()

    async def install(self, scope: Literal["admin", "observer", "join"], secret_hash: str, now: datetime) -> None:
        """The one token of a scope that the settings name; the one before it is good no more."""
        before = await self._find(scope)
        same = before is not None and hmac.compare_digest(before.hash, secret_hash)
        created = before.created_at if before is not None and same else now
        token = Token(id=scope, name=scope, scope=scope, created_at=created, from_settings=True)
        await self.issue(token, secret_hash)

    async def all(self, now: datetime) -> list[Token]:
        """Oldest first; forgets those that have expired."""
        records = [_Record.model_validate_json(line) for line in await self._redis.hvals("tokens")]
        expired = [record.id for record in records if record.expires_at is not None and record.expires_at <= now]
        if expired:
            await self._redis.hdel("tokens", *expired)
        there = [_token(record) for record in records if record.id not in expired]
        return sorted(there, key=lambda token: (token.created_at, token.id))

    async def get(self, token: str) -> Token:
        return _token(await self._record(token))

    async def withdraw(self, token: str) -> None:
        """Raises ConflictError for a token that the settings would bring back."""
        record = await self._record(token)
        if record.from_settings:
            raise ConflictError(
                "token_from_settings",
                f"the {token} token comes from the coordinator's settings: set another with "
                f"ISTHMUS_{token.upper()}_TOKEN, or delete DATA_DIR/{token}-token, and restart the coordinator",
            )
        pipe = self._redis.pipeline(transaction=True)
        pipe.delete(token_key(record.hash))
        pipe.hdel("tokens", token)
        await pipe.execute()

    async def _record(self, token: str) -> _Record:
        record = await self._find(token)
        if record is None:
            raise NotFoundError(
                "token_not_found", f"there is no token {token!r}; `isthmus token list` shows the tokens"
            )
        return record

    async def _find(self, token: str) -> _Record | None:
        line = await self._redis.hget("tokens", token)
        return None if line is None else _Record.model_validate_json(line)


def _token(record: _Record) -> Token:
    return Token(**record.model_dump(exclude={"hash"}))
