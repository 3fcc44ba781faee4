"""The coordinator's listener."""

import asyncio
import contextlib
import socket

import pytest

from api.errors import IsthmusError
from coordinator.__main__ import _listen


def test_answers_are_not_held_back():
    """An answer is two writes: with Nagle's algorithm each waits 40 ms for the acknowledgement of the one before."""

    async def option(listener):
        seen = asyncio.get_running_loop().create_future()

        async def serve(_, writer):
            seen.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        async with await asyncio.start_server(serve, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            writer.close()
            return await seen

    with contextlib.closing(_listen("127.0.0.1", 0)) as listener:
        assert asyncio.run(option(listener)) == 1


def test_a_port_that_is_taken():
    with contextlib.closing(_listen("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(IsthmusError, match=f"cannot listen on 127.0.0.1 port {port}: .*--port"):
            _listen("127.0.0.1", port)
