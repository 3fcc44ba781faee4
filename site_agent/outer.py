"""Outer rounds as a site sees them: announce each fragment by digest, upload it if asked, take the new anchor."""

import hashlib
import json
import time
from typing import Any

from algorithms.schedule import outer_due
from api.client import CoordinatorClient
from api.errors import ConflictError, GoneError, IsthmusError
from api.schemas import Announcement, RunSpec
from site_agent.local_ranks import LocalRanks
from site_agent.replica import Replica
from site_agent.settings import Session

__all__ = ["OuterRounds"]

WAIT_S = 25.0


class OuterRounds:
    """The same at every rank; rank 0 talks to the coordinator and shares what it learns."""

    def __init__(
        self,
        spec: RunSpec,
        session: Session,
        ranks: LocalRanks,
        client: CoordinatorClient | None,
        replica: Replica,
    ) -> None:
        self._spec = spec
        self._session = session
        self._ranks = ranks
        self._client = client
        self._replica = replica
        self.left_out = False
        """Whether the last outer round was held without this site."""
        self.wait_s = 0.0
        """Spent waiting for the coordinator and moving parameters, so far."""

    @property
    def due(self) -> bool:
        """Whether an outer round follows the last step, and has not been held for all fragments."""
        outer, replica = self._spec.outer, self._replica
        if outer is None or replica.step == 0 or len(replica.anchored) == outer.fragments:
            return False
        return bool(replica.anchored) or outer_due(replica.step, replica.every, self._spec.steps)

    def hold(self) -> bool:
        """Takes part in the outer round that is due, as far as it is still to be held; False if the run ended."""
        outer, replica = self._spec.outer, self._replica
        assert outer is not None
        fragments = [fragment for fragment in range(outer.fragments) if fragment not in replica.anchored]
        copies = {fragment: replica.read_fragment(fragment) for fragment in fragments}
        digests = {fragment: hashlib.sha256(copy).hexdigest() for fragment, copy in copies.items()}
        self._compare(list(digests.values()))
        started = time.monotonic()
        number = replica.outer_round + (not replica.anchored)
        agreed = self._agree(number, copies, digests) if self._client is not None else None
        self.left_out, headers = json.loads(self._ranks.share(agreed))
        for header in headers:
            replica.apply_anchor(header, held=digests[header["fragment"]])
        self.wait_s += time.monotonic() - started
        return len(headers) == len(copies)

    def _compare(self, digests: list[str]) -> None:
        """The ranks of a site hold the same parameters, or the run must not go on.

        Raises:
            IsthmusError: at rank 0; the others wait until the agent ends them.
        """
        own = json.dumps(digests).encode()
        differing = [rank for rank, other in enumerate(self._ranks.gather(own)) if other != own]
        if differing:
            raise IsthmusError(f"ranks {differing} of site {self._session.site} hold other parameters than rank 0")

    def _agree(self, number: int, copies: dict[int, bytes], digests: dict[int, str]) -> bytes:
        """As JSON: whether the round is held without this site, and its anchor entries, fewer if the run has ended."""
        headers: list[dict[str, Any]] = []
        takes_part = True
        try:
            while len(headers) < len(copies):
                missing = copies.keys() - {header["fragment"] for header in headers}
                if takes_part:
                    takes_part = all(self._announce(number, one, copies[one], digests[one]) for one in sorted(missing))
                headers += self._next_anchors(self._replica.next_seq + len(headers), len(missing))
        except GoneError as error:
            if error.code != "run_ended":
                raise
        return json.dumps([not takes_part, headers]).encode()

    def _announce(self, number: int, fragment: int, copy: bytes, digest: str) -> bool:
        """Once the round is open, and once more after an upload; False if it is held without this site.

        Whoever is asked for an upload may be lost: announcing again is how another holder is asked.
        """
        assert self._client is not None
        announcement = Announcement(digest=digest)
        place = (self._session.run, number, fragment, self._session.site, announcement)
        while True:
            try:
                reply = self._client.announce(*place, WAIT_S)
                break
            except ConflictError as error:
                if error.code == "not_a_participant":
                    return False
                if error.code != "outer_round_not_open":  # another region is still on its way
                    raise
        if reply.upload:
            self._client.put_blob(copy)
            self._client.announce(*place, WAIT_S)
        return True

    def _next_anchors(self, start: int, most: int) -> list[dict[str, Any]]:
        assert self._client is not None
        page = self._client.log(self._session.run, self._session.region, start, start + most, WAIT_S)
        if not page.items and page.ended:
            raise GoneError("run_ended", "the run ended in the middle of an outer round")
        return page.items
