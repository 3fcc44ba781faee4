"""HTTP connections that do not get on, or ask for too much at once, are closed: uvicorn itself takes any."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["BoundedConnection"]

HEAD_TIMEOUT_S = 60.0
LINGER_S = 5.0
"""For how long what still comes of a request that was refused is let go."""
_MOST_LET_GO = 1 << 20
_MOST_OF_A_HEAD = 64 << 10
_MOST_OF_A_URL = 60 << 10
_WORDS = {
    b"414 URI Too Long": b"The URL of a request takes at most %d bytes." % _MOST_OF_A_URL,
    b"431 Request Header Fields Too Large": b"The head of a request takes at most %d bytes." % _MOST_OF_A_HEAD,
}
_MOST_WAITING = 16
"""Requests on one connection before the one that is being answered has its answer."""


class BoundedConnection(HttpToolsProtocol):
    """Closes a connection that brings no whole head, or not the rest of a body that has had its answer, for a minute;
    and one whose head does not end, or names no host or several, or that sends on and on without waiting for answers.

    Whoever sends what cannot be read, or a head that is too long, has the answer before the connection is closed.
    While a request is being answered, the pace of its body is the application's business.
    """

    _deadline: asyncio.TimerHandle | None = None
    _in_head = False
    _of_head = 0
    _of_bodies = 0
    _status = b"400 Bad Request"
    """Of a refusal."""
    _let_go: int | None = None
    """Bytes that came after a refusal."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn does
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        if self._let_go is not None:
            self._let_go += len(data)
            if self._let_go > _MOST_LET_GO:
                self.transport.abort()
            return
        self._of_bodies = 0
        super().data_received(data)
        if self._in_head and self._let_go is None and not self.transport.is_closing():
            self._of_head += len(data) - self._of_bodies
            if self._of_head > _MOST_OF_A_HEAD:
                self._status = b"431 Request Header Fields Too Large"
                self.send_400_response("")
        self._watch()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._of_head = True, 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > _MOST_OF_A_URL:
            self._status = b"414 URI Too Long"
            raise ValueError("the URL is too long")

    def on_headers_complete(self) -> None:
        """What this raises, uvicorn answers with 400, and closes the connection."""
        hosts = [name for name, _ in self.headers if name == b"host"]
        if len(hosts) > 1 or (not hosts and self.parser.get_http_version() != "1.0"):
            raise ValueError("a request names one host")
        if len(self.pipeline) >= _MOST_WAITING:
            raise ValueError("too many requests are waiting")
        super().on_headers_complete()
        self._in_head = False

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._of_bodies += len(body)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """Closing a connection with bytes in it that nobody has read would destroy the answer on its way: a bounded
        amount of them is read, unless earlier requests are still to be answered, which then never are.
        """
        text = _WORDS.get(self._status, msg.encode())
        fields = [*self.server_state.default_headers, (b"content-type", b"text/plain; charset=utf-8")]
        fields += [(b"content-length", b"%d" % len(text)), (b"connection", b"close")]
        lines = [b"HTTP/1.1 " + self._status, *(name + b": " + value for name, value in fields), b"", text]
        self.transport.write(b"\r\n".join(lines))
        cycle: Any = self.cycle
        if cycle is not None and not cycle.response_complete:
            self.transport.close()
            return
        self._let_go = 0
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._stop_watching()
        self._deadline = self.loop.call_later(LINGER_S, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_watching()

    def _watch(self) -> None:
        cycle: Any = self.cycle
        if cycle is not None and not cycle.response_complete:
            self._stop_watching()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.abort)

    def _stop_watching(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
