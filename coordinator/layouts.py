"""Layouts of runs: checked when a site presents one, and kept in memory, since every contribution needs one."""

import asyncio
import json

from algorithms.layout import ParameterLayout
from algorithms.traffic import contribution_bytes
from api.errors import ConflictError, InvalidError
from api.payload import canonical_json
from api.specs import OptimizerSpec, RunSpec
from coordinator.kept_blobs import KeptBlobs
from coordinator.records import Layout, RunState

__all__ = ["Layouts", "checked_layout", "require_few_parts", "require_same_layout"]

_KEPT = 32
MAX_PARTS = 1024
"""About that many parts of a contribution, whose digests are in every state of the run."""


class Layouts:
    def __init__(self, blobs: KeptBlobs) -> None:
        self._blobs = blobs
        self._by_digest: dict[str, ParameterLayout] = {}

    async def save(self, layout: ParameterLayout, run: str) -> Layout:
        text = canonical_json(layout.to_json())
        blob = await self._blobs.store(text.encode(), run)
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
            self._keep(await self.read(state.layout.blob))
        return self._by_digest[state.layout.digest]

    async def read(self, blob: str) -> ParameterLayout:
        return ParameterLayout.from_json(json.loads(await asyncio.to_thread(self._blobs.stored.read, blob)))

    def _keep(self, layout: ParameterLayout) -> None:
        if len(self._by_digest) >= _KEPT:
            self._by_digest.clear()
        self._by_digest[layout.digest] = layout


def checked_layout(value: dict[str, object], spec: RunSpec) -> ParameterLayout:
    try:
        layout = ParameterLayout.from_json(value)
        "".join([*layout.groups, *layout.index]).encode()  # half of a surrogate pair is a ValueError
        for name in ("chunk", "transform"):
            if getattr(layout, name) != getattr(spec.optimizer, name):
                theirs = getattr(spec.optimizer, name)
                raise ValueError(f"the layout has {name} {getattr(layout, name)}, the run's spec {theirs}")
        if spec.exchange != "none":
            require_few_parts(layout, spec.optimizer, spec.part_bytes)
        if spec.outer is not None:
            layout.fragments(spec.outer.fragments)
    except ValueError as error:
        raise InvalidError("bad_layout", f"layout: {error}") from None
    return layout


def require_few_parts(layout: ParameterLayout, optimizer: OptimizerSpec, part_bytes: int) -> None:
    """Raises ValueError if contributions would have too many."""
    size = contribution_bytes(layout, optimizer.k, optimizer.codec, optimizer.indices)
    if size > (limit := MAX_PARTS * part_bytes):
        raise ValueError(
            f"a contribution to this model would take {size} bytes, more than the {limit} of {MAX_PARTS} parts of "
            f"part_bytes = {part_bytes}: lower optimizer.k (now {optimizer.k}) or use codec sign"
        )


def require_same_layout(theirs: ParameterLayout, ours: ParameterLayout, site: str) -> None:
    """Names the parameters that differ; what `checked_layout` leaves out, the state machine compares by digest."""
    tensors = [{(t.name, t.shape, layout.groups[t.group]) for t in layout.tensors} for layout in (theirs, ours)]
    differing = sorted({name for name, _, _ in tensors[0] ^ tensors[1]})
    if differing:
        shapes = [{name: list(shape) for name, shape, _ in side} for side in tensors]
        listed = "; ".join(
            f"{name}: {shapes[0].get(name, 'missing')} here, {shapes[1].get(name, 'missing')} in the run"
            for name in differing[:5]
        )
        raise ConflictError(
            "layout_differs",
            f"the model at site {site} has other parameters than the run's, {len(differing)} differ ({listed}): use "
            "the same version of the task's code at all sites",
        )
