"""Outer rounds as a site sees them: announce each fragment by digest, upload it if asked, take the new anchor."""

import json
import time
from typing import Any

from algorithms.schedule import outer_due, outer_number
from api.client import CoordinatorClient
from api.errors import ConflictError, GoneError, IsthmusError
from api.schemas import Announcement, LogPage, RunSpec
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
        self.evaluates = False
        """Whether this site runs the held-out evaluation, by the coordinator's last answer; at rank 0."""
        self.wait_s = 0.0
        """Spent waiting for the coordinator and moving parameters, so far."""

    @property
    def due(self) -> bool:
        """Whether an outer round follows the last step, and has not been held for all fragments."""
        outer, replica = self._spec.outer, self._replica
        if outer is None or replica.step == 0 or not outer_due(replica.step, outer.every, self._spec.steps):
            return False
        return len(replica.anchored) < outer.fragments

    def hold(self, tokens: int = 0) -> bool:
        """Takes part in the outer round that is due, as far as it is still to be held; False if the run ended.

        `tokens`: of this rank since the last anchor, where no log tells.
        """
        outer, replica = self._spec.outer, self._replica
        assert outer is not None
        missing = [fragment for fragment in range(outer.fragments) if fragment not in replica.anchored]
        digests = {fragment: replica.fragment_digest(fragment) for fragment in missing}
        tokens = self._compare(list(digests.values()), tokens)
        started = time.monotonic()
        number = outer_number(replica.step, outer.every)
        outcome = self._agree(number, digests, tokens) if self._client is not None else None
        outcome = json.loads(self._ranks.share(None if outcome is None else json.dumps(outcome).encode()))
        self.left_out = outcome["left_out"]
        for header in outcome["headers"]:
            replica.apply_anchor(header, held=digests[header["fragment"]])
        self.wait_s += time.monotonic() - started
        return not outcome["ended"]

    def _compare(self, digests: list[str], tokens: int) -> int:
        """The ranks of a site hold the same parameters, or the run must not go on. At rank 0, the tokens of all.

        Raises:
            IsthmusError: at rank 0; the others wait until the agent ends them.
        """
        everybody = [json.loads(data) for data in self._ranks.gather(json.dumps([digests, tokens]).encode())]
        differing = [rank for rank, (theirs, _) in enumerate(everybody) if theirs != digests]
        if differing:
            raise IsthmusError(f"ranks {differing} of site {self._session.site} hold other parameters than rank 0")
        return sum(theirs for _, theirs in everybody)

    def _agree(self, number: int, digests: dict[int, str], tokens: int) -> dict[str, Any]:
        """Whether the round is held without this site, its anchor entries, and whether the run has ended before."""
        headers: list[dict[str, Any]] = []
        takes_part, behind, ended = True, False, False
        try:
            while len(headers) < len(digests):
                missing = sorted(digests.keys() - {header["fragment"] for header in headers})
                if takes_part:
                    takes_part = all(self._announce(number, one, digests[one], tokens) for one in missing)
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

    def _announce(self, number: int, fragment: int, digest: str, tokens: int) -> bool:
        """Once the round is open, and once more after an upload; False if it is held without this site.

        Whoever is asked for an upload may be lost: announcing again is how another holder is asked.
        """
        assert self._client is not None
        announcement = Announcement(digest=digest, tokens=tokens)
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
        self.evaluates = reply.evaluate
        if reply.upload:
            self._client.put_blob(self._replica.read_fragment(fragment))
            self._client.announce(*place, WAIT_S)
        return True

    def _next_anchors(self, start: int, most: int) -> LogPage:
        assert self._client is not None
        page = self._client.log(self._session.run, self._session.region, start, start + most, WAIT_S)
        if not page.items and page.ended:
            raise GoneError("run_ended", "the run ended in the middle of an outer round")
        return page
