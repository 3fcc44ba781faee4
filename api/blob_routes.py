"""Routes of blobs: uploads in one piece or in several, and downloads of all or of a range."""

from typing import Annotated

from fastapi import APIRouter, Header, Path, Request, Response
from fastapi.responses import StreamingResponse

from api import message
from api.content_digest import FIELD, content_digest_of
from api.errors import RangeError
from api.middleware import problem_response
from api.permissions import GuardedRoute, allowed
from api.ranges import byte_range
from api.routes import READERS, Caller, Coordinator

__all__ = ["v1"]

v1 = APIRouter(route_class=GuardedRoute)

Digest = Annotated[message.Digest, Path()]
UploadOffset = Annotated[int, Header(ge=0, le=2**48, description="which byte of the blob is the first of the body")]
UploadLength = Annotated[int, Header(ge=1, le=2**48, description="bytes of the blob")]


@v1.put("/blobs/{digest}", status_code=201)
@allowed("admin", "ranks")
async def put_blob(digest: Digest, request: Request, service: Coordinator, caller: Caller, response: Response) -> None:
    if not await service.put_blob(digest, request.stream(), caller):
        response.status_code = 200


@v1.patch("/blobs/{digest}", status_code=202)
@allowed("admin", "ranks")
async def append_blob(
    digest: Digest,
    request: Request,
    service: Coordinator,
    caller: Caller,
    upload_offset: UploadOffset,
    upload_length: UploadLength,
) -> Response:
    """Appends the body to the caller's upload of the blob, which is stored once it is whole (201)."""
    found = await service.append_blob(digest, upload_offset, upload_length, request.stream(), caller)
    headers = {"Upload-Offset": str(found.offset if found.size is None else found.size)}
    return Response(status_code=202 if found.size is None else 201, headers=headers)


@v1.head("/blobs/{digest}")
@allowed(*READERS)
async def head_blob(digest: Digest, service: Coordinator, caller: Caller) -> Response:
    found = await service.find_blob(digest, caller)
    if found.size is None:
        return Response(status_code=404, headers={"Upload-Offset": str(found.offset)} if found.offset else {})
    return Response(headers={"Content-Length": str(found.size), **_about(digest)})


@v1.get("/blobs/{digest}")
@allowed(*READERS)
async def get_blob(digest: Digest, request: Request, service: Coordinator) -> Response:
    size = await service.blob_size(digest)
    wanted = request.headers.get("range")
    if request.headers.get("if-range", _etag(digest)) != _etag(digest):
        wanted = None
    try:
        place = byte_range(wanted, size)
    except RangeError as error:
        refusal = problem_response(error)
        refusal.headers["Content-Range"] = f"bytes */{size}"
        return refusal
    start, stop = place or (0, size)
    headers = {"Content-Length": str(stop - start), **_about(digest)}
    if place is None:
        headers[FIELD] = content_digest_of(bytes.fromhex(digest))
    else:
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
    body = await service.blob(digest, start, stop)
    return StreamingResponse(
        body, status_code=200 if place is None else 206, media_type="application/octet-stream", headers=headers
    )


def _etag(digest: str) -> str:
    return f'"{digest}"'


def _about(digest: str) -> dict[str, str]:
    return {"Etag": _etag(digest), "Accept-Ranges": "bytes"}
