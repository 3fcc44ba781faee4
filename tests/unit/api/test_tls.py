"""Where a token would be read by others."""

import pytest
from pydantic import ValidationError

from api.connection import Connection
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
