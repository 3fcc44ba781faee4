"""Snapshots: what the routes about them ask for, and who is asked for one."""

import asyncio
from contextlib import suppress

from algorithms.layout import ParameterLayout
from algorithms.tensor_file import TensorFile
from algorithms.traffic import parameters_bytes
from api import schemas, specs
from api.errors import ConflictError, InvalidError, ProblemError
from api.payload import digest_json
from coordinator.beginnings import file_tensors, require_same_tensors
from coordinator.buffers import require_buffers, require_small_buffers
from coordinator.engine import Engine
from coordinator.events import SnapshotAsked, SnapshotRequested, SnapshotTaken, WorkFailed
from coordinator.kept_blobs import KeptBlobs
from coordinator.layouts import Layouts
from coordinator.logs import Logs
from coordinator.records import Origin, RunState
from coordinator.references import blobs_of_contents
from coordinator.snapshots import asks, snapshot_of
from coordinator.store import Store

__all__ = ["Snapshots"]


class Snapshots:
    """Implements `api.service.Snapshots`."""

    def __init__(self, store: Store, blobs: KeptBlobs, layouts: Layouts, logs: Logs, engine: Engine) -> None:
        self._store = store
        self._blobs = blobs
        self._layouts = layouts
        self._logs = logs
        self._engine = engine

    async def request(self, run: str) -> schemas.SnapshotPage:
        return _page(await self._engine.apply(run, SnapshotRequested()))

    async def all(self, run: str) -> schemas.SnapshotPage:
        return _page((await self._store.load(run)).state)

    # --- runs that begin with one -------------------------------------------------------------------------------------

    async def origin(self, begin: specs.BeginSpec | None, run: str) -> Origin | None:
        """What entry 0 of a new run is to be made of.

        Raises:
            ProblemError: there is no such snapshot or file, or it is none.
        """
        if begin is None:
            return None
        if begin.file is not None:
            await self._blobs.require(begin.file, run)
            await self._file(begin)
            return Origin(file=begin.file)
        assert begin.run is not None
        state = (await self._store.load(begin.run)).state
        contents = snapshot_of(state, begin.snapshot).contents
        assert state.layout is not None
        for digest in {state.layout.blob, *blobs_of_contents(contents)}:
            await self._blobs.require(digest, run)
        return Origin(
            layout=state.layout.blob,
            parameters=contents.parameters,
            buffers=contents.buffers,
            momenta=contents.momenta,
        )

    async def _file(self, begin: specs.BeginSpec) -> TensorFile:
        blobs = self._blobs.stored
        assert begin.file is not None
        return await asyncio.to_thread(file_tensors, blobs, begin.file, await blobs.size(begin.file), begin.described)

    async def require_same_model(self, layout: ParameterLayout, state: RunState) -> None:
        """If the run begins with another model's parameters, or a file with too much besides them, it ends: no site
        could ever join it.

        Raises:
            ConflictError: names the tensors that differ.
            InvalidError: of what is too much.
        """
        try:
            await self._compare_models(layout, state)
        except (ConflictError, InvalidError) as error:
            await self._engine.apply(state.id, WorkFailed(str(error), final=True))
            raise

    async def _compare_models(self, layout: ParameterLayout, state: RunState) -> None:
        begin, origin = state.spec.begin, state.origin
        assert begin is not None
        assert origin is not None
        if begin.file is not None:
            file = await self._file(begin)
            shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
            require_same_tensors(layout, shapes, begin.described, more=True)
            buffers = (tensor for name, tensor in file.tensors.items() if name not in layout.index)
            require_small_buffers(sum(tensor.stop - tensor.start for tensor in buffers), begin.described)
            return
        assert origin.layout is not None
        other = await self._layouts.read(origin.layout)
        shapes = {tensor.name: tensor.shape for tensor in other.tensors}
        require_same_tensors(layout, shapes, begin.described)

    # --- a site's part ------------------------------------------------------------------------------------------------

    async def ask(self, state: RunState, step: int, site: str) -> int | None:
        """The number of the snapshot for which a site is asked by the answer to this step, which then is on record."""
        number = asks(state, site, step)
        if number is not None:
            with suppress(ProblemError):  # another process has asked another site, or the run has ended
                state = await self._engine.apply(state.id, SnapshotAsked(site, state.members[site].attempt))
        return asks(state, site, step)

    async def take(self, run: str, number: int, site: str, attempt: int, upload: schemas.SnapshotUpload) -> None:
        """Raises InvalidError if that is not stored, or not of the run's model or log."""
        state = (await self._store.load(run)).state
        layout = await self._layouts.of(state)
        size, wanted = await self._blobs.require(upload.parameters, run), parameters_bytes(layout)
        if size != wanted:
            raise InvalidError("wrong_size", f"the parameters have {size} bytes; those of the layout take {wanted}")
        await require_buffers(self._blobs, upload.buffers, run, site)
        header = await self._logs.header(run, state.members[site].region, upload.position.seq)
        if (digest_json(header), header["step"]) != (upload.position.hash, upload.step):
            raise ConflictError("off_chain", f"entry {upload.position.seq} of site {site} is not in its region's log")
        await self._engine.apply(run, SnapshotTaken(site, attempt, number, upload))


def _page(state: RunState) -> schemas.SnapshotPage:
    items = [
        schemas.Snapshot(
            number=snapshot.number,
            step=snapshot.contents.step,
            manifest=snapshot.manifest,
            positions=snapshot.contents.positions,
        )
        for snapshot in state.snapshots
    ]
    wanted = state.wanted is not None and not state.status.terminal
    return schemas.SnapshotPage(items=items, wanted=state.wanted.number if wanted and state.wanted else None)
