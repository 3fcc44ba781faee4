"""Closes a frozen round: reads, aggregates and writes it part by part, so that memory holds one part at a time (A5).

The arithmetic needs to know the contributions, not that they are committed: it may run ahead.
"""

import asyncio
import io
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from numpy.typing import NDArray

from algorithms.codec import digest_arrays
from algorithms.layout import ParameterLayout
from algorithms.traffic import contribution_bytes
from algorithms.updates import SparseUpdate
from api.payload import decode_message, encode_message
from api.schemas import Position
from api.specs import OptimizerSpec
from coordinator.entries import Header, position_after, step_header
from coordinator.events import Aggregated
from coordinator.in_force import optimizer_at
from coordinator.in_place import in_place
from coordinator.logs import IN_COMMIT, Logs
from coordinator.recent import Recent
from coordinator.records import RunState, Sent
from coordinator.rounds import aggregate_part, norms_of, parts_of
from coordinator.store import Store

__all__ = [
    "Inputs",
    "LostContributionError",
    "Made",
    "Spool",
    "aggregate_round",
    "close_round",
    "inputs_of",
    "is_small",
]

_IN_MEMORY = 16 << 20
"""Bytes of an update that wait in memory for its header; more of them wait in a file."""
_SMALL = 512 << 10
"""Bytes of all contributions to a round that is aggregated within some ms."""

Arrays = dict[str, NDArray[Any]]
Part = dict[str, SparseUpdate | bytes]
"""By site."""


class LostContributionError(Exception):
    """The store has lost what it had accepted, or the round is closed meanwhile."""

    def __init__(self, site: str) -> None:
        super().__init__(site)
        self.site = site


@dataclass(frozen=True)
class Made:
    """What closes a round.

    Attributes:
        position: of its entry.
        digests: of the messages of its parts; those in `payloads` are to be stored by the commit, the others are.
        first: the message of part 0; nothing if the entry has no arrays.
    """

    event: Aggregated
    position: Position
    digests: Sequence[str]
    payloads: Mapping[str, bytes]
    first: bytes


@dataclass(frozen=True)
class Inputs:
    """All that the arithmetic of a round depends on, but for the layout; `sent` is by site."""

    run: str
    sent: Mapping[str, Sent]
    optimizer: OptimizerSpec
    part_bytes: int


def inputs_of(state: RunState, region: str, step: int, sent: Mapping[str, Sent]) -> Inputs:
    return Inputs(state.id, sent, optimizer_at(state, region, step), state.spec.part_bytes)


def is_small(inputs: Inputs, layout: ParameterLayout) -> bool:
    """Whether the round is aggregated in place."""
    optimizer = inputs.optimizer
    one = contribution_bytes(layout, optimizer.k, optimizer.codec, optimizer.indices)
    return len(inputs.sent) * one <= _SMALL


async def aggregate_round(inputs: Inputs, layout: ParameterLayout, store: Store, recent: Recent) -> "Spool":
    """The arrays of the update, part by part; whoever gets them closes them.

    Raises:
        LostContributionError: a contribution is not in the store.
    """
    sent, optimizer = inputs.sent, inputs.optimizer
    halvings = {site: norm.halvings for site, norm in norms_of(sent, optimizer).items()}
    tokens = {site: one.tokens for site, one in sent.items()}
    spool = Spool()
    run_it = in_place if is_small(inputs, layout) else asyncio.to_thread
    try:
        for number, chunks in enumerate(parts_of(layout, optimizer, inputs.part_bytes)):
            part = await _part(inputs.run, sent, number, store, recent)

            def work(part: Part = part, chunks: range = chunks) -> None:
                spool.append(aggregate_part(part, tokens, layout, optimizer, chunks, halvings))

            await run_it(work)
    except BaseException:
        spool.close()
        raise
    return spool


async def close_round(state: RunState, name: str, spool: "Spool", logs: Logs) -> Made:
    """What closes a region's frozen round, of the arrays of its update."""
    region = state.regions[name]
    assert region.round is not None
    norms = norms_of(region.round.contributions, optimizer_at(state, name, region.round.step))
    header = step_header(state, region, tuple(spool.digests), norms)
    run_it = in_place if spool.size <= IN_COMMIT else asyncio.to_thread
    first, digests, payloads = b"", list[str](), dict[str, bytes]()
    for number in range(len(spool.digests)):
        message = await run_it(spool.message, number, header)
        first = first or message
        if len(spool.digests) == 1:
            digest, payloads = await logs.kept_or_carried(state.id, message)
        else:
            digest = await logs.keep(state.id, message)
        digests.append(digest)
    event = Aggregated(name, region.round.step, tuple(header["parts"]), norms)
    return Made(event, position_after(header), digests, payloads, first)


async def _part(run: str, sent: Mapping[str, Sent], number: int, store: Store, recent: Recent) -> Part:
    """One part of every contribution: as it was validated on arrival, or read again from the store."""
    found: Part = {}
    for site, one in sorted(sent.items()):
        digest = one.parts[number]
        known = recent.contributions.get((run, digest)) or await store.payload(run, digest)
        if known is None:
            raise LostContributionError(site)
        recent.contributions.drop((run, digest))
        found[site] = known
    return found


class Spool:
    """Arrays of parts, until the digests of all are known that the header of each names: the first of them in memory,
    the others in a file.
    """

    def __init__(self) -> None:
        self.digests: list[str] = []
        self.size = 0
        self._held: list[Arrays | range] = []
        self._file: IO[bytes] | None = None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def append(self, arrays: Arrays) -> None:
        self.digests.append(digest_arrays(arrays))
        self.size += sum(array.nbytes for array in arrays.values())
        if self.size <= _IN_MEMORY:
            self._held.append(arrays)
            return
        if self._file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `close`
        start = self._file.seek(0, io.SEEK_END)
        self._held.append(range(start, start + self._file.write(encode_message("part", {}, arrays))))

    def message(self, number: int, header: Header) -> bytes:
        held = self._held[number]
        if isinstance(held, range):
            assert self._file is not None
            self._file.seek(held.start)
            held = decode_message("part", self._file.read(len(held)))[1]
        return encode_message("entry", header, held)
