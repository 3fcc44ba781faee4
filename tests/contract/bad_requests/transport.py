"""What is wrong with a request as HTTP, before anybody looks at what it means."""

from tests.contract.bad_requests.case import CLOSED, Case, Http, Wire

__all__ = ["CASES"]

_PART = "/v1/runs/RUN/regions/west/steps/STEP/contributions/SITE/parts/0"
_BLOB = "/v1/blobs/ZERO"


def headers_only(line: str, *headers: str, token: str = "RANKS") -> Wire:
    """Only the headers of a request are sent: an answer that needs the body would never come."""
    return Wire("\n".join([f"{line} HTTP/1.1", "Host: x", f"Authorization: Bearer {token}", *headers, "", ""]))


def _too_large(what: str, line: str, size: int, limit: int) -> Case:
    detail = f"the body of {size} bytes exceeds the limit of {limit} bytes"
    return Case(what, headers_only(line, f"Content-Length: {size}"), 413, "body_too_large", detail)


_SIZES = [
    _too_large("a contribution of a byte too much", f"PUT {_PART}", (8 << 20) + 1, 8 << 20),
    _too_large("a blob of a byte too much", f"PUT {_BLOB}", (64 << 30) + 1, 64 << 30),
    _too_large("a layout of a byte too much", "PUT /v1/runs/RUN/sites/SITE/layout", (32 << 20) + 1, 32 << 20),
    _too_large("a spec of a byte too much", "POST /v1/runs", (4 << 20) + 1, 4 << 20),
    _too_large("a heartbeat of a byte too much", "POST /v1/sites/SITE/heartbeat", (4 << 20) + 1, 4 << 20),
    _too_large("a length of 20 digits", "POST /v1/runs", 10**19, 4 << 20),
]

_FORMS = [
    Case(
        "a chunked body",
        headers_only(f"PUT {_BLOB}", "Transfer-Encoding: chunked"),
        411,
        "length_required",
        "send a Content-Length; chunked bodies are not accepted",
    ),
    Case(
        "a compressed body",
        headers_only(f"PUT {_BLOB}", "Content-Encoding: gzip", "Content-Length: 10"),
        415,
        "compressed_body",
        "send it without Content-Encoding",
    ),
    Case(
        "no length and no body",
        headers_only(f"PUT {_PART}", "Content-Type: application/vnd.isthmus+safetensors"),
        422,
        "bad_contribution",
        "0 bytes are too few for a safetensors message",
    ),
    Case(
        "a contribution without a media type",
        Http("PUT", _PART, "ranks", body=b"x"),
        415,
        "media_type",
        "a contribution is application/vnd.isthmus+safetensors; set Content-Type to that",
    ),
    Case(
        "a contribution as JSON",
        Http("PUT", _PART, "ranks", body="{}"),
        415,
        "media_type",
        "a contribution is application/vnd.isthmus+safetensors",
    ),
    Case(
        "JSON as text/plain",
        Http("POST", "/v1/runs", body="{}", headers={"Content-Type": "text/plain"}),
        422,
        "invalid_request",
        "body: Input should be a valid dictionary",
    ),
    Case(
        "a body that is not the one of its Content-Digest",
        Http("PUT", _BLOB, "ranks", body=b"x", headers={"Content-Digest": "sha-256=:AAAA:"}),
        422,
        "digest_mismatch",
        "the body is not the one that Content-Digest names",
    ),
]

