"""Connections to a real uvicorn that do not get on, each given a fraction of a second instead of a minute."""

import asyncio
import socket

import pytest
import uvicorn

from coordinator import connections

HEAD = b"POST / HTTP/1.1\r\nHost: x\r\n"


async def refuse(scope, receive, send):
    """An app that answers without reading the body."""
    await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"no"})


async def read_slowly(scope, receive, send):
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


def served(app, monkeypatch, talk):
    """What `talk` returns with a server at an address."""
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 0.4)

    async def serve():
        listener = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(app, http=connections.BoundedConnection, lifespan="off", log_config=None)
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            async with asyncio.timeout(5):
                return await talk(listener.getsockname())
        finally:
            server.should_exit = True
            await serving

    return asyncio.run(serve())


def received(app, monkeypatch, *sent, pause_s=0.1):
    """What comes back until the server closes the connection, while the parts are sent one by one."""

    async def talk(address):
        reader, writer = await asyncio.open_connection(*address)

        async def trickle():
            for part in sent:
                writer.write(part)
                await asyncio.sleep(pause_s)

        sending = asyncio.create_task(trickle())
        answer = b""
        try:
            while block := await reader.read(65536):
                answer += block
        except ConnectionError:
            pass
        finally:
            sending.cancel()
            writer.close()
        return answer

    return served(app, monkeypatch, talk)


def test_a_connection_that_says_nothing(monkeypatch):
    assert received(refuse, monkeypatch) == b""


def test_a_head_that_trickles(monkeypatch):
    assert received(refuse, monkeypatch, *(bytes([byte]) for byte in HEAD)) == b""


def test_the_rest_of_a_body_that_has_had_its_answer(monkeypatch):
    """Each byte ends uvicorn's own timer for connections that are kept."""
    answer = received(refuse, monkeypatch, HEAD + b"Content-Length: 1000\r\n\r\n", *[b"x"] * 100)
    assert answer.startswith(b"HTTP/1.1 401")


@pytest.mark.parametrize("requests", [1, 3])
def test_requests_that_are_being_read_have_the_time_they_need(monkeypatch, requests):
    body = [b"x"] * 8  # takes twice the time-out
    answer = received(read_slowly, monkeypatch, *[HEAD + b"Content-Length: 8\r\n\r\n", *body] * requests)
    assert answer.count(b"HTTP/1.1 200") == requests


def test_a_head_that_goes_on_and_on(monkeypatch):
    lines = [HEAD, *[b"x-%d: %s\r\n" % (number, b"y" * 8000) for number in range(20)]]
    answer = received(refuse, monkeypatch, *lines, pause_s=0.01)
    assert answer.startswith(b"HTTP/1.1 431")


@pytest.mark.parametrize("path", [b"x" * 62_000, b"x" * 1_000_000])
def test_whoever_asks_for_too_long_a_path_has_the_answer_while_it_still_sends(monkeypatch, path):
    """As a blocking client does, which reads when it has sent everything."""

    async def ask(address):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET /" + path)
        answer = await reader.readuntil(b"bytes.")
        for _ in range(5):  # to a connection that was closed with bytes in it: the second one finds it reset
            writer.write(b"x" * 1000)
            await writer.drain()
        writer.write_eof()
        answer += await reader.read()
        writer.close()
        return answer

    answer = served(refuse, monkeypatch, ask)
    assert answer.startswith(b"HTTP/1.1 414 URI Too Long")
    assert answer.endswith(b"\r\n\r\nThe URL of a request takes at most 61440 bytes.")


async def write_for_ever(writer, data, pause_s=0.0):
    while True:
        writer.write(data)
        await writer.drain()
        await asyncio.sleep(pause_s)


def test_what_comes_after_a_refusal_is_let_go_up_to_a_bound(monkeypatch):
    async def ask(address):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"rubbish\r\n\r\n")
        await reader.readuntil(b"received.")
        with pytest.raises(ConnectionError):
            await write_for_ever(writer, b"x" * 65536)

    served(refuse, monkeypatch, ask)


def test_whoever_is_not_done_some_time_after_a_refusal_is_cut_off(monkeypatch):
    monkeypatch.setattr(connections, "LINGER_S", 0.2)

    async def ask(address):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"rubbish\r\n\r\n")
        await reader.read()
        with pytest.raises(ConnectionError):
            await write_for_ever(writer, b"x", pause_s=0.05)

    served(refuse, monkeypatch, ask)


def test_a_long_body_is_no_head(monkeypatch):
    """Also where the head of the next request begins in what brings the end of a body."""
    body = b"x" * 200_000
    first, second = HEAD + b"Content-Length: 200000\r\n\r\n" + body + HEAD, b"Content-Length: 0\r\n\r\n"
    answer = received(read_slowly, monkeypatch, first, second)
    assert answer.count(b"HTTP/1.1 200") == 2


def test_many_requests_before_the_first_is_answered(monkeypatch):
    """A few wait for their turn; what takes more memory than that is refused."""
    request = HEAD + b"Content-Length: 0\r\n\r\n"
    assert received(read_slowly, monkeypatch, request * 10).count(b"HTTP/1.1 200") == 10
    answer = received(read_slowly, monkeypatch, request * 1000)
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"HTTP/1.1 200" not in answer
