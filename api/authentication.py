"""Who is asking: every request below /v1 is authenticated from its headers, before a byte of its body is read."""

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from api.errors import ProblemError, UnauthorizedError
from api.middleware import problem_response
from api.service import Principal, Service

__all__ = ["Authentication", "principal_of"]


def principal_of(connection: HTTPConnection) -> Principal:
    """Whom the token of a request below /v1 belongs to."""
    principal = connection.scope["state"]["principal"]
    assert isinstance(principal, Principal)
    return principal


class Authentication:
    """Pure ASGI: puts the principal into the request's state, or answers 401."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/v1/"):
            try:
                principal = await self._authenticate(_token(Headers(scope=scope)))
            except ProblemError as error:
                await problem_response(error)(scope, receive, send)
                return
            scope.setdefault("state", {})["principal"] = principal
        await self.app(scope, receive, send)

    async def _authenticate(self, token: str) -> Principal:
        principal = await self._service.authenticate(token)
        if principal is None:
            raise UnauthorizedError(
                "token_unknown", "nobody has issued this token, or it was revoked or has expired: ask for a new one"
            )
        return principal


def _token(headers: Headers) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise UnauthorizedError("token_missing", "this needs a token: send `Authorization: Bearer TOKEN`")
    return token.strip()
