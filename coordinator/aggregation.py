"""Closes a frozen round: reads, aggregates and writes it part by part, so that memory holds one part at a time (A5)."""

import asyncio
import io
import tempfile
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from numpy.typing import NDArray

from algorithms.codec import digest_arrays
from algorithms.layout import ParameterLayout
from api.payload import decode_message, encode_message
from coordinator.entries import Header, step_header
from coordinator.events import Aggregated
from coordinator.logs import Logs
from coordinator.records import RunState
from coordinator.rounds import aggregate_part, norms_of, parts_of
from coordinator.store import Store

__all__ = ["LostContributionError", "aggregate_round"]

_IN_MEMORY = 16 << 20
"""Bytes of an update that wait in memory for its header; more of them wait in a file."""

Arrays = dict[str, NDArray[Any]]


class LostContributionError(Exception):
    """The store has lost what it had accepted, or the round is closed meanwhile."""

    def __init__(self, site: str) -> None:
        super().__init__(site)
        self.site = site


async def aggregate_round(
    state: RunState, name: str, layout: ParameterLayout, store: Store, logs: Logs
) -> tuple[Aggregated, dict[int, Sequence[str]]]:
    """What has come of a region's frozen round, and the digests of the stored messages of its entry by seq.

    Raises:
        LostContributionError: a contribution that the round lists is not in the store.
    """
    region = state.regions[name]
    assert region.round is not None
    sent, optimizer = region.round.contributions, state.spec.optimizer
    norms = norms_of(sent, optimizer)
    halvings = {site: norm.halvings for site, norm in norms.items()}
    with _Spool() as spool:
        for number, chunks in enumerate(parts_of(layout, optimizer, state.spec.part_bytes)):
            bodies = {}
            for site, one in sorted(sent.items()):
                body = await store.payload(state.id, one.parts[number])
                if body is None:
                    raise LostContributionError(site)
                bodies[site] = body

            def work(bodies: Mapping[str, bytes] = bodies, chunks: range = chunks) -> None:
                spool.append(aggregate_part(bodies, layout, optimizer, chunks, halvings))

            await asyncio.to_thread(work)
        header = step_header(state, region, tuple(spool.digests), norms)
        digests = []
        for number in range(len(spool.digests)):
            message = await asyncio.to_thread(spool.message, number, header)
            digests.append(await logs.keep(state.id, message))
    return Aggregated(name, region.round.step, tuple(header["parts"]), norms), {header["seq"]: digests}


class _Spool:
    """Arrays of parts, until the digests of all are known that the header of each names: the first of them in memory,
    the others in a file.
    """

    def __init__(self) -> None:
        self.digests: list[str] = []
        self._room = _IN_MEMORY
        self._held: list[Arrays | range] = []
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  # closed by __exit__

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def append(self, arrays: Arrays) -> None:
        self.digests.append(digest_arrays(arrays))
        self._room -= sum(array.nbytes for array in arrays.values())
        if self._room >= 0:
            self._held.append(arrays)
            return
        start = self._file.seek(0, io.SEEK_END)
        self._held.append(range(start, start + self._file.write(encode_message("part", {}, arrays))))

    def message(self, number: int, header: Header) -> bytes:
        held = self._held[number]
        if isinstance(held, range):
            self._file.seek(held.start)
            held = decode_message("part", self._file.read(len(held)))[1]
        return encode_message("entry", header, held)
