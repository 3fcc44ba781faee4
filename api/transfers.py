"""Blobs over links that break: uploads and downloads go on at the byte where they ended, in bounded memory."""

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import httpx

from api.content_digest import DIGEST_MISMATCH
from api.errors import ConflictError, InvalidError, IsthmusError, NotFoundError, ProblemError, UnreachableError

__all__ = ["BLOCK", "CHUNK", "WHOLE", "OtherBytesError", "Source", "blocks", "download", "source_of", "upload"]

BLOCK = 1 << 20
"""httpx slows down quadratically on one large bytes object: bodies are sent in blocks."""
WHOLE = 8 << 20
"""Bytes of the largest blob that is sent in one request."""
CHUNK = 16 << 20
"""Bytes of a larger one that are sent at once, and held in memory."""
_RESTARTS = 5
"""How often an upload may have to begin again, or go back."""
_PAUSE_S = 1.0


class OtherBytesError(IsthmusError):
    """What arrived is not the blob of that name."""


@dataclass(frozen=True)
class Source:
    """What can be read in blocks, more than once.

    Attributes:
        size: in bytes.
        blocks: all bytes from a place on, in blocks of any size; the same at every call.
    """

    size: int
    blocks: Callable[[int], Iterator[bytes]]


class Send(Protocol):
    """One request, tried again while the coordinator cannot be reached; a status among `fine` is no error.

    `resend`: whether the body may be sent again when it did not arrive as it is.
    """

    def __call__(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        fine: tuple[int, ...] = (),
        resend: bool = True,
    ) -> httpx.Response: ...


Open = Callable[[str, Mapping[str, str]], httpx.Response]
"""GETs a path with these headers, tried again like others; the body of what it returns is still to be read."""


def source_of(body: "bytes | Path | Source") -> Source:
    if isinstance(body, Path):
        return Source(body.stat().st_size, lambda start: _blocks_of_file(body, start))
    return Source(len(body), lambda start: blocks(body, start)) if isinstance(body, bytes) else body


def blocks(body: bytes, start: int = 0) -> Iterator[bytes]:
    view = memoryview(body)
    for begin in range(start, len(body), BLOCK):
        yield bytes(view[begin : begin + BLOCK])


def _blocks_of_file(path: Path, start: int) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while block := file.read(BLOCK):
            yield block


# --- up ---------------------------------------------------------------------------------------------------------------


def upload(send: Send, source: Source, patience_s: float) -> str:
    """Unless the blob is stored already; returns its digest. Gives up after `patience_s` without progress."""
    sha256 = hashlib.sha256()
    for block in source.blocks(0):
        sha256.update(block)
    digest = sha256.hexdigest()
    path = f"/v1/blobs/{digest}"
    offset = _arrived(send, path)
    if offset is not None and source.size <= WHOLE:
        body = b"".join(source.blocks(0))
        send("PUT", path, body=body, headers={"Content-Type": "application/octet-stream"})
    elif offset is not None:
        _upload_rest(send, path, source, offset, patience_s)
    return digest


def _arrived(send: Send, path: str) -> int | None:
    """Bytes of our upload that are there; None once the blob is stored."""
    found = send("HEAD", path, fine=(404,))
    return int(found.headers.get("Upload-Offset", 0)) if found.status_code == 404 else None


def _upload_rest(send: Send, path: str, source: Source, offset: int, patience_s: float) -> None:
    """From `offset` on. After anything that goes wrong, from where the coordinator says that it is."""
    best, progress, restarts = offset, time.monotonic(), 0
    there: int | None = offset
    while there is not None:
        try:
            _upload_from(send, path, source, there)
            return
        except (ConflictError, InvalidError, UnreachableError) as error:
            if isinstance(error, ProblemError) and error.code not in (DIGEST_MISMATCH, "wrong_offset"):
                raise
            there = _arrived(send, path)
            restarts += there is not None and there < best
            if restarts > _RESTARTS or (there == best and time.monotonic() - progress > patience_s):
                raise
            if there == best:
                time.sleep(_PAUSE_S)
            elif there is not None:
                best, progress = there, time.monotonic()


def _upload_from(send: Send, path: str, source: Source, offset: int) -> None:
    for chunk in _chunks(source, offset):
        if _append(send, path, source, offset, chunk).status_code != 202:
            return
        offset += len(chunk)
    if offset != source.size:
        raise IsthmusError(f"{path}: {source.size} bytes were announced, {offset} could be read")
    while _append(send, path, source, offset, b"").status_code == 202:  # it is being stored
        pass


def _append(send: Send, path: str, source: Source, offset: int, chunk: bytes) -> httpx.Response:
    place = {"Upload-Offset": str(offset), "Upload-Length": str(source.size)}
    headers = {"Content-Type": "application/octet-stream", **place}
    return send("PATCH", path, body=chunk, headers=headers, resend=False)


def _chunks(source: Source, start: int) -> Iterator[bytes]:
    pieces: list[bytes] = []
    size = 0
    for block in source.blocks(start):
        pieces.append(block)
        size += len(block)
        if size >= CHUNK:
            yield b"".join(pieces)
            pieces, size = [], 0
    if size:
        yield b"".join(pieces)


# --- down -------------------------------------------------------------------------------------------------------------


_DAMAGED = "try again, and if it does so again, restore the coordinator's copy from a backup: it is damaged"


def download(open_: Open, digest: str, patience_s: float) -> Iterator[bytes]:
    """The blob in blocks; when a connection breaks, it goes on with the next byte.

    Raises:
        OtherBytesError: at the end, that it was not the blob of that name.
        NotFoundError: the coordinator does not have it.
        httpx.TransportError: connections bring nothing for longer than `patience_s`.
    """
    sha256 = hashlib.sha256()
    done, size, heard = 0, -1, time.monotonic()
    while done != size:
        before = done
        with closing(_open(open_, digest, done)) as answer:
            size = _size(answer)
            try:
                for block in _from_place(answer, done):
                    sha256.update(block)
                    done += len(block)
                    yield block
            except httpx.TransportError:
                if done == before and time.monotonic() - heard > patience_s:
                    raise
        if done > before:
            heard = time.monotonic()
        elif done != size:
            time.sleep(_PAUSE_S)
    if sha256.hexdigest() != digest:
        raise OtherBytesError(f"blob {digest} arrived with other bytes than its name says; {_DAMAGED}")


def _open(open_: Open, digest: str, place: int) -> httpx.Response:
    try:
        return open_(f"/v1/blobs/{digest}", _from(place))
    except NotFoundError as error:
        if error.code != "blob_not_found":
            raise
        gone = f"blob {digest} is not stored at the coordinator any more: restore it there from a backup"
        raise NotFoundError(error.code, gone, context=error.context) from None


def _from(place: int) -> dict[str, str]:
    """Bytes of the blob itself are counted: nothing in between may compress them."""
    whole = {"Accept-Encoding": "identity"}
    return {**whole, "Range": f"bytes={place}-"} if place else whole


def _size(answer: httpx.Response) -> int:
    if answer.status_code == 206:
        return int(answer.headers["Content-Range"].rpartition("/")[2])
    return int(answer.headers["Content-Length"])


def _from_place(answer: httpx.Response, place: int) -> Iterator[bytes]:
    """Something in between may have taken the range off the request."""
    skip = place if answer.status_code == 200 else 0
    for block in answer.iter_bytes():
        if len(block) > skip:
            yield block[skip:]
        skip = max(skip - len(block), 0)
