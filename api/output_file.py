"""What a user asked to be written: files whole or not there; where they cannot be, that is said before any work."""

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from api.errors import IsthmusError

__all__ = ["make_directory", "output_file", "require_writable"]


@contextlib.contextmanager
def output_file(path: Path) -> Iterator[BinaryIO]:
    """A draft beside `path` that takes its place at the end.

    Raises:
        IsthmusError: `path` is a folder, or in one that is not there, or cannot be written.
    """
    try:
        if path.is_dir():
            raise IsthmusError(f"cannot write {path}: it is a folder; name a file in it")
        if not path.parent.is_dir():
            raise IsthmusError(f"cannot write {path}: there is no folder {path.parent}; make it first")
        draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            with draft.open("wb") as file:
                yield file
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise IsthmusError(f"cannot write {path}: {error.strerror}") from None


def require_writable(path: Path) -> None:
    """Raises IsthmusError as `output_file` does; leaves `path` as it is."""
    with contextlib.suppress(_EnoughError), output_file(path):
        raise _EnoughError


class _EnoughError(Exception):
    """A draft could be opened."""


def make_directory(path: Path, mode: int = 0o777) -> None:
    """With its parents, unless it is there. Raises IsthmusError if it cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=mode)
    except OSError as error:
        reason = "it is a file" if isinstance(error, FileExistsError) else error.strerror
        raise IsthmusError(f"cannot make the directory {path}: {reason}; name another") from None
