"""A site of the bench, a process of its own: it sends valid contributions and trains nothing.

Rounds, all-gathers and bare sockets move the same bytes in turn, each after a barrier of all sites, so that everybody
begins at once. Messages are made before the clock starts, and entries are read after it has stopped.
"""

import contextlib
import hashlib
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import httpx
import torch
import torch.distributed as dist

from algorithms.codec import pack_contribution
from algorithms.parts import cut
from algorithms.updates import restrict
from api.client import CoordinatorClient
from api.message import PROTOCOL_VERSION
from api.payload import decode_message, digest_json, encode_message
from api.schemas import ContributionHeader, JoinRequest, Position, Seat, SiteRegistration, StartUpload
from api.transport import transport_to
from site_agent.bench.ours import made_up
from site_agent.bench.rounds.cases import OPTIMIZER, layout_of
from site_agent.bench.rounds.relay import exchange

__all__ = ["REGION", "TASK", "Measured", "Place", "Way", "name_of", "registration", "secret_of", "work"]

REGION = TASK = "bench"
_WAIT_S = 25.0
Way = str
"""`round`, `gloo` or `sockets`."""
Span = tuple[float, float]


@dataclass(frozen=True)
class Place:
    """Where a site works, and on what."""

    number: int
    sites: int
    payload: int
    url: str
    run: str
    parameters: str
    relay_port: int
    rendezvous: Path


@dataclass
class Measured:
    """Of one site: when each way began and ended, by the clock of the machine, and the coordinator's own times."""

    spans: dict[Way, list[Span]] = field(default_factory=dict)
    timings: list[dict[str, float]] = field(default_factory=list)
    sent: int = 0
    answered: int = 0


def name_of(number: int) -> str:
    return f"bench-{number:02}"


def secret_of(kind: str, run: str, number: int) -> str:
    """A secret that parent and site both know; the coordinator lives no longer than the bench."""
    return hashlib.sha256(f"{kind} {run} {number}".encode()).hexdigest()


def registration(secret: str) -> SiteRegistration:
    return SiteRegistration(protocol_version=PROTOCOL_VERSION, secret=secret, region=REGION, tasks=[TASK])


class _Noting(httpx.BaseTransport):
    """The network, and what the last answer's Server-Timing said."""

    def __init__(self, url: str) -> None:
        self._transport = transport_to(url)
        self.timing = ""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = self._transport.handle_request(request)
        self.timing = response.headers.get("server-timing", "")
        return response

    def close(self) -> None:
        self._transport.close()


