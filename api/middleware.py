"""Pure ASGI middleware: what is checked of every request before a route sees it, and what every answer carries."""

import asyncio
import json
import math
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import PROBLEM_MEDIA_TYPE, InvalidError, ProblemError, TooLargeError, UnsupportedMediaError

__all__ = ["BodyLimits", "SecurityHeaders", "problem_response"]

BODY_TIMEOUT_S = 60.0
SLOWEST = 1024
"""Bytes of a body in a second; nobody could train over less."""
_RETRY_AFTER_S = {429: 1, 503: 1, 507: 10}
"""By status; an operator makes room for 507."""
_CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; form-action 'none'; "
    "base-uri 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)


class LengthRequiredError(InvalidError):
    status, title = 411, "length required"


class BodyTimeoutError(InvalidError):
    status, title = 408, "request timeout"


def problem_response(error: ProblemError) -> Response:
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
    if error.status in _RETRY_AFTER_S:
        headers["Retry-After"] = str(math.ceil(error.context.get("retry_after_s", _RETRY_AFTER_S[error.status])))
    text = json.dumps(error.problem().model_dump(), ensure_ascii=False)
    body = text.encode(errors="replace")  # it may quote what a hostile client sent
    return Response(body, status_code=error.status, media_type=PROBLEM_MEDIA_TYPE, headers=headers)


class BodyLimits:
    """Refuses a body by its declared size before reading it, and one that stops arriving or trickles.

    Args:
        limit: bytes allowed for a request path.
    """

    def __init__(self, app: ASGIApp, limit: Callable[[str], int]) -> None:
        self.app = app
        self.limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        error = self._refusal(scope["path"], Headers(scope=scope))
        if error is not None:
            await problem_response(error)(scope, receive, send)
            return
        await self.app(scope, _paced(receive), send)

    def _refusal(self, path: str, headers: Headers) -> ProblemError | None:
        if "content-encoding" in headers:
            return UnsupportedMediaError(
                "compressed_body", "compressed request bodies are not accepted; send it without Content-Encoding"
            )
        if "transfer-encoding" in headers:
            return LengthRequiredError("length_required", "send a Content-Length; chunked bodies are not accepted")
        limit = self.limit(path)
        declared = int(headers.get("content-length", "0"))
        if declared > limit:
            return TooLargeError(
                "body_too_large",
                f"the body of {declared} bytes exceeds the limit of {limit} bytes for {path}",
                context={"limit": limit},
            )
        return None


def _paced(receive: Receive) -> Receive:
    """Each `BODY_TIMEOUT_S` spent waiting for the body are to bring `SLOWEST` bytes a second, or the whole rest of it.

    Only waiting counts: whoever takes long to store a block does not make its sender late.
    """
    complete, arrived, waited = False, 0, 0.0

    async def paced() -> Message:
        nonlocal complete, arrived, waited
        loop = asyncio.get_running_loop()
        while not complete:
            began = loop.time()
            try:
                async with asyncio.timeout(max(BODY_TIMEOUT_S - waited, 0.0)):
                    message = await receive()
            except TimeoutError:
                if arrived < SLOWEST * BODY_TIMEOUT_S:
                    raise _too_slow(arrived) from None
                arrived, waited = 0, 0.0
                continue
            complete = not message.get("more_body", False)
            arrived += len(message.get("body", b""))
            waited += loop.time() - began
            return message
        return await receive()

    return paced


def _too_slow(arrived: int) -> BodyTimeoutError:
    return BodyTimeoutError(
        "body_timeout",
        f"the body stopped arriving: {arrived} bytes in {BODY_TIMEOUT_S:g} s, where {SLOWEST} a second are the least; "
        "send it again",
    )


class SecurityHeaders:
    """A strict content security policy and no caching of anything that a token was needed for."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.setdefault("Cache-Control", "no-store")
                headers["Content-Security-Policy"] = _CSP
                headers["X-Content-Type-Options"] = "nosniff"
                headers["Referrer-Policy"] = "no-referrer"
            await send(message)

        await self.app(scope, receive, with_headers)
