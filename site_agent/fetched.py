"""Blobs at a site: rank 0 fetches one to a file and verifies it; then all ranks read it by range, in bounded memory."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from api.client import CoordinatorClient
from api.errors import IsthmusError

__all__ = ["Fetch", "Fetched", "Share", "fetched"]

Share = Callable[[bytes | None], bytes]
"""Rank 0's bytes, at every rank; the others pass None."""


@dataclass(frozen=True)
class Fetched:
    """A blob that is what its name says. `read(start, stop)` is called in the same order at every rank."""

    size: int
    read: Callable[[int, int], bytes]

    def whole(self) -> bytes:
        return self.read(0, self.size)


Fetch = Callable[[str], AbstractContextManager[Fetched]]
"""A blob by its digest, at every local rank."""


@contextmanager
def fetched(client: CoordinatorClient | None, share: Share, folder: Path, digest: str) -> Iterator[Fetched]:
    """Only rank 0 has a client. The file has no name in `folder`, so that nothing is left of it.

    Raises:
        IsthmusError: it cannot be had, or not be written.
    """
    if client is None:
        yield Fetched(int(share(None)), lambda *_: share(None))
        return
    with ExitStack() as stack:
        try:
            file = stack.enter_context(tempfile.TemporaryFile(dir=folder))
            client.copy_blob(digest, file)
            size = file.seek(0, os.SEEK_END)
        except OSError as error:
            raise IsthmusError(f"cannot write blob {digest} to {folder}: {error}; make room for it there") from error
        share(str(size).encode())
        yield Fetched(size, lambda start, stop: share(_range(file, start, stop)))


def _range(file: IO[bytes], start: int, stop: int) -> bytes:
    file.seek(start)
    return file.read(stop - start)