class _Site:
    """Rank 0 of one site in one run, joined to the process group and to the relay."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._name = name_of(place.number)
        layout = layout_of(place.payload)
        contribution = made_up(layout, OPTIMIZER.k, place.number, OPTIMIZER.codec)
        self._parts = [
            pack_contribution(restrict(contribution, chunks), layout, OPTIMIZER.codec, OPTIMIZER.indices)
            for chunks in cut(layout, OPTIMIZER.k, OPTIMIZER.codec, OPTIMIZER.indices)
        ]
        self._layout = layout
        self._transport = _Noting(place.url)
        self._client = CoordinatorClient(
            place.url, secret_of("ranks", place.run, place.number), transport=self._transport
        )
        self._open = contextlib.ExitStack()
        self._open.enter_context(self._client)
        self._connection = self._open.enter_context(socket.create_connection(("127.0.0.1", place.relay_port)))
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        dist.init_process_group(
            "gloo", init_method=f"file://{place.rendezvous}", rank=place.number, world_size=place.sites
        )
        self._open.callback(dist.destroy_process_group)
        self._answered = 0

    def join(self) -> None:
        place = self._place
        with CoordinatorClient(place.url, secret_of("agent", place.run, place.number)) as agent:
            agent.take_seat(place.run, self._name, Seat(attempt=1, secret=secret_of("ranks", place.run, place.number)))
        reply = self._client.join(place.run, self._name, JoinRequest(attempt=1, layout=self._layout.to_json()))
        dist.barrier()
        if reply.upload_start:
            self._client.upload_start(place.run, self._name, StartUpload(parameters=place.parameters))
        head = self._client.log(place.run, REGION, 0, wait=_WAIT_S).head
        assert head is not None
        self._step, self._position = 0, head

    def close(self) -> None:
        self._open.close()

    def measure(self, ways: list[Way], rounds: int) -> Measured:
        """Raises IsthmusError if a round goes wrong."""
        found = Measured()
        actions: dict[Way, Callable[[], list[bytes] | None]] = {
            "round": self._round,
            "gloo": self._gather,
            "sockets": self._exchange,
        }
        for _ in range(rounds):
            self._prepare()
            for way in ways:
                dist.barrier()
                started = time.monotonic()
                messages = actions[way]()
                found.spans.setdefault(way, []).append((started, time.monotonic()))
                if messages is not None:
                    self._take(messages)
                    found.timings.append(_parsed(self._timing))
            found.sent, found.answered = len(self._body), self._answered
        return found

    # --- the three ways -----------------------------------------------------------------------------------------------

    def _messages(self) -> list[bytes]:
        """One for each part of the contribution."""
        place = self._place
        header = ContributionHeader(
            version=PROTOCOL_VERSION,
            run=place.run,
            region=REGION,
            site=self._name,
            step=self._step + 1,
            position=self._position,
            layout=self._layout.digest,
            codec=OPTIMIZER.codec,
            indices=OPTIMIZER.indices,
            k=OPTIMIZER.k,
            tokens=1,
            part=0,
            parts=len(self._parts),
            absent=[],
        ).model_dump(mode="json")
        return [
            encode_message("contribution", header | {"part": part}, arrays) for part, arrays in enumerate(self._parts)
        ]

    def _prepare(self) -> None:
        """Messages, and the all-gather's tensors, are there before the clock starts."""
        self._bodies = self._messages()
        self._body = bytearray().join(self._bodies)
        self._mine = torch.frombuffer(self._body, dtype=torch.uint8)
        self._everybody = [torch.empty_like(self._mine) for _ in range(self._place.sites)]

    def _round(self) -> list[bytes]:
        place, last = (self._place.run, REGION, self._step + 1), len(self._bodies) - 1
        for part, body in enumerate(self._bodies):
            answer = self._client.contribute(*place, self._name, part, body, _WAIT_S if part == last else 0.0)
        messages = [answer.message or self._update(place, 0)]
        self._timing = self._transport.timing
        return messages + [self._update(place, part) for part in range(1, len(self._bodies))]

    def _update(self, place: tuple[str, str, int], part: int) -> bytes:
        while (message := self._client.update(*place, part, _WAIT_S)) is None:
            pass
        return message

    def _gather(self) -> None:
        dist.all_gather(self._everybody, self._mine)

    def _exchange(self) -> None:
        exchange(self._connection, self._body, self._answered)

    def _take(self, messages: list[bytes]) -> None:
        """Goes on from an entry, which lists everybody."""
        header, _ = decode_message("entry", messages[0])
        assert header["step"] == self._step + 1
        assert len(header["contributors"]) == self._place.sites
        self._step, self._position = header["step"], Position(seq=header["seq"], hash=digest_json(header))
        self._answered = sum(map(len, messages))


def _parsed(timing: str) -> dict[str, float]:
    """`validate;dur=1.5, commit;dur=2` as milliseconds by name."""
    entries = (entry.strip().partition(";dur=") for entry in timing.split(",") if entry)
    return {name: float(duration) for name, _, duration in entries}


# --- the process ------------------------------------------------------------------------------------------------------


def work(pipe: Connection) -> None:
    """Does what comes through the pipe until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is told, and closes the pipe
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    site: _Site | None = None
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            command, argument = pipe.recv()
            if command == "join":
                if site is not None:
                    site.close()
                site = _Site(argument)
                site.join()
                pipe.send(None)
            else:
                assert site is not None
                pipe.send(site.measure(*argument))