_GARBAGE = "Invalid HTTP request received."
_BROKEN = [
    Case("bytes that are no HTTP", Wire("\x16\x03\x01\x02\x00\x01\x00\n\n"), 400, "", _GARBAGE),
    Case("a line that is no request", Wire("hello\n\n"), 400, "", _GARBAGE),
    Case(
        "a length, and chunks as well",
        headers_only("POST /v1/runs", "Content-Length: 5", "Transfer-Encoding: chunked"),
        400,
        "",
        _GARBAGE,
    ),
    Case(
        "a path of 100 kB",
        Wire("GET /" + "x" * 100_000 + " HTTP/1.1\nHost: x\n\n"),
        414,
        "",
        "The URL of a request takes at most 61440 bytes.",
    ),
    Case(
        "a head without end",
        Wire("GET /v1/runs HTTP/1.1\nx: " + "y" * 70_000),
        431,
        "",
        "The head of a request takes at most 65536 bytes.",
    ),
    Case(
        "two different lengths",
        headers_only("POST /v1/runs", "Content-Length: 5", "Content-Length: 6"),
        400,
        "",
        _GARBAGE,
    ),
    Case("a negative length", headers_only("POST /v1/runs", "Content-Length: -1"), 400, "", _GARBAGE),
    Case("a length that is no number", headers_only("POST /v1/runs", "Content-Length: x"), 400, "", _GARBAGE),
    Case("a length of 400 digits", headers_only("POST /v1/runs", "Content-Length: 1" + "0" * 399), 400, "", _GARBAGE),
    Case("a header with a line break", headers_only("GET /v1/runs", "x: a\n: b"), 400, "", _GARBAGE),
    Case("no Host", Wire("GET /v1/runs HTTP/1.1\n\n"), 400, "", _GARBAGE),
    Case("two Hosts", headers_only("GET /v1/runs", "Host: y"), 400, "", _GARBAGE),
    Case(
        "a blob that ends before its length, and then the connection does",
        Wire(headers_only(f"PUT {_BLOB}", "Content-Length: 100").text + "only this", ends=True),
        CLOSED,
        "",
        "",
    ),
    Case(
        "a contribution that ends before its length, and then the connection does",
        Wire(
            headers_only(
                f"PUT {_PART}", "Content-Type: application/vnd.isthmus+safetensors", "Content-Length: 100"
            ).text
            + "only this",
            ends=True,
        ),
        CLOSED,
        "",
        "",
    ),
    Case(
        "JSON that ends before its length, and then the connection does",
        Wire(
            headers_only(
                "PUT /v1/runs/RUN/sites/SITE/final", "Content-Type: application/json", "Content-Length: 100"
            ).text
            + '{"seq": 0',
            ends=True,
        ),
        CLOSED,
        "",
        "",
    ),
    Case(
        "a body that stops arriving (after a minute)",
        Wire(headers_only(f"PUT {_BLOB}", "Content-Length: 100").text + "only this"),
        408,
        "body_timeout",
        "the body stopped arriving",
        slow=True,
    ),
]

_ROUTES = [
    Case(
        "a route that is not there",
        Http("GET", "/v1/nothing"),
        404,
        "no_such_route",
        "there is nothing at GET /v1/nothing",
    ),
    Case(
        "a path of 60 kB",
        Wire("GET /" + "x" * 60_000 + " HTTP/1.1\nHost: x\n\n"),
        404,
        "no_such_route",
        "there is nothing at GET /xxx",
    ),
    Case("a method that is not there", Http("PATCH", "/v1/runs"), 405, "http_405", "PATCH is not possible at /v1/runs"),
    Case(
        "a WebSocket: answered as if it were none",
        Http("GET", "/v1/runs", headers={"Connection": "Upgrade", "Upgrade": "websocket"}),
        200,
        "",
        '"items"',
    ),
    Case("a page that is not there", Http("GET", "/nothing", None), 404, "no_such_route", "nothing at GET /nothing"),
    Case("a file of the page that is not there", Http("GET", "/web/no.js", None), 404, "no_such_route", "/web/no.js"),
    Case(
        "a file outside of the page's folder",
        Http("GET", "/web/%2e%2e%2f%2e%2e%2f%2e%2e%2fetc%2fpasswd", None),
        404,
        "no_such_route",
        "there is nothing at GET",
    ),
    Case("a file above the page's folder", Http("GET", "/web/..%2fapp.py", None), 404, "no_such_route", "nothing at"),
    Case("an absolute path", Http("GET", "/web//etc/passwd", None), 404, "no_such_route", "/web//etc/passwd"),
    Case("a zero byte in a path", Http("GET", "/web/%00", None), 404, "no_such_route", "there is nothing at GET /web/"),
    Case(
        "a file that is written to",
        Http("POST", "/web/app.js", None),
        405,
        "http_405",
        "POST is not possible at /web/app.js",
    ),
]

CASES = [*_SIZES, *_FORMS, *_BROKEN, *_ROUTES]
