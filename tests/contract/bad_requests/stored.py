"""Blobs and metrics."""

from tests.contract.bad_requests.case import Case, Http

__all__ = ["CASES"]


def _points(what: str, points: str, detail: str, status: int = 422) -> Case:
    body = f'{{"site": "SITE", "points": {points}}}'
    code = "invalid_request" if status == 422 else ""
    return Case(what, Http("POST", "/v1/runs/RUN/metrics", "ranks", body), status, code, detail)


def _piece(offset: int, length: int, body: bytes = b"x") -> Http:
    headers = {"Upload-Offset": str(offset), "Upload-Length": str(length)}
    return Http("PATCH", "/v1/blobs/ZERO", "ranks", body, headers=headers)


CASES = [
    Case(
        "a blob with other bytes than its name says",
        Http("PUT", "/v1/blobs/ZERO", "ranks", b"x"),
        422,
        "digest_mismatch",
        "the 1 bytes received for blob ZERO have the digest 2d711642b726b044",
    ),
    Case("a blob that is not stored", Http("GET", "/v1/blobs/ZERO"), 404, "blob_not_found", "blob ZERO is not stored"),
    Case("a short digest", Http("GET", "/v1/blobs/short"), 422, "invalid_request", "path.digest: String should match"),
    Case("a digest in capitals", Http("GET", f"/v1/blobs/{'F' * 64}"), 422, "invalid_request", "path.digest"),
    Case("a digest and a line break", Http("GET", "/v1/blobs/ZERO%0a"), 422, "invalid_request", "path.digest"),
    Case("a path as digest", Http("PUT", "/v1/blobs/..%2f..%2fetc", "ranks", b"x"), 404, "no_such_route", "nothing at"),
    Case(
        "a range of a blob of which nothing is there",
        Http("GET", "/v1/blobs/EMPTY", headers={"Range": "bytes=5-"}),
        416,
        "range_not_satisfiable",
        "bytes=5- of a blob of 0 bytes is nothing",
    ),
    Case(
        "a piece of an upload that is not the next one",
        _piece(offset=7, length=9),
        409,
        "wrong_offset",
        "byte 7 of blob ZERO is not the next one: 0 bytes have arrived, go on from there",
    ),
    Case(
        "a piece of an upload that is longer than all of it",
        _piece(offset=0, length=1, body=b"xy"),
        422,
        "upload_too_long",
        "more bytes were sent than Upload-Length says: 1",
    ),
    Case(
        "a piece of an upload without its place",
        Http("PATCH", "/v1/blobs/ZERO", "ranks", b"x"),
        422,
        "invalid_request",
        "header.upload-offset: Field required",
    ),
    _points("metrics that are no numbers: stored as null", '[{"step": 1, "values": {"a": NaN, "b": 1e999}}]', "", 204),
    _points(
        "a metric as text", '[{"step": 1, "values": {"loss": "low"}}]', "body.points.0.values.loss: Input should be"
    ),
    _points("a metric of 400 digits", '[{"step": 1, "values": {"x": 1' + "0" * 400 + "}}]", "body.points.0.values.x"),
    _points("metrics of step -1", '[{"step": -1, "values": {}}]', "body.points.0.step: Input should be greater"),
    _points(
        "metrics of step 2^63", f'[{{"step": {2**63}, "values": {{}}}}]', "body.points.0.step: Input should be less"
    ),
    _points("a metric's name of 65 characters", '[{"step": 1, "values": {"' + "x" * 65 + '": 1}}]', "at most 64 char"),
    _points("a metric's name that is no text", '[{"step": 1, "values": {"\\ud800": 1}}]', "body.points.0.values"),
    _points(
        "65 metrics in a point",
        '[{"step": 1, "values": {' + ", ".join(f'"{n}": 1' for n in range(65)) + "}}]",
        "body.points.0.values: Dictionary should have at most 64 items",
    ),
    _points(
        "1,001 points",
        "[" + ", ".join(['{"step": 1, "values": {}}'] * 1001) + "]",
        "body.points: List should have at most 1000 items",
    ),
    _points(
        "a point with a field that nobody knows", '[{"step": 1, "values": {}, "at": 1}]', "body.points.0.at: Extra"
    ),
    Case(
        "series of no points",
        Http("GET", "/v1/runs/RUN/metrics?max_points=0"),
        422,
        "invalid_request",
        "query.max_points: Input should be greater than or equal to 1",
    ),
]
