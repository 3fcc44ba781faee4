"""Takes contributions in, part by part: checks each part on its arrival, and stores it before anything refers to it."""

import asyncio
import hashlib
import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from algorithms.outliers import squares
from api.errors import ConflictError, InvalidError, ProblemError
from api.payload import contribution_digest, digest_json
from api.schemas import ContributionHeader
from api.service import Place
from coordinator.arrivals import Arrival, Part
from coordinator.engine import Engine
from coordinator.events import Contributed, PartSent, Refused
from coordinator.in_force import optimizer_at
from coordinator.in_place import in_place
from coordinator.layouts import Layouts
from coordinator.pressure import Pressure
from coordinator.recent import Recent, bytes_of
from coordinator.records import RunState, Sent
from coordinator.round_events import admitted, require_known_settings
from coordinator.rounds import check_header, parts_of, read_header, read_update
from coordinator.store import Store

__all__ = ["Complete", "Contributions"]

SMALL = 1 << 18
"""Bytes of a part that is read within a millisecond, sooner than a thread is asked, and stored as quickly."""
_REASON = 500
"""Characters of the reason for which a contribution was refused."""


@dataclass(frozen=True)
class Complete:
    """`payloads`: what is to be stored by the commit. `validate`: milliseconds that its last part took."""

    event: Contributed
    payloads: Mapping[str, bytes] = field(default_factory=dict)
    validate: float = 0.0


class Contributions:
    def __init__(self, store: Store, layouts: Layouts, engine: Engine, pressure: Pressure, recent: Recent) -> None:
        self._store = store
        self._layouts = layouts
        self._engine = engine
        self._pressure = pressure
        self._recent = recent

    async def parts(self, state: RunState, region: str, step: int) -> tuple[range, ...]:
        """The chunks of each part of a contribution to this step."""
        return parts_of(await self._layouts.of(state), optimizer_at(state, region, step), state.spec.part_bytes)

    async def take(self, state: RunState, place: Place, part: int, body: bytes) -> Complete | list[int]:
        """The contribution that is complete with this part; or the numbers of the parts that are missing.

        Raises:
            ConflictError: for another layout or with other settings; not possible now; other bytes than before.
            GoneError: the round is being closed without this site, its settings are others, or the run has ended.
            InvalidError: malformed; the detail names the tensor and the reason.
            TooManyRequestsError: Redis is to drain first.
            StorageFullError: the contributions of a round can never fit into Redis.
        """
        region, step, site, attempt = place.region, place.step, place.site, place.attempt
        layout, optimizer = await self._layouts.of(state), optimizer_at(state, region, step)
        parts = await self.parts(state, region, step)
        started = time.perf_counter()
        run_it = in_place if len(body) <= SMALL else asyncio.to_thread
        header, arrays = await run_it(read_header, body)
        _same_place(header, run=state.id, region=region, step=step, site=site, part=part)
        require_known_settings(state.regions[region], step, site, header.position)
        check_header(header, layout, optimizer)
        if header.parts != len(parts) or part >= len(parts):
            count = f"{len(parts)} parts, numbered from 0" if len(parts) > 1 else "one part, number 0"
            raise InvalidError("other_parts", f"part {part} of {header.parts}: contributions to this run have {count}")
        sent = PartSent(site, attempt, region, step, header.position, part, hashlib.sha256(body).hexdigest())
        try:
            before = admitted(sent, state)
        except ProblemError:  # by the newest state, too?
            before = admitted(sent, (await self._store.load(state.id)).state)
        if before is not None:
            return Complete(Contributed(site, attempt, region, step, header.position, before))
        await self._pressure.require_room(state, layout, optimizer)
        carried = {sent.digest: body} if len(parts) == 1 and len(body) <= SMALL else {}
        try:
            update = await run_it(read_update, header, arrays, layout, optimizer, parts[part])
            self._recent.contributions.put((state.id, sent.digest), update, bytes_of(update))
            one = Part(sent.digest, squares(update))
            validate = (time.perf_counter() - started) * 1e3
            if not carried:  # not in the commit, for which others wait
                await self._store.put_payload(state.id, sent.digest, body)
            arrived = {0: one} if len(parts) == 1 else await self._arrived(state, sent, one, header)
        except InvalidError as error:
            reason = error.detail.encode(errors="replace").decode()[:_REASON]
            with suppress(ConflictError):
                await self._engine.apply(state.id, Refused(site, attempt, region, step, header.position, reason))
            raise
        if missing := [number for number in range(len(parts)) if number not in arrived]:
            return missing
        event = Contributed(site, attempt, region, step, header.position, _whole(arrived, header.tokens))
        return Complete(event, carried, validate)

    async def _arrived(
        self, state: RunState, sent: PartSent, part: Part, header: ContributionHeader
    ) -> dict[int, Part]:
        seat = state.members[sent.site].seat
        assert seat is not None
        arrival = Arrival(state.id, sent.region, sent.step, sent.site, seat, sent.position.seq)
        common = digest_json(header.model_dump(mode="json", exclude={"part"}))
        return await self._store.arrivals.add(arrival, sent.part, part, common)


def _whole(parts: dict[int, Part], tokens: int) -> Sent:
    digests = tuple(parts[number].digest for number in range(len(parts)))
    norm = math.sqrt(sum(parts[number].squares for number in range(len(parts))))
    return Sent(digest=contribution_digest(digests), parts=digests, tokens=tokens, norm=norm)


def _same_place(header: ContributionHeader, **place: str | int) -> None:
    named = {name: getattr(header, name) for name in place}
    if named != place:
        raise InvalidError("other_place", f"the contribution's header says {named}, its URL {place}")
