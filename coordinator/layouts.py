"""Layouts of runs, from the blobs that hold them; kept in memory, since every contribution needs one."""

import asyncio
import json

from algorithms.layout import ParameterLayout
from api.errors import ConflictError
from api.payload import canonical_json
from coordinator.blobs import BlobDirectory
from coordinator.records import Layout, RunState

__all__ = ["Layouts"]

_KEPT = 32


class Layouts:
    def __init__(self, blobs: BlobDirectory) -> None:
        self._blobs = blobs
        self._by_digest: dict[str, ParameterLayout] = {}

    async def save(self, layout: ParameterLayout) -> Layout:
        text = canonical_json(layout.to_json())
        blob = await asyncio.to_thread(self._blobs.put_bytes, text.encode())
        self._keep(layout)
        return Layout(digest=layout.digest, blob=blob, groups=tuple(layout.groups))

    async def of(self, state: RunState) -> ParameterLayout:
        """The layout of a run.

        Raises:
            ConflictError: no site has joined yet.
        """
        if state.layout is None:
            raise ConflictError("no_layout", f"no site has presented the layout of run {state.id} yet")
        if state.layout.digest not in self._by_digest:
            text = await asyncio.to_thread(self._blobs.path(state.layout.blob).read_text)
            self._keep(ParameterLayout.from_json(json.loads(text)))
        return self._by_digest[state.layout.digest]

    def _keep(self, layout: ParameterLayout) -> None:
        if len(self._by_digest) >= _KEPT:
            self._by_digest.clear()
        self._by_digest[layout.digest] = layout
