"""Outer rounds as a site sees them: announce each fragment by digest, upload it if asked, take the new anchor."""

import json
import time
from collections.abc import Callable
from functools import partial
from threading import Thread
from typing import Any, NamedTuple

import structlog

from algorithms.layout import ParameterLayout
from api.client import CoordinatorClient
from api.errors import ConflictError, GoneError, IsthmusError
from api.schemas import Announcement, LogPage
from api.specs import RunSpec
from api.transfers import Source
from site_agent.counting import counted_as_outer
from site_agent.encodings import Encodings
from site_agent.local_ranks import LocalRanks
from site_agent.replica import Replica
from site_agent.settings import Session

__all__ = ["OuterRounds"]

WAIT_S = 25.0

log = structlog.get_logger()


class _Copy(NamedTuple):
    """Of a fragment; `body` gives what is uploaded of it, if it is asked for."""

    digest: str
    body: Callable[[], bytes | Source]


class OuterRounds:
    """The same at every rank; rank 0 talks to the coordinator and shares what it learns.

    An outer round begins with copies of the fragments that are due, and is held when their anchors are to be applied:
    at once, or some steps later. Then a thread of rank 0 announces the copies while training goes on.
    """

    def __init__(
        self,
        spec: RunSpec,
        session: Session,
        ranks: LocalRanks,
        client: CoordinatorClient | None,
        replica: Replica,
        layout: ParameterLayout,
    ) -> None:
        self._spec = spec
        self._session = session
        self._ranks = ranks
        self._client = client
        self._replica = replica
        self._copies: dict[int, _Copy] = {}
        self._tokens = 0
        self._early: Thread | None = None
        outer = spec.outer
        self._encodings: Encodings | None = None
        if client is not None and outer is not None and outer.codec != "fp32":
            self._encodings = Encodings(outer, layout, session.region, client.get_blob)
        self.begun = 0
        """The last outer round for which the ranks have compared their copies, and counted their tokens up to them."""
        self.left_out = False
        """Whether the last outer round was held without this site."""
        self.evaluates = False
        """Whether this site runs the held-out evaluation, by the coordinator's last answer; at rank 0."""
        self.wait_s = 0.0
        """Spent waiting for the coordinator and moving parameters, so far."""

    @property
    def due(self) -> bool:
        """Whether copies are to be taken, or anchors to be applied, after the last step."""
        outer, step = self._replica.outer, self._replica.step
        return outer.begins(step) or outer.is_held(step)

    def go_on(self, tokens: int = 0) -> bool:
        """Takes part in an outer round, as far as that is due now; False if the run ended.

        `tokens`: of this rank since the last copies, where no log tells.
        """
        replica = self._replica
        self.left_out = False
        replica.begin_outer_round()
        if self.begun != replica.outer.number:
            self._compare(tokens)
        if replica.outer.is_held(replica.step):
            return self._hold()
        if self._client is not None:
            self._early = Thread(target=self._announce_early, args=(self.begun, self._copies), daemon=True)
            self._early.start()
        return True

    def _compare(self, tokens: int) -> None:
        """The ranks of a site hold the same parameters, or the run must not go on.

        Raises:
            IsthmusError: at rank 0; the others wait until the agent ends them.
        """
        replica = self._replica
        digests = {fragment: replica.fragment_digest(fragment) for fragment in sorted(replica.outer.missing)}
        shared = [digest for fragment, digest in digests.items() if not replica.is_buffers(fragment)]
        everybody = [json.loads(data) for data in self._ranks.gather(json.dumps([shared, tokens]).encode())]
        differing = [rank for rank, (theirs, _) in enumerate(everybody) if theirs != shared]
        if differing:
            raise IsthmusError(f"ranks {differing} of site {self._session.site} hold other parameters than rank 0")
        carried = self._tokens if replica.apart else 0  # of work that is still there and was in no mean
        self.begun, self._tokens = replica.outer.number, carried + sum(theirs for _, theirs in everybody)
        self._copies = {fragment: _Copy(digest, self._body(fragment, digest)) for fragment, digest in digests.items()}

    def _body(self, fragment: int, digest: str) -> Callable[[], bytes | Source]:
        """Good for as long as the outer round is open, whatever becomes of the replica meanwhile."""
        copy = self._replica.read_fragment(fragment)
        if self._encodings is None or self._replica.is_buffers(fragment):
            return lambda: copy
        return partial(self._encodings.encode, self.begun, fragment, self._replica.anchors[fragment], copy, digest)

    def _announce_early(self, number: int, copies: dict[int, _Copy]) -> None:
        """What goes wrong here comes up again when the anchors are to be applied."""
        try:
            with counted_as_outer():
                for fragment, copy in copies.items():
                    self._announce(number, fragment, copy)
        except (IsthmusError, RuntimeError) as error:
            log.info("announcing copies early failed", outer_round=number, error=str(error))

    def _hold(self) -> bool:
        """Takes part in the outer round that has begun, as far as it is still to be held; False if the run ended."""
        replica = self._replica
        copies = {fragment: self._copies[fragment] for fragment in sorted(replica.outer.missing)}
        started = time.monotonic()
        outcome = self._agree(self.begun, copies) if self._client is not None else None
        outcome = json.loads(self._ranks.share(None if outcome is None else json.dumps(outcome).encode()))
        self.left_out = outcome["left_out"]
        for header in outcome["headers"]:
            digest = copies[header["fragment"]].digest
            self._keep_left(header, digest)
            replica.apply_anchor(header, held=digest)
        self._tokens = self._tokens if replica.apart else 0
        self.wait_s += time.monotonic() - started
        return not outcome["ended"]

    def _keep_left(self, header: dict[str, Any], digest: str) -> None:
        """Before the anchor is applied, while the copy of that digest is there."""
        fragment = header["fragment"]
        if self._encodings is not None and not self._replica.is_buffers(fragment):
            anchor, copy = self._replica.anchors[fragment], self._replica.read_fragment(fragment)
            self._encodings.settle(header, anchor, copy, digest)

    def _agree(self, number: int, copies: dict[int, _Copy]) -> dict[str, Any]:
        """Whether the round is held without this site, its anchor entries, and whether the run has ended before."""
        if self._early is not None:
            self._early.join()
            self._early = None
        headers: list[dict[str, Any]] = []
        takes_part, behind, ended = True, False, False
        try:
            while len(headers) < len(copies):
                missing = sorted(copies.keys() - {header["fragment"] for header in headers})
                if takes_part:
                    takes_part = all(self._announce(number, one, copies[one]) for one in missing)
                page = self._next_anchors(self._replica.next_seq + len(headers), len(missing))
                headers += page.items
                behind = self._goes_on_without_us(page, headers)
        except GoneError as error:
            if error.code not in ("run_ended", "log_trimmed"):
                raise
            ended, behind = error.code == "run_ended", True
        return {"left_out": not takes_part or behind, "headers": headers, "ended": ended}

    def _goes_on_without_us(self, page: LogPage, headers: list[dict[str, Any]]) -> bool:
        """Whether there is another outer round already: a region without rounds was not waited for."""
        alone = self._spec.exchange == "none"
        return alone and bool(headers) and page.head is not None and page.head.seq > headers[-1]["seq"]

    def _announce(self, number: int, fragment: int, copy: _Copy) -> bool:
        """Once the round is open, and once more after an upload; False if it is held without this site.

        Whoever is asked for an upload may be lost: announcing again is how another holder is asked.
        """
        assert self._client is not None
        announcement = Announcement(digest=copy.digest, tokens=self._tokens)
        place = (self._session.run, number, fragment, self._session.site)
        while True:
            try:
                reply = self._client.announce(*place, announcement, WAIT_S)
                break
            except ConflictError as error:
                if error.code == "not_a_participant":
                    return False
                if error.code != "outer_round_not_open":  # another region is still on its way
                    raise
        self.evaluates = reply.evaluate
        if reply.upload:
            stored = self._client.put_blob(copy.body())
            encoded = self._encodings is not None and not self._replica.is_buffers(fragment)
            again = announcement.model_copy(update={"upload": stored}) if encoded else announcement
            self._client.announce(*place, again, WAIT_S)
        return True

    def _next_anchors(self, start: int, most: int) -> LogPage:
        assert self._client is not None
        page = self._client.log(self._session.run, self._session.region, start, start + most, WAIT_S)
        if not page.items and page.ended:
            raise GoneError("run_ended", "the run ended in the middle of an outer round")
        return page
