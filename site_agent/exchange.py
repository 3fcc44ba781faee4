"""One inner step: gather inside the site, one round trip to the coordinator, share inside the site."""

import hashlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from threading import Thread

import structlog

from algorithms import DeMo
from algorithms.codec import pack_contribution
from algorithms.step_entry import StepEntry
from algorithms.updates import SparseUpdate, restrict
from api.client import CoordinatorClient
from api.errors import ConflictError, GoneError, InvalidError
from api.message import PROTOCOL_VERSION
from api.payload import contribution_digest, encode_message
from api.schemas import Abstention, ContributionHeader
from api.service import Answer
from api.specs import RunSpec
from site_agent.journal import Journal
from site_agent.local_ranks import LocalRanks
from site_agent.replica import Replica
from site_agent.saved_momentum import OnItsWay
from site_agent.settings import Session
from site_agent.shards import absent_names, pack_shard, read_shards
from site_agent.stop import Stop

__all__ = ["Exchange"]

WAIT_S = 25.0
"""Of one poll."""

log = structlog.get_logger()

_ABSTAINS = b""
_ENDED = b""
_BEHIND = b"behind"
_INSTEAD = {
    "run_ended": _ENDED,
    "closed_without_you": _BEHIND,
    "settings_changed": _BEHIND,
    "log_trimmed": _BEHIND,
}
"""Of an entry, by the code of the refusal."""


