"""Routes about access to the API: tokens, and the record of administrative acts. All of them are for administrators."""

from typing import Annotated

from fastapi import APIRouter, Path, Query, Response

from api.access import AuditPage, IssuedToken, Token, TokenPage, TokenRequest
from api.permissions import GuardedRoute, allowed
from api.routes import Coordinator

__all__ = ["v1"]

v1 = APIRouter(route_class=GuardedRoute)
TokenId = Annotated[str, Path(max_length=80)]


@v1.post("/tokens", status_code=201)
@allowed("admin", act="token.create")
async def create_token(request: TokenRequest, service: Coordinator, response: Response) -> IssuedToken:
    issued = await service.access.create_token(request)
    response.headers["Location"] = f"tokens/{issued.id}"
    return issued


@v1.get("/tokens")
@allowed("admin")
async def list_tokens(service: Coordinator) -> TokenPage:
    return TokenPage(items=await service.access.tokens())


@v1.get("/tokens/{token}")
@allowed("admin")
async def get_token(token: TokenId, service: Coordinator) -> Token:
    return await service.access.token(token)


@v1.delete("/tokens/{token}", status_code=204)
@allowed("admin", act="token.revoke")
async def revoke_token(token: TokenId, service: Coordinator) -> None:
    await service.access.revoke_token(token)


@v1.get("/audit")
@allowed("admin")
async def audit(
    service: Coordinator,
    cursor: Annotated[int | None, Query(ge=1, le=2**62, description="`next_cursor` of the page before")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> AuditPage:
    return await service.access.audit(cursor, limit)
