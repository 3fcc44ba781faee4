"""The way to the coordinator, through a proxy if the environment names one: both note how they were asked."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from api.client import CoordinatorClient, UnreachableError

VERSION = {"version": "0.1.0", "protocols": [1]}


@pytest.fixture
def environment(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    return monkeypatch


@contextlib.contextmanager
def answering(host="127.0.0.1"):
    """Its HOST:PORT, and the targets that it was asked for: whole URLs if it is asked as a proxy."""
    targets = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            targets.append(self.path)
            body = json.dumps(VERSION).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_CONNECT(self):
            targets.append(f"CONNECT {self.path}")
            self.send_error(502)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer((host, 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"{host}:{server.server_port}", targets
        server.shutdown()


@pytest.mark.parametrize(("name", "scheme"), [("HTTP_PROXY", "http://"), ("http_proxy", ""), ("ALL_PROXY", "http://")])
def test_the_environment_names_a_proxy(environment, name, scheme):
    url = "http://coordinator.example:8420/prefix"
    with answering() as (proxy, targets):
        environment.setenv(name, scheme + proxy)
        with CoordinatorClient(url) as client:
            assert client.version().protocols == [1]
    assert targets == [f"{url}/version"]


def test_https_goes_through_a_tunnel(environment):
    with answering() as (proxy, targets):
        environment.setenv("HTTPS_PROXY", f"http://{proxy}")
        with (
            CoordinatorClient("https://coordinator.example", patience=0.1) as client,
            pytest.raises(UnreachableError, match="502"),
        ):
            client.version()
    assert targets[0] == "CONNECT coordinator.example:443"


@pytest.mark.parametrize("spared", ["elsewhere.example,{}", "127.0.0.2", "*"])
def test_hosts_that_are_spared(environment, spared):
    with answering("127.0.0.2") as (there, targets):
        environment.setenv("HTTP_PROXY", "http://127.0.0.1:9")
        environment.setenv("NO_PROXY", spared.format(there))
        with CoordinatorClient(f"http://{there}") as client:
            client.version()
    assert targets == ["/version"]


def test_no_proxy_for_this_machine(environment):
    with answering() as (there, targets):
        environment.setenv("HTTP_PROXY", "http://127.0.0.1:9")
        with CoordinatorClient(f"http://{there}") as client:
            client.version()
    assert targets == ["/version"]
