"""Blobs in the making, in files of a local directory: written, verified, and only then given to the store.

Drafts of killed processes are removed; uploads stay for an hour after their last byte. Several processes may share the
directory. Knows nothing of what a store does with a finished file.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import Any, Self

from api.errors import ConflictError, StorageFullError, TooLargeError

__all__ = ["Draft", "Drafts", "Keep", "Upload", "check_size"]

Keep = Callable[[Path, str], None]
"""Takes the file, whose bytes are on the disk and have that digest, into the store; it may move it."""

UPLOAD_KEPT_S = 3600.0
_HASHES_KEPT = 64
_READ = 1 << 20


class Drafts:
    """`max_bytes` bounds one blob."""

    def __init__(self, root: Path, keep: Keep, max_bytes: int) -> None:
        self.root = root
        self.max_bytes = max_bytes
        self._keep = keep
        self._incoming = root / "incoming"
        self._uploads = root / "uploads"
        self._hashes = _Hashes()
        with storage_errors(root):
            self._incoming.mkdir(parents=True, exist_ok=True)
            self._uploads.mkdir(exist_ok=True)
        _remove_unlocked(self._incoming.iterdir())

    def draft(self) -> "Draft":
        with storage_errors(self.root):
            while True:
                path = self._incoming / os.urandom(16).hex()
                file = path.open("xb", buffering=0)
                fcntl.flock(file, fcntl.LOCK_EX)
                if os.fstat(file.fileno()).st_nlink:
                    return Draft(self, path, file)
                file.close()  # a process that started just then took it for a stale one

    def upload(self, digest: str, owner: str) -> "Upload":
        return Upload(self, self._uploads / f"{digest}.{hashlib.sha256(owner.encode()).hexdigest()[:16]}", digest)

    def remove_stale_uploads(self) -> None:
        """By the clock of the disk, which may be another machine's."""
        with storage_errors(self.root):
            probe = self._incoming / os.urandom(16).hex()
            probe.touch()
            now = probe.stat().st_mtime
            probe.unlink()
        _remove_unlocked(self._uploads.iterdir(), before=now - UPLOAD_KEPT_S)

    def keep(self, path: Path, digest: str) -> None:
        with storage_errors(self.root):
            self._keep(path, digest)

    @property
    def hashes(self) -> "_Hashes":
        return self._hashes


class Draft:
    """A file, locked while it is in use, that knows its size and digest so far. Discarded at the end of its `with`."""

    def __init__(self, drafts: Drafts, path: Path, file: RawIOBase, size: int = 0, sha256: Any = None) -> None:
        self.size = size
        self._drafts = drafts
        self._path = path
        self._file = file
        self._sha256 = sha256 or hashlib.sha256()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()

    def write(self, data: bytes | memoryview) -> None:
        check_size(self.size + len(data), self._drafts.max_bytes)
        self._sha256.update(data)
        self.size += len(data)
        view = memoryview(data)
        with storage_errors(self._drafts.root):
            while view:
                view = view[self._file.write(view) :]

    @property
    def digest(self) -> str:
        """Of what was written so far."""
        return str(self._sha256.hexdigest())

    def commit(self) -> str:
        """On the disk, and then in the store under the digest that this returns."""
        with storage_errors(self._drafts.root):
            os.fsync(self._file.fileno())
        self._drafts.keep(self._path, self.digest)
        return self.digest

    def close(self) -> None:
        """Leaves the file where it is."""
        self._file.close()

    def discard(self) -> None:
        """Leaves nothing behind; after a commit it only closes the file."""
        self._path.unlink(missing_ok=True)
        self._file.close()


@dataclass(frozen=True)
class Upload:
    """What has arrived of a blob. Every method looks at the file anew: others may append to it, too."""

    drafts: Drafts
    path: Path
    digest: str

    def size(self) -> int:
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    def append(self, offset: int, data: bytes) -> None:
        """
        Raises:
            ConflictError: `wrong_offset`: this is not what comes next.
        """
        check_size(offset + len(data), self.drafts.max_bytes)
        with storage_errors(self.drafts.root), self._locked(offset) as file:
            try:
                view = memoryview(data)
                while view:
                    view = view[file.write(view) :]
            except OSError:
                os.ftruncate(file.fileno(), offset)
                raise
            self.drafts.hashes.add(self.path, offset, data)

    def cut(self, offset: int, end: int) -> None:
        """Takes back what was appended last, from `offset` to `end`, unless more has come since."""
        with contextlib.suppress(ConflictError), self._locked(end) as file:
            os.ftruncate(file.fileno(), offset)
            self.drafts.hashes.forget(self.path)

    def draft(self) -> Draft | None:
        """All of it, for good; None if another process has just taken it."""
        try:
            file = self.path.open("r+b", buffering=0)
        except FileNotFoundError:
            return None
        if not _lock(file) or not os.fstat(file.fileno()).st_nlink:
            file.close()
            return None
        size, sha256 = self.drafts.hashes.take(self.path)
        file.seek(size)
        while block := file.read(_READ):
            sha256.update(block)
            size += len(block)
        return Draft(self.drafts, self.path, file, size, sha256)

    @contextlib.contextmanager
    def _locked(self, size: int) -> Iterator[RawIOBase]:
        with self.path.open("ab", buffering=0) as file:
            there = os.fstat(file.fileno()) if _lock(file) else None
            if there is None or there.st_size != size or not there.st_nlink:
                raise self.wrong_offset(size)
            yield file

    def wrong_offset(self, offset: int) -> ConflictError:
        size = self.size()
        return ConflictError(
            "wrong_offset",
            f"byte {offset} of blob {self.digest} is not the next one: {size} bytes have arrived, go on from there",
            context={"offset": size},
        )


class _Hashes:
    """SHA-256 of uploads as far as this process has written them, so that no file is read only for its digest."""

    def __init__(self) -> None:
        self._by_path: OrderedDict[Path, tuple[int, Any]] = OrderedDict()

    def add(self, path: Path, offset: int, data: bytes) -> None:
        size, sha256 = self._by_path.get(path, (0, None)) if offset else (0, hashlib.sha256())
        if sha256 is None or size != offset:
            self.forget(path)
            return
        sha256.update(data)
        self._by_path[path] = (size + len(data), sha256)
        self._by_path.move_to_end(path)
        while len(self._by_path) > _HASHES_KEPT:
            self._by_path.popitem(last=False)

    def take(self, path: Path) -> tuple[int, Any]:
        return self._by_path.pop(path, None) or (0, hashlib.sha256())

    def forget(self, path: Path) -> None:
        self._by_path.pop(path, None)


def check_size(size: int, most: int) -> None:
    if size > most:
        raise TooLargeError(
            "blob_too_large",
            f"the blob is larger than the {most} bytes that this coordinator accepts for one",
            context={"max_bytes": most},
        )


@contextlib.contextmanager
def storage_errors(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise StorageFullError(
            "storage_full",
            f"the disk under the blob directory {root} is full ({error.strerror}); free some space on it",
        ) from error


def _lock(file: RawIOBase) -> bool:
    """Until it is closed; false if another holds it."""
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_unlocked(paths: Iterator[Path], before: float | None = None) -> None:
    """A living process holds a lock on each of its own."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError), path.open("rb", buffering=0) as file:
            if (before is None or os.fstat(file.fileno()).st_mtime < before) and _lock(file):
                path.unlink()
