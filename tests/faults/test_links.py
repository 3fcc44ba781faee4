"""The proxies of chaos between a real HTTP client and a real HTTP server: what arrives, and what comes back."""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from site_agent.chaos.links import Links
from site_agent.chaos.schedule import Fault, Kind
from tests.conftest import wait_until

BODY = bytes(range(256))
ANSWER = b"the answer"


def flipped_bits(one: bytes, other: bytes) -> int:
    assert len(one) == len(other)
    return sum((left ^ right).bit_count() for left, right in zip(one, other, strict=True))


@dataclass
class Server:
    """Keeps what arrives; answers all of it."""

    port: int = 0
    arrived: list[tuple[str, bytes]] = field(default_factory=list)


@pytest.fixture
def server() -> Iterator[Server]:
    seen = Server()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_PUT(self) -> None:
            length = int(self.headers["Content-Length"])
            body = self.rfile.read(length)
            if len(body) < length:
                return
            seen.arrived.append((self.path, body))
            self.send_response(200)
            self.send_header("Content-Length", str(len(ANSWER)))
            self.end_headers()
            self.wfile.write(ANSWER)

        def log_message(self, *_: object) -> None:
            """Not on stderr."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        seen.port = http.server_address[1]
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield seen
        http.shutdown()
        thread.join()


@pytest.fixture
def links(server: Server) -> Iterator[Links]:
    with Links(["a", "b"], server.port) as links:
        yield links


@pytest.fixture
def put(links: Links) -> Iterator[object]:
    """The body of the answer to a PUT through a's link; None if the connection broke."""
    with httpx.Client(base_url=f"http://127.0.0.1:{links.ports['a']}", timeout=20) as client:

        def put(path: str = "/steps/1", body: bytes = BODY) -> bytes | None:
            try:
                return client.put(path, content=body).content
            except httpx.TransportError:
                return None

        yield put


def fault(kind: Kind, *, place: float = 0.5, seconds: float = 1.0, in_round: bool = False) -> Fault:
    return Fault(number=7, kind=kind, step=1, site="a", seconds=seconds, place=place, in_round=in_round)


def test_nothing_happens_by_itself_or_to_others(links, put, server):
    links.arm(Fault(number=1, kind=Kind.LOSE, step=1, site="b", seconds=1, place=0.5, in_round=False))
    assert [put(), put("/other")] == [ANSWER] * 2
    assert server.arrived == [("/steps/1", BODY), ("/other", BODY)]
    assert links.struck == set()


def test_a_lost_answer(links, put, server):
    links.arm(fault(Kind.LOSE))
    assert [put(), put()] == [None, ANSWER]
    assert len(server.arrived) == 2
    assert links.struck == {7}


def test_a_duplicate(links, put, server):
    links.arm(fault(Kind.DUPLICATE))
    assert put() == ANSWER
    assert server.arrived == [("/steps/1", BODY)] * 2


def test_a_request_that_is_overtaken(links, put, server):
    links.arm(fault(Kind.REORDER))
    assert put("/first") is None
    assert server.arrived == []
    assert put("/second") == ANSWER
    wait_until(lambda: len(server.arrived) == 2, "the first request", 20)
    assert [path for path, _ in server.arrived] == ["/second", "/first"]


@pytest.mark.parametrize("place", [0.0, 0.5, 0.999999])
def test_half_a_request(links, put, server, place):
    links.arm(fault(Kind.TRUNCATE_REQUEST, place=place))
    assert [put("/half"), put()] == [None, ANSWER]
    assert server.arrived == [("/steps/1", BODY)]


@pytest.mark.parametrize("place", [0.0, 0.5, 0.999999])
def test_half_an_answer(links, put, server, place):
    links.arm(fault(Kind.TRUNCATE_ANSWER, place=place))
    assert [put(), put()] == [None, ANSWER]
    assert len(server.arrived) == 2


@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
def test_one_bit_of_a_request(links, put, server, place):
    links.arm(fault(Kind.CORRUPT_REQUEST, place=place))
    assert [put(), put()] == [ANSWER] * 2
    assert [flipped_bits(body, BODY) for _, body in server.arrived] == [1, 0]


@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
def test_one_bit_of_an_answer(links, put, server, place):
    links.arm(fault(Kind.CORRUPT_ANSWER, place=place))
    assert [flipped_bits(put(), ANSWER), flipped_bits(put(), ANSWER)] == [1, 0]
    assert server.arrived == [("/steps/1", BODY)] * 2


def test_a_fault_of_a_round_waits_for_one_until_told_otherwise(links, put):
    links.arm(fault(Kind.LOSE, in_round=True))
    assert [put("/other"), put("/steps/1")] == [ANSWER, None]
    links.arm(fault(Kind.LOSE, in_round=True))
    links.relax()
    assert put("/other") is None


def test_a_cut_ends(links, put, server):
    assert put() == ANSWER
    links.arm(fault(Kind.CUT, seconds=1.0))
    assert put() is None
    assert len(server.arrived) == 1
    wait_until(put, "the end of the cut", 20)


def test_a_slow_link(links, put):
    links.arm(fault(Kind.SLOW, seconds=30.0, place=0.4))
    started = time.monotonic()
    assert put() == ANSWER
    assert time.monotonic() - started >= 0.5
