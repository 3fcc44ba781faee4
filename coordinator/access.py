"""Access to the API: what the routes of tokens and of the audit ask for."""

import secrets
from datetime import timedelta

import structlog
from redis.exceptions import RedisError

from api.access import AuditPage, IssuedToken, Token, TokenRequest
from api.service import Principal
from coordinator.store import Store
from coordinator.tokens import hashed

__all__ = ["Access"]

log = structlog.get_logger()


class Access:
    """Implements `api.service.Access`."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def create_token(self, request: TokenRequest) -> IssuedToken:
        now, secret = await self._store.now(), secrets.token_urlsafe(32)
        token = Token(
            id=f"{request.name}-{secrets.token_hex(4)}",
            name=request.name,
            scope=request.scope,
            created_at=now,
            expires_at=None if request.expires_in_s is None else now + timedelta(seconds=request.expires_in_s),
        )
        await self._store.tokens.issue(token, hashed(secret))
        return IssuedToken(**token.model_dump(), token=secret)

    async def tokens(self) -> list[Token]:
        return await self._store.tokens.all(await self._store.now())

    async def token(self, token: str) -> Token:
        return await self._store.tokens.get(token)

    async def revoke_token(self, token: str) -> None:
        await self._store.tokens.withdraw(token)

    async def record(self, principal: Principal, act: str, target: str, status: int) -> None:
        """An act that was done is not undone because Redis went away before it was recorded: our log has it then."""
        try:
            await self._store.audit.append(principal, act, target, status)
        except RedisError as error:
            log.error("not recorded", who=principal.who, act=act, target=target, status=status, error=str(error))

    async def audit(self, cursor: int | None, limit: int) -> AuditPage:
        return await self._store.audit.page(cursor, limit)
