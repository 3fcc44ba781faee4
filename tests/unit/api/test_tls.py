"""Where a token would be read by others."""

import contextlib
import socket
import threading

import pytest
from pydantic import ValidationError

from api.connection import Connection
from api.errors import UnreachableError
from api.tls import warning_about


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8420", "http://localhost", "http://[::1]:1/prefix", "https://isthmus.example"]
)
def test_nobody_listens(url):
    assert warning_about(url) is None


@pytest.mark.parametrize("url", ["http://isthmus.example", "http://10.0.0.1:8420", "http://localhost.example"])
def test_tokens_in_the_clear(url):
    assert url in (warning_about(url) or "")


def test_the_command_says_so(capsys):
    for url in ("http://isthmus.example", "https://isthmus.example"):
        Connection(coordinator=url, token="t" * 40).client().close()
    assert capsys.readouterr().err.count("in the clear") == 1


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8420", "localhost:8420", "ftp://host", "host", "http://", "http://host:port", "http://h?x=1"]
)
def test_urls_that_cannot_be_of_a_coordinator(url):
    with pytest.raises(ValidationError, match=r"no .*URL.*http://HOST:PORT") as caught:
        Connection(coordinator=url)
    assert repr(url) in str(caught.value)


def test_the_command_says_that_it_waits(capsys):
    client = Connection(coordinator="http://127.0.0.1:1", token="t" * 40).client(patience=0.01)
    with client, pytest.raises(UnreachableError, match="is it running"):
        client.version()
    assert capsys.readouterr().err == "isthmus: no answer from http://127.0.0.1:1 yet, trying for 0.01 s\n"


@pytest.fixture
def plain():
    """The URL of one that speaks no TLS."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.recv(1 << 16)
                        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def test_the_command_does_not_wait_for_tls_where_there_is_none(plain, capsys):
    client = Connection(coordinator=f"https://{plain}", token="t" * 40).client(patience=3600)
    said = rf"https://{plain} is not HTTPS: is its URL http://{plain}\?"
    with client, pytest.raises(UnreachableError, match=said):
        client.version()
    assert capsys.readouterr().err == ""
