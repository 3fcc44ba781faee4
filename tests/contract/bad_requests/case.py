"""A request that is malformed, hostile or late, and the answer that it gets."""

import json
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.contract.bad_requests.states import RUNNING, State

__all__ = ["CLOSED", "Case", "Http", "Wire"]

CLOSED = 0
"""The status of a request that gets no answer: the connection is closed."""

Body = str | bytes | Callable[[State], bytes]


@dataclass(frozen=True)
class Http:
    """A request that an HTTP client can send.

    Args:
        path: like headers and text, it has words in capitals for what `State.words` knows.
        token: whose, by `State.tokens`.
        body: text, bytes, or a function of the state.
        json: a body as an object; for what JSON cannot say there is text.
    """

    method: str
    path: str
    token: str | None = "admin"
    body: Body = b""
    json: Any = None
    headers: Mapping[str, str | bytes] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        return _short(f"{self.method} {self.path}")

    def send(self, state: State) -> httpx.Response:
        headers = {name: state.fill(value) if isinstance(value, str) else value for name, value in self.headers.items()}
        if self.token is not None:
            headers = {"Authorization": f"Bearer {state.tokens[self.token]}"} | headers
        body = self.body if self.json is None else json.dumps(self.json)
        if callable(body):
            body = body(state)
        elif isinstance(body, str):
            body = state.fill(body).encode(errors="surrogatepass")
            headers = {"Content-Type": "application/json"} | headers
        return state.http.request(self.method, state.fill(self.path), content=body, headers=headers)


@dataclass(frozen=True)
class Wire:
    """Bytes that no HTTP client would send.

    Args:
        text: of the request, with words for what `State.words` knows; lines end with a single newline.
        ends: whether nothing can follow the bytes, so that what is missing will never come.
    """

    text: str
    ends: bool = False

    @property
    def shown(self) -> str:
        line = self.text.partition("\n")[0].removesuffix(" HTTP/1.1")
        return _short(line) if line.isprintable() else ""

    def send(self, state: State) -> httpx.Response | None:
        address = urlsplit(state.url)
        with socket.create_connection((address.hostname, address.port), timeout=90) as connection:
            connection.sendall(state.fill(self.text).replace("\n", "\r\n").encode("latin-1"))
            if self.ends:
                connection.shutdown(socket.SHUT_WR)
            return _answer(connection)


def _answer(connection: socket.socket) -> httpx.Response | None:
    """None if the connection is closed without one. The body is known to be whole by its length."""
    received = b""
    while block := connection.recv(65536):
        received += block
        head, found, body = received.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        headers = httpx.Headers([tuple(line.split(": ", 1)) for line in lines[1:] if ": " in line])
        if found and len(body) == int(headers.get("content-length", -1)):
            break
    if not received:
        return None
    return httpx.Response(int(lines[0].split()[1]), headers=headers, content=body)


def _short(line: str) -> str:
    return line if len(line) < 120 else f"{line[:60]}..."


@dataclass(frozen=True)
class Case:
    """What is answered to a request.

    Args:
        what: the request in words.
        code: of the problem; nothing if the answer is none.
        detail: a part of the problem's detail, or of another answer's text, with the same words in capitals.
    """

    what: str
    request: Http | Wire
    status: int
    code: str
    detail: str
    state: type[State] = RUNNING
    slow: bool = False
