"""Who is asking: every request below /v1 is authenticated from its headers, before a byte of its body is read."""

import hashlib

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from api.errors import ProblemError, UnauthorizedError
from api.middleware import problem_response
from api.rates import Rates
from api.service import Principal, Service

__all__ = ["Authentication", "principal_of"]


def principal_of(connection: HTTPConnection) -> Principal:
    """Whom the token of a request below /v1 belongs to."""
    principal = connection.scope["state"]["principal"]
    assert isinstance(principal, Principal)
    return principal


class Authentication:
    """Pure ASGI: puts the principal into the request's state, or answers 401, or 429 to whoever asks too often."""

    def __init__(self, app: ASGIApp, service: Service, rates: Rates) -> None:
        self.app = app
        self._service = service
        self._rates = rates

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/v1/"):
            try:
                principal = await self._authenticate(scope)
            except ProblemError as error:
                await problem_response(error)(scope, receive, send)
                return
            scope.setdefault("state", {})["principal"] = principal
        await self.app(scope, receive, send)

    async def _authenticate(self, scope: Scope) -> Principal:
        token = _token(Headers(scope=scope))
        token_hash = hashlib.sha256(token.encode()).hexdigest()
        address = scope["client"][0] if scope.get("client") else ""
        self._rates.admit(address, token_hash)
        principal = await self._service.authenticate(token) if token else None
        if principal is None:
            self._rates.failed(address, token_hash)
            raise _refusal(token)
        self._rates.count(token_hash, principal.who)
        return principal


def _token(headers: Headers) -> str:
    """Nothing if there is none."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _refusal(token: str) -> UnauthorizedError:
    if not token:
        return UnauthorizedError("token_missing", "this needs a token: send `Authorization: Bearer TOKEN`")
    return UnauthorizedError(
        "token_unknown", "nobody has issued this token, or it was revoked or has expired: ask for a new one"
    )
