"""Pure ASGI middleware that checks and adds `Content-Digest`."""

import hashlib

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.content_digest import DIGEST_MISMATCH, FIELD, content_digest, promised
from api.errors import InvalidError
from api.middleware import problem_response

__all__ = ["ContentDigests"]


class ContentDigests:
    """Checks the body of every request that comes with the field, and puts the field on every answer of one piece.

    The body is checked as it passes, block by block. Its end reaches the application only if it is right, so that
    nothing is done with a body that is not; whatever the application says to that, the answer is 422.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        sha256 = promised(Headers(scope=scope).get(FIELD))
        request = _Request(receive, sha256)
        answer = _Answer(send)

        async def unless_refused(message: Message) -> None:
            if request.refusal is None:
                await answer.send(message)

        try:
            await self.app(scope, receive if sha256 is None else request.receive, unless_refused)
        except InvalidError as error:
            if error is not request.refusal:
                raise
        if request.refusal is not None:
            await problem_response(request.refusal)(scope, receive, answer.send)


class _Request:
    def __init__(self, receive: Receive, sha256: bytes | None) -> None:
        self.refusal: InvalidError | None = None
        self._receive = receive
        self._sha256 = sha256
        self._digest = hashlib.sha256()
        self._complete = False

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] != "http.request" or self._complete:
            return message
        self._digest.update(message.get("body", b""))
        self._complete = not message.get("more_body", False)
        if self._complete and self._digest.digest() != self._sha256:
            self.refusal = InvalidError(
                DIGEST_MISMATCH, f"the body is not the one that {FIELD} names: it was changed on its way; send it again"
            )
            raise self.refusal
        return message


class _Answer:
    """Holds back the head of an answer until its first piece, which is mostly the only one, is there."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._head: Message | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._head = message
            return
        head, self._head = self._head, None
        if head is not None:
            body = message.get("body", b"")
            if body and not message.get("more_body", False):
                headers = MutableHeaders(scope=head)
                if FIELD not in headers:
                    headers[FIELD] = content_digest(body)
            await self._send(head)
        await self._send(message)
