"""Sites without torch: they say over HTTP what agents and ranks would say."""

import hashlib
import secrets
from dataclasses import dataclass, field
from functools import lru_cache

import httpx
import numpy as np

from algorithms.codec import pack_contribution
from algorithms.layout import ParameterLayout, TensorSpec, kept
from algorithms.parts import PART_BYTES
from algorithms.updates import Coefficients, SparseUpdate
from api.client import CoordinatorClient
from api.message import PROTOCOL_VERSION
from api.payload import decode_message, encode_message
from api.schemas import (
    Announcement,
    CaughtUp,
    FinalReport,
    Heartbeat,
    JoinRequest,
    Position,
    ProcessReport,
    ProcessState,
    Run,
    Seat,
    SiteRegistration,
    StartUpload,
)
from api.specs import BeginSpec, GuardsSpec, OptimizerSpec, OuterSpec, RoundsSpec, RunSpec

LAYOUT = ParameterLayout(
    [TensorSpec("bias", (5,), 1), TensorSpec("embedding", (9, 12), 0), TensorSpec("head", (40, 3), 0)], chunk=32
)
OPTIMIZER = OptimizerSpec(chunk=32, k=64)
TASK = "by-hand"
PATIENT = RoundsSpec(deadline_s=3600)
WAIT_S = 25.0


def new_name(prefix="site"):
    return f"{prefix}-{secrets.token_hex(4)}"


def registration(secret=None, *, region="west", protocol=PROTOCOL_VERSION, tasks=(TASK,), version=""):
    return SiteRegistration(
        protocol_version=protocol,
        secret=secret or secrets.token_urlsafe(32),
        region=region,
        tasks=list(tasks),
        versions=dict.fromkeys(tasks, version),
    )


def coefficients(seed, scale=0.5, layout=LAYOUT, k=OPTIMIZER.k):
    """A contribution with values in every chunk; `scale` is a power of two, so that bfloat16 holds it."""
    random = np.random.default_rng(seed)
    shapes = {}
    for shape in layout.shapes:
        numbers, elements = layout.select(shape), shape[0] * shape[1]
        count = kept(k, elements, layout.chunk)
        indices = [np.sort(random.choice(elements, count, replace=False)) for _ in numbers]
        shapes[shape] = Coefficients(
            chunks=numbers,
            indices=np.array(indices, np.uint16),
            values=random.choice(np.array([-1, 1], np.int8), (numbers.size, count)),
            scales=np.full(numbers.size, scale, np.float32),
        )
    return SparseUpdate(shapes, frozenset())


def problem(response, status, code):
    """Checks an error answer in every respect but its words, and returns it."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    body = response.json()
    assert (body["status"], body["code"], body["type"]) == (status, code, f"urn:isthmus:problem:{code}")
    assert len(body["detail"]) > 10
    assert isinstance(body["errors"], list)
    assert isinstance(body["context"], dict)
    return body


@lru_cache(maxsize=64)
def _client(url, token):
    """Making one takes far longer than a request does."""
    return CoordinatorClient(url, token)


@lru_cache(maxsize=1)
def _http():
    return httpx.Client()


@dataclass
class SiteByHand:
    """Rank 0 of a site, and its agent."""

    name: str
    region: str
    url: str
    secret: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    seat: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    run: str = ""
    attempt: int = 1

    def register(self, join_token):
        with CoordinatorClient(self.url, join_token) as client:
            return client.register_site(self.name, registration(self.secret, region=self.region))

    @property
    def agent(self):
        return _client(self.url, self.secret)

    @property
    def ranks(self):
        return _client(self.url, self.seat)

    def take_seat(self, run):
        self.run = run
        self.agent.take_seat(run, self.name, Seat(attempt=self.attempt, secret=self.seat))

    def join(self, layout=LAYOUT, buffer_bytes=0):
        request = JoinRequest(attempt=self.attempt, layout=layout.to_json(), buffer_bytes=buffer_bytes)
        return self.ranks.join(self.run, self.name, request)

    def start_again(self, layout=LAYOUT):
        """Ranks of the attempt that the coordinator asks for, as an agent starts them; they have joined, no more."""
        (assignment,) = self.beat().assignments
        self.attempt, self.seat = assignment.attempt, secrets.token_urlsafe(32)
        self.take_seat(assignment.run)
        return self.join(layout)

    def beat(self, *processes, wait=0.0):
        return self.agent.heartbeat(self.name, Heartbeat(processes=list(processes)), wait)

    def running(self):
        """What the agent reports of ranks that run."""
        return ProcessReport(run=self.run, attempt=self.attempt, state=ProcessState.RUNNING)

    def failed(self, code=1, **how):
        """What the agent reports of ranks that have failed."""
        return ProcessReport(run=self.run, attempt=self.attempt, state=ProcessState.EXITED, exit_code=code, **how)

    def caught_up(self, position=None):
        report = CaughtUp(attempt=self.attempt, position=position or self.position())
        return self.ranks.caught_up(self.run, self.name, report)

    def upload_start(self, parameters):
        self.ranks.upload_start(self.run, self.name, StartUpload(parameters=self.ranks.put_blob(parameters)))

    def position(self):
        head = self.ranks.log(self.run, self.region, 0).head
        return Position(seq=0, hash="0" * 64) if head is None else head

    def header(self, step):
        return {
            "version": PROTOCOL_VERSION,
            "run": self.run,
            "region": self.region,
            "site": self.name,
            "step": step,
            "layout": LAYOUT.digest,
            "codec": OPTIMIZER.codec,
            "indices": OPTIMIZER.indices,
            "k": OPTIMIZER.k,
            "tokens": 10,
            "part": 0,
            "parts": 1,
            "absent": [],
        }

    def message(self, step, changes=(), *, seed=0, arrays=None, position=None):
        header = self.header(step) | dict(changes)
        header.setdefault("position", (position or self.position()).model_dump())
        if arrays is None:
            arrays = pack_contribution(coefficients([seed, step, *self.name.encode()]), LAYOUT, "sign")
        return encode_message("contribution", header, arrays)

    def path(self, step, part=0):
        return f"/v1/runs/{self.run}/regions/{self.region}/steps/{step}/contributions/{self.name}/parts/{part}"

    def send(self, step, body, *, wait=0.0, part=0):
        """The raw answer to a contribution."""
        headers = {"Authorization": f"Bearer {self.seat}", "Content-Type": "application/vnd.isthmus+safetensors"}
        return _http().put(f"{self.url}{self.path(step, part)}?wait={wait}", content=body, headers=headers, timeout=60)

    def put_blob(self, data):
        """The raw answer to an upload."""
        headers = {"Authorization": f"Bearer {self.seat}"}
        return _http().put(f"{self.url}/v1/blobs/{hashlib.sha256(data).hexdigest()}", content=data, headers=headers)

    def contribute(self, step, *, wait=0.0, seed=0):
        """The entry's message, or None while the round is open."""
        body = self.message(step, seed=seed)
        return self.ranks.contribute(self.run, self.region, step, self.name, 0, body, wait).message

    def announce(self, number, fragment, copy, wait=WAIT_S, tokens=0):
        """As sites do: announces, uploads if asked to, announces again."""
        announcement = Announcement(digest=hashlib.sha256(copy).hexdigest(), tokens=tokens)
        place = (self.run, number, fragment, self.name, announcement, wait)
        reply = self.ranks.announce(*place)
        if reply.upload:
            self.ranks.put_blob(copy)
            assert not self.ranks.announce(*place).upload
        return reply.upload

    def report_final(self, digest):
        return self.ranks.report_final(self.run, self.name, FinalReport(seq=self.position().seq, digest=digest))


