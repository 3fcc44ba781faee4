"""The byte counter against a server that reads and writes bare bytes on a real socket."""

import hashlib
import socketserver
import threading
from collections.abc import Iterator

import pytest

from api.client import CoordinatorClient
from site_agent.counting import CountingTransport, counted_as_outer

BLOB = bytes(range(256)) * 5000
BLOB_DIGEST = hashlib.sha256(BLOB).hexdigest()
ANSWERS = {
    "PUT": (b"200 OK", b"the update" * 1000),
    "HEAD": (b"404 Not Found", b""),
    "GET": (b"200 OK", BLOB),
}


class Bare(socketserver.StreamRequestHandler):
    """HTTP/1.1 by hand: what matters is that every byte is counted."""

    def handle(self) -> None:
        while head := self._head():
            up = len(head)
            for line in head.splitlines():
                if line.lower().startswith(b"content-length:"):
                    up += len(self.rfile.read(int(line.split(b":")[1])))
            status, body = ANSWERS[head.split()[0].decode()]
            answer = b"HTTP/1.1 %s\r\nContent-Length: %d\r\nServer: bare\r\n\r\n%s" % (status, len(body), body)
            self.server.seen.append((head.split()[1].decode(), up, len(answer)))  # before the client goes on
            self.wfile.write(answer)

    def _head(self) -> bytes:
        head = b""
        while (line := self.rfile.readline()) and line != b"\r\n":
            head += line
        return head + line


@pytest.fixture
def server() -> Iterator[socketserver.ThreadingTCPServer]:
    socketserver.ThreadingTCPServer.daemon_threads = True
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Bare) as bare:
        bare.seen = []
        thread = threading.Thread(target=bare.serve_forever, args=(0.01,))
        thread.start()
        yield bare
        bare.shutdown()
        thread.join()


def test_counts_are_what_crossed_the_socket(server):
    transport = CountingTransport()
    url = f"http://127.0.0.1:{server.server_address[1]}/behind/a/prefix"
    with CoordinatorClient(url, "a secret of the ranks", transport=transport, patience=1.0) as client:
        for size in (0, 1, 700, 3_000_000):  # the last one goes in several blocks
            assert client.contribute("run", "west", 1, "a", 0, bytes(size), 25.0).message == ANSWERS["PUT"][1]
        client.put_blob(BLOB)
        assert client.get_blob(BLOB_DIGEST) == BLOB
    assert len(server.seen) == 7
    for purpose, part in {"round": "/steps/", "blob": "/blobs/"}.items():
        seen = [(up, down) for path, up, down in server.seen if part in path]
        assert transport.up[purpose] == sum(up for up, _ in seen)
        assert transport.down[purpose] == pytest.approx(sum(down for _, down in seen), rel=0.001)  # reason phrases
    assert set(transport.up) == {"round", "blob"}


def test_what_an_outer_round_takes_is_counted_apart(server):
    transport = CountingTransport()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    with CoordinatorClient(url, "a secret of the ranks", transport=transport, patience=1.0) as client:
        with counted_as_outer():
            assert client.get_blob(BLOB_DIGEST) == BLOB
            overlapping = threading.Thread(target=client.contribute, args=("run", "west", 1, "a", 0, bytes(700), 25.0))
            overlapping.start()
            overlapping.join()
        assert client.get_blob(BLOB_DIGEST) == BLOB
    assert set(transport.up) == {"outer", "round", "blob"}
    assert transport.down["outer"] == transport.down["blob"] > len(BLOB)


def test_a_request_that_fails_counts_what_was_tried(server):
    server.shutdown()
    server.server_close()
    transport = CountingTransport()
    client = CoordinatorClient(f"http://127.0.0.1:{server.server_address[1]}", transport=transport, patience=0.1)
    with client, pytest.raises(Exception, match="no answer from the coordinator"):
        client.version()
    assert transport.up["other"] < 1000
    assert transport.down.total() == 0
