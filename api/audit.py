"""Records every administrative act, done or refused, in one place: routes say what they do by `@allowed(..., act=)`."""

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.authentication import principal_of
from api.service import Service

__all__ = ["Audit"]

_LONGEST_TARGET = 200
_METHOD_NOT_ALLOWED = 405


class Audit:
    """Pure ASGI, inside of Authentication. The event is stored before the answer goes out."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def recorded(message: Message) -> None:
            if message["type"] == "http.response.start":
                await self._record(scope, message)
            await send(message)

        await self.app(scope, receive, recorded)

    async def _record(self, scope: Scope, start: Message) -> None:
        act = getattr(scope.get("endpoint"), "act", None)  # of the route that was found
        if act is None or start["status"] == _METHOD_NOT_ALLOWED:
            return
        path = scope["path"].removeprefix("/v1/")
        target = Headers(raw=start["headers"]).get("location", path)  # of what was created
        await self._service.access.record(principal_of(HTTPConnection(scope)), act, _printable(target), start["status"])


def _printable(text: str) -> str:
    """It comes from whoever asked, and ends in the terminal of an administrator."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:_LONGEST_TARGET])