class RunByHand:
    """A run that has begun: every site has joined, entry 0 is there.

    Args:
        live: a coordinator that does not lose sites without heartbeats.
        regions: one per site.
        rounds: of the spec; by default, nobody is given up in the time that a test takes.
        start: or else the run is not started, and nobody has a seat.
        prefix: of the sites' names, on which what they send depends; by default one that is new.
        origin: what entry 0 is made of, instead of what the first site uploads.
        also: other fields of the spec.
    """

    def __init__(
        self,
        live,
        regions=("west", "west"),
        *,
        steps=3,
        outer: OuterSpec | None = None,
        exchange="demo",
        rounds: RoundsSpec = PATIENT,
        guards=GuardsSpec(),  # noqa: B008  # frozen
        part_bytes=PART_BYTES,
        start=True,
        begin=True,
        prefix: str | None = None,
        origin: BeginSpec | None = None,
        **also,
    ):
        self.url, self.admin = live.url, live.client()
        prefix = prefix or new_name("s")
        self.sites = [SiteByHand(f"{prefix}-{index}", region, live.url) for index, region in enumerate(regions)]
        for site in self.sites:
            site.register(live.token("join"))
        names = [site.name for site in self.sites]
        self.spec = RunSpec(
            name="by-hand",
            task=TASK,
            steps=steps,
            sites=names,
            optimizer=OPTIMIZER,
            outer=outer,
            exchange=exchange,
            rounds=rounds,
            guards=guards,
            part_bytes=part_bytes,
            begin=origin,
            **also,
        )
        self.id = self.admin.create_run(self.spec).id
        self.parameters = np.random.default_rng(7).standard_normal(LAYOUT.parameter_count).astype("<f4")
        if start:
            self.start()
        if start and begin:
            self.begin()

    def start(self):
        self.admin.start_run(self.id)
        for site in self.sites:
            site.take_seat(self.id)

    def begin(self):
        replies = [site.join() for site in self.sites]
        uploads = [reply.upload_start for reply in replies]
        if self.spec.begin is not None:
            assert not any(uploads)
            return
        assert uploads == [True] + [False] * (len(replies) - 1)
        self.sites[0].upload_start(self.parameters.tobytes())

    def move(self, live):
        """The coordinator has come back under another URL."""
        self.url, self.admin = live.url, live.client()
        for site in self.sites:
            site.url = live.url

    @property
    def view(self) -> Run:
        return self.admin.run(self.id)

    def member(self, site):
        return next(member for member in self.view.members if member.site == site.name)

    def round(self, step, region):
        """Everybody in a region contributes; the entry's header and arrays, the same for all."""
        sites = [site for site in self.sites if site.region == region]
        for site in sites:
            site.contribute(step)
        messages = {site.ranks.update(self.id, region, step, 0, WAIT_S) for site in sites}
        (message,) = messages
        return decode_message("entry", message)
