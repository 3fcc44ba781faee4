"""Counts every byte that crosses the link: heads and bodies, by what they are for."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Literal

import httpx

__all__ = ["CountingTransport", "Purpose", "counted_as_outer"]

Purpose = Literal["round", "outer", "blob", "other"]
"""`outer`: everything that an outer round takes, its blobs included; `blob`: all other blobs."""

_outer: ContextVar[bool] = ContextVar("_outer", default=False)


@contextlib.contextmanager
def counted_as_outer() -> Iterator[None]:
    """What this thread requests inside of it belongs to an outer round."""
    before = _outer.set(True)
    try:
        yield
    finally:
        _outer.reset(before)


class _Counted(httpx.SyncByteStream):
    def __init__(self, stream: httpx.SyncByteStream, counter: Counter[Purpose], purpose: Purpose) -> None:
        self._stream = stream
        self._counter = counter
        self._purpose = purpose

    def __iter__(self) -> Iterator[bytes]:
        for block in self._stream:
            self._counter[self._purpose] += len(block)
            yield block

    def close(self) -> None:
        self._stream.close()


class CountingTransport(httpx.BaseTransport):
    """Wraps a transport; `up` and `down` are bytes by purpose, as HTTP/1.1 writes them, without TLS and below."""

    def __init__(self, transport: httpx.BaseTransport | None = None) -> None:
        self._transport = transport or httpx.HTTPTransport(retries=0)
        self.up: Counter[Purpose] = Counter()
        self.down: Counter[Purpose] = Counter()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        purpose = _purpose(request.url.path)
        target = request.url.raw_path
        self.up[purpose] += len(request.method) + len(target) + len("  HTTP/1.1\r\n\r\n") + _head(request.headers)
        assert isinstance(request.stream, httpx.SyncByteStream)
        request.stream = _Counted(request.stream, self.up, purpose)
        response = self._transport.handle_request(request)
        self.down[purpose] += len("HTTP/1.1 200 OK\r\n\r\n") + _head(response.headers)
        assert isinstance(response.stream, httpx.SyncByteStream)
        response.stream = _Counted(response.stream, self.down, purpose)
        return response

    def close(self) -> None:
        self._transport.close()


def _head(headers: httpx.Headers) -> int:
    return sum(len(name) + len(value) + 4 for name, value in headers.raw)


def _purpose(path: str) -> Purpose:
    if _outer.get():
        return "outer"
    if "/steps/" in path:
        return "round"
    return "blob" if "/blobs/" in path else "other"
