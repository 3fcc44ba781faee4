"""Brings a site to the head of its region's log: entry by entry, from entry 0 or from the last outer round on."""

import json
from typing import Any

from algorithms import DeMo
from api.client import CoordinatorClient
from api.errors import GoneError, IsthmusError
from api.schemas import CaughtUp, LogPage, Resume
from site_agent.local_ranks import LocalRanks
from site_agent.replica import Replica
from site_agent.saved_momentum import OnItsWay, SavedMomentum
from site_agent.settings import Session
from site_agent.stop import Stop

__all__ = ["CatchUp"]

WAIT_S = 25.0
"""Of one poll."""

Header = dict[str, Any]


class CatchUp:
    """The same at every rank; rank 0 talks to the coordinator and shares what it learns.

    Args:
        optimizer: takes the steps of the log; None where a log has none.
    """

    def __init__(
        self,
        session: Session,
        ranks: LocalRanks,
        client: CoordinatorClient | None,
        optimizer: DeMo | None,
        replica: Replica,
        stop: Stop,
    ) -> None:
        self._session = session
        self._ranks = ranks
        self._client = client
        self._optimizer = optimizer
        self._replica = replica
        self._stop = stop
        self._saved: SavedMomentum | None = None
        self._restored = False
        self._on_its_way: OnItsWay | None = None

    def enter(self, start: Header, resume: Resume | None, saved: SavedMomentum | None) -> bool:
        """Loads what the log begins with, or the parameters at a later place of it, and goes `to_head`.

        The momentum is what was saved, from its place in the log on, with what was on its way then; or it begins with
        zero at the head: updates of which nothing was in it leave nothing behind.
        """
        self._saved = saved
        if resume is None:
            self._replica.apply_start(start)
        else:
            self._replica.load_buffers(start)
            self._replica.resume(resume)
        goes_on = self.to_head()
        self._restore()
        if self._optimizer is None:
            return goes_on
        if not self._restored or self._on_its_way is not None:  # which may be listed later, when we send other bytes
            self._optimizer.reset_momentum()
        self._on_its_way = None
        return goes_on

    def _restore(self) -> None:
        """Takes up the saved momentum, at the place where it was saved or, if that is passed, here."""
        if self._optimizer is not None and self._saved is not None and self._replica.next_seq > self._saved.seq:
            self._optimizer.set_momentum(self._saved.momentum)
            self._on_its_way, self._saved, self._restored = self._saved.on_its_way, None, True

    def to_head(self, wait: float = 0.0) -> bool:
        """Applies all entries there are, and waits for more until the coordinator counts on this site.

        Where the next one was trimmed it takes the parameters at a later place, and goes on from there.

        From then on the open round waits for it, so that the head stays in reach. False if the run has ended. The
        momentum stays: what was not sent is still in it. `wait`: for the first of the entries.
        """
        active = False
        while True:
            page = self._page(wait)
            if isinstance(page, Resume):
                self._replica.resume(page)
                self._saved, self._restored = None, False  # updates that it would have lost are not to be had any more
                continue
            for header in page.items:
                self._apply(header)
            if page.ended and not page.items:
                return False
            if active and not page.items:
                return True
            active = active or self._is_active()
            wait = 0.0 if active or page.items else WAIT_S

    def _page(self, wait: float) -> LogPage | Resume:
        """The next entries, or where the log begins now."""
        with self._stop.let():
            answer = None if self._client is None else self._asked(self._client, wait).encode()
            kind, _, text = self._ranks.share(answer).decode().partition(" ")
        return LogPage.model_validate_json(text) if kind == "page" else Resume.model_validate_json(text)

    def _asked(self, client: CoordinatorClient, wait: float) -> str:
        try:
            page = client.log(self._session.run, self._session.region, self._replica.next_seq, wait=wait)
        except GoneError as error:
            if error.code != "log_trimmed":
                raise
            return "resume " + json.dumps(error.context["resume"])
        return "page " + page.model_dump_json()

    def _apply(self, header: Header) -> None:
        self._restore()
        if header["kind"] == "anchor":
            self._replica.apply_anchor(header)
            return
        if self._optimizer is None:
            raise IsthmusError(f"entry {header['seq']} is of kind {header['kind']} in a region without rounds")
        message = None
        if self._client is not None:
            message = self._client.entry(self._session.run, self._session.region, header["seq"], 0)
        message = self._ranks.share(message)
        way = self._on_its_way
        if way is None or way.step != header["step"]:
            self._optimizer.apply(self._replica.read_step(message))
            return
        self._on_its_way = None
        self._optimizer.take(way.sent, self._replica.read_step(message, way.digest))

    def _is_active(self) -> bool:
        reply = None
        if self._client is not None:
            reply = b"active" if self._report(self._client) else b""
        return self._ranks.share(reply) == b"active"

    def _report(self, client: CoordinatorClient) -> bool:
        assert self._replica.position is not None
        report = CaughtUp(attempt=self._session.attempt, position=self._replica.position)
        try:
            return client.caught_up(self._session.run, self._session.site, report).active
        except GoneError as error:
            if error.code != "run_ended":  # which the log tells, too, once all processes have ended
                raise
            return False