class Exchange:
    """The `exchange` of a site's DeMo, the same at every rank; only rank 0 has a client.

    With `rounds.overlap` the round trip goes on while the next gradients are computed (rule A9). The step changes
    nothing, and `ended` is set, once the run has ended at the coordinator; so it does, and `behind` is set, if the
    round was closed without this site, or has other settings than it knows: what it would have sent stays in its
    momentum. So it does if the entry does not list what these ranks have sent: earlier ones may have answered the
    round.
    """

    def __init__(
        self, spec: RunSpec, session: Session, ranks: LocalRanks, client: CoordinatorClient | None, stop: Stop
    ) -> None:
        self.ended = False
        self.behind = False
        self.tokens = 0
        """Of this rank since the last step."""
        self.on_its_way: OnItsWay | None = None
        """What these ranks have sent to the step whose entry they have not seen."""
        self.evaluates = False
        """Whether this site runs the held-out evaluation, by the coordinator's last answer; at rank 0."""
        self.snapshot: int | None = None
        """The number of the snapshot for which the site was asked by the answer to the last step; at rank 0."""
        self.wait_s = 0.0
        """Spent waiting for the coordinator, so far."""
        self._spec = spec
        self._session = session
        self._ranks = ranks
        self._client = client
        self._stop = stop
        self._journal = Journal(session.folder)

    def attach(self, replica: Replica) -> None:
        self._replica = replica

    def __call__(self, optimizer: DeMo, contribution: SparseUpdate | None) -> StepEntry | Callable[[], StepEntry]:
        """The entry of the next step, or what waits for it, after contributing, or abstaining with None."""
        if self.ended or self._replica.step >= self._spec.steps:
            self.behind = False
            return _nothing(optimizer)
        shards = self._ranks.gather(
            _ABSTAINS if contribution is None else pack_shard(optimizer, contribution, tokens=self.tokens)
        )
        bodies = self._messages(optimizer, shards) if shards and _ABSTAINS not in shards else []
        sent = self._ranks.share(_digest(bodies).encode() if self._client is not None else None).decode()
        if sent and contribution is not None:
            self.on_its_way = OnItsWay(self._replica.step + 1, sent, contribution)
        self.tokens = 0
        round_trip = partial(self._round_trip, bodies) if self._client is not None else None
        if not self._spec.rounds.overlap:
            return self._entry(optimizer, sent, round_trip)
        return partial(self._entry, optimizer, sent, _in_background(round_trip) if round_trip else None)

    def _entry(self, optimizer: DeMo, sent: str, round_trip: Callable[[], bytes] | None) -> StepEntry:
        """Rank 0 makes the round trip, or waits for its end, and shares what comes of it."""
        started = time.monotonic()
        with self._stop.let():
            message = self._ranks.share(round_trip() if round_trip else None)
        self.wait_s += time.monotonic() - started
        self.on_its_way = None
        self.ended, self.behind = message == _ENDED, message == _BEHIND
        if self.ended or self.behind:
            return _nothing(optimizer)
        return self._replica.read_step(message, sent)

    # --- contributions ------------------------------------------------------------------------------------------------

    def _messages(self, optimizer: DeMo, shards: Sequence[bytes]) -> list[bytes]:
        """The parts of the site's contribution (A5)."""
        contribution, headers = read_shards(optimizer, shards)
        session, settings = self._session, optimizer.settings
        assert self._replica.position is not None
        parts = self._replica.parts(settings.k, settings.codec)
        header = ContributionHeader(
            version=PROTOCOL_VERSION,
            run=session.run,
            region=session.region,
            site=session.site,
            step=self._replica.step + 1,
            position=self._replica.position,
            layout=optimizer.layout.digest,
            codec=settings.codec,
            indices=settings.indices,
            k=settings.k,
            tokens=sum(shard["tokens"] for shard in headers),
            part=0,
            parts=len(parts),
            absent=absent_names(optimizer, contribution),
        ).model_dump(mode="json")
        bodies = []
        for part, chunks in enumerate(parts):
            own = contribution if len(parts) == 1 else restrict(contribution, chunks)
            arrays = pack_contribution(own, optimizer.layout, settings.codec, settings.indices)
            bodies.append(encode_message("contribution", header | {"part": part}, arrays))
        return bodies

    # --- the round trip -----------------------------------------------------------------------------------------------

    def _round_trip(self, bodies: Sequence[bytes]) -> bytes:
        """The entry's message, or that there is none for this site; it abstains with no parts."""
        try:
            return self._answered(bodies)
        except GoneError as error:
            if error.code not in _INSTEAD:
                raise
            return _INSTEAD[error.code]

    def _answered(self, bodies: Sequence[bytes]) -> bytes:
        assert self._client is not None
        place = (self._session.run, self._session.region, self._replica.step + 1)
        answer = self._sent(bodies, place)
        while not answer.accepted:
            answer = self._sent(bodies, place)
        while answer.message is None:
            answer = self._client.update_answer(*place, 0, WAIT_S)
        if answer.evaluate is not None:
            self.evaluates = answer.evaluate
        self.snapshot = answer.snapshot
        return answer.message

    def _sent(self, bodies: Sequence[bytes], place: tuple[str, str, int]) -> Answer:
        try:
            if not bodies:
                return self._abstain(place)
            return self._journal.noted(place[2], _digest(bodies), partial(self._contribute, bodies, place))
        except InvalidError as error:
            log.error("the coordinator refuses this contribution, the round goes on without it", error=str(error))
        except ConflictError as error:
            if error.code != "other_bytes":
                raise
            log.warning("earlier ranks of this site have answered this round, which goes on with that")
        return Answer(None)

    def _abstain(self, place: tuple[str, str, int]) -> Answer:
        assert self._client is not None
        assert self._replica.position is not None
        abstention = Abstention(position=self._replica.position, reason="a gradient is not finite")
        return self._client.abstain(*place, self._session.site, abstention, WAIT_S)

    def _contribute(self, bodies: Sequence[bytes], place: tuple[str, str, int]) -> Answer:
        """The answer to the last part, with which the contribution is complete, or to one that decides."""
        assert self._client is not None
        answer = Answer(None)
        for part, body in enumerate(bodies):
            wait = WAIT_S if part == len(bodies) - 1 else 0.0
            answer = self._client.contribute(*place, self._session.site, part, body, wait)
            if answer.message is not None or not answer.accepted:
                break
        return answer


def _digest(bodies: Sequence[bytes]) -> str:
    """Of a contribution; nothing if there is none."""
    return contribution_digest(hashlib.sha256(body).hexdigest() for body in bodies) if bodies else ""


def _nothing(optimizer: DeMo) -> StepEntry:
    no_rates = (0.0,) * len(optimizer.param_groups)
    return StepEntry(update=None, lr=no_rates, decay=no_rates, listed=False)


def _in_background(work: Callable[[], bytes]) -> Callable[[], bytes]:
    """Starts the work in a thread that does not keep the process alive, and gives what waits for its result."""
    future: Future[bytes] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001  # goes on where the result is called for
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future.result
