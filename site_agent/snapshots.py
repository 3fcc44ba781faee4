"""A snapshot as a site sees it: the parameters to a file, tensor by tensor, and from there to the coordinator.

The upload goes on while the site trains. What fails is no reason to end the run: another snapshot will be asked for.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import structlog

from algorithms.flat import FlatParameters
from api.client import CoordinatorClient
from api.errors import GoneError, IsthmusError
from api.schemas import Position, SnapshotUpload
from site_agent.replica import Replica
from site_agent.settings import Session

__all__ = ["Snapshots", "write_parameters"]

log = structlog.get_logger()

_NAME = "snapshot"


def write_parameters(holder: FlatParameters, path: Path) -> None:
    """All parameters as they are digested: float32, little-endian, in layout order."""
    with path.open("wb") as file:
        file.writelines(holder.blocks(range(len(holder.layout.tensors))))


def _remove_left_behind(attempts: Path) -> None:
    """What earlier ranks, which were killed, have left in folders of their own: files as large as the model."""
    for path in attempts.glob(f"*/{_NAME}"):
        with contextlib.suppress(OSError):
            path.unlink()


class Snapshots:
    """At rank 0. `buffers` gives those of the model, as safetensors, or None."""

    def __init__(
        self,
        session: Session,
        client: CoordinatorClient,
        holder: FlatParameters,
        replica: Replica,
        buffers: Callable[[], bytes | None],
    ) -> None:
        self._session = session
        self._client = client
        self._holder = holder
        self._replica = replica
        self._buffers = buffers
        self._upload: Thread | None = None
        _remove_left_behind(session.folder.parent)

    def take(self, number: int) -> None:
        """Of the parameters as they are now; nothing, if one is still on its way."""
        if self._upload is not None and self._upload.is_alive():
            return
        assert self._replica.position is not None
        place = number, self._replica.position, self._replica.step
        path = self._session.folder / _NAME
        try:
            write_parameters(self._holder, path)
        except OSError as error:
            log.error("cannot write a snapshot", number=number, path=str(path), error=str(error))
            path.unlink(missing_ok=True)
            return
        self._upload = Thread(target=self._send, args=(*place, path, self._buffers()), daemon=True)
        self._upload.start()

    def _send(self, number: int, position: Position, step: int, path: Path, buffers: bytes | None) -> None:
        try:
            upload = SnapshotUpload(
                position=position,
                step=step,
                parameters=self._client.put_blob(path),
                buffers=None if buffers is None else self._client.put_blob(buffers),
            )
            self._client.take_snapshot(self._session.run, number, self._session.site, upload)
        except (IsthmusError, OSError) as error:
            if not (isinstance(error, GoneError) and error.code == "run_ended"):
                log.error("cannot upload a snapshot", number=number, step=step, error=str(error))
        else:
            log.info("snapshot", number=number, step=step)
        finally:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def finish(self) -> None:
        """Waits for the upload that is on its way."""
        if self._upload is not None:
            self._upload.join()
