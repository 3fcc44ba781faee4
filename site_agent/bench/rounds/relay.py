"""Bare sockets in the coordinator's place: takes everybody's bytes, then answers everybody. No protocol, no disk."""

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator

__all__ = ["exchange", "relay"]

_SIZES = struct.Struct("<QQ")
"""What comes, and what is answered."""


@contextlib.contextmanager
def relay(sites: int) -> Iterator[int]:
    """The port on loopback at which `sites` connections are served, a thread each, until they are closed."""
    together = threading.Barrier(sites)
    with socket.create_server(("127.0.0.1", 0), backlog=sites) as listener:
        for _ in range(sites):
            threading.Thread(target=_serve, args=(listener, together), daemon=True).start()
        yield listener.getsockname()[1]


def _serve(listener: socket.socket, together: threading.Barrier) -> None:
    with contextlib.suppress(OSError, threading.BrokenBarrierError), listener.accept()[0] as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while head := _received(connection, _SIZES.size):
            coming, answered = _SIZES.unpack(head)
            _received(connection, coming)
            together.wait()
            connection.sendall(bytes(answered))


def exchange(connection: socket.socket, body: bytes | bytearray, answered: int) -> None:
    """Sends `body`, and takes an answer of so many bytes."""
    connection.sendall(_SIZES.pack(len(body), answered))
    connection.sendall(body)
    _received(connection, answered)


def _received(connection: socket.socket, size: int) -> bytearray:
    """Exactly so many bytes; none if the other side has closed."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view)
        if not count:
            return bytearray()
        view = view[count:]
    return data
