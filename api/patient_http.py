"""One coordinator, asked over HTTP with one token: what is tried again, and what is an error.

Requests are idempotent by design, so that a failed connection, a 408, a 429, a 502, a 503, a 504, a 507, or a body that
was changed on its way, either way, is tried again with the same bytes, no sooner than its Retry-After says.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
import stamina
from pydantic import BaseModel, ValidationError

from api.content_digest import DIGEST_MISMATCH, FIELD, agrees, content_digest
from api.errors import (
    PROBLEM_MEDIA_TYPE,
    Problem,
    ProblemError,
    UnavailableError,
    UnreachableError,
    error_from_problem,
)
from api.payload import MEDIA_TYPE
from api.tls import certificate_fault, is_no_tls
from api.transfers import blocks
from api.transport import transport_to

__all__ = ["PatientHttp", "Waiting"]

_TRY_AGAIN = frozenset({408, 429, 502, 503, 504, 507})
_TIMEOUT = {"timeout": httpx.Timeout(30.0, read=90.0).as_dict()}
_LONGEST_S = 60.0
"""Of what a Retry-After may ask for."""


Waiting = Callable[[UnreachableError], None]


class _TryAgainError(Exception):
    def __init__(self, error: ProblemError, after_s: float | None = None) -> None:
        super().__init__(str(error))
        self.error = error
        self.after_s = after_s


def _again(error: Exception) -> bool | float:
    """Whether to try again; or after how many seconds, not the same for all who were told the same."""
    if isinstance(error, _TryAgainError) and error.after_s is not None:
        return error.after_s * random.uniform(1.0, 1.5)
    return isinstance(error, httpx.TransportError | _TryAgainError)


def _again_if_refused(error: Exception) -> bool | float:
    """The body did not arrive, or not as it is: the caller will find out how much of it did."""
    arrived = isinstance(error, _TryAgainError) and error.error.code != DIGEST_MISMATCH
    return arrived and _again(error)


def _retry_after(response: httpx.Response) -> float | None:
    """Seconds; the other form, a date, is for browsers."""
    text = response.headers.get("Retry-After", "")
    return min(float(text), _LONGEST_S) if text.isascii() and text.isdigit() else None


class PatientHttp:
    """The arguments are those of `CoordinatorClient`."""

    def __init__(
        self,
        url: str,
        token: str | None,
        transport: httpx.BaseTransport | None,
        ca_file: Path | None,
        patience: float,
        waiting: Waiting | None,
    ) -> None:
        self.url = url.rstrip("/")
        self.patience = patience
        self._waiting = waiting
        self._headers = {"User-Agent": "isthmus"} | ({"Authorization": f"Bearer {token}"} if token else {})
        self._transport = transport or transport_to(self.url, ca_file)

    def close(self) -> None:
        self._transport.close()

    def send(
        self,
        method: str,
        path: str,
        *,
        json: BaseModel | None = None,
        body: bytes | None = None,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        fine: tuple[int, ...] = (),
        resend: bool = True,
    ) -> httpx.Response:
        """One request, tried again while the coordinator cannot be reached; a status among `fine` is no error.

        `resend`: whether the body may be sent again when it did not arrive as it is.

        Raises:
            ProblemError: the coordinator refused, with its reason.
            UnreachableError: no answer within the client's patience.
        """
        sent = dict(headers or {})
        if json is not None:
            body, sent["Content-Type"] = json.model_dump_json().encode(), "application/json"
        elif body is not None:
            sent.setdefault("Content-Type", MEDIA_TYPE)
        if body is not None:
            sent["Content-Length"] = str(len(body))
            sent[FIELD] = content_digest(body)
        query = urlencode({name: value for name, value in (params or {}).items() if value is not None})
        target = f"{path}?{query}" if query else path

        def once() -> httpx.Response:
            with closing(self._exchange(method, target, sent, blocks(body) if body is not None else None)) as response:
                response.read()
            return response if response.status_code in fine else self._checked(response)

        return self._patiently(once, resend)

    def open(self, path: str, headers: Mapping[str, str]) -> httpx.Response:
        """As `send` of a GET, but the body of the answer is still to be read."""

        def once() -> httpx.Response:
            response = self._exchange("GET", path, headers)
            if response.is_success:
                return response
            with closing(response):
                response.read()
            return self._checked(response)

        return self._patiently(once)

    def _exchange(
        self, method: str, target: str, headers: Mapping[str, str], content: Iterator[bytes] | None = None
    ) -> httpx.Response:
        """An answer whose body is still to be read.

        Straight by the transport: what `httpx.Client` adds, redirects, cookies and more, is not wanted here, and takes
        as much time as the rest of a round's request.
        """
        request = httpx.Request(
            method, self.url + target, headers={**self._headers, **headers}, content=content, extensions=_TIMEOUT
        )
        response = self._transport.handle_request(request)
        response.request = request
        return response

    def _patiently(self, once: Callable[[], httpx.Response], resend: bool = True) -> httpx.Response:
        on = _again if resend else _again_if_refused
        try:
            for attempt in stamina.retry_context(on=on, attempts=None, timeout=self.patience, wait_max=2.0):
                with attempt:
                    return self._telling(once)
        except httpx.TransportError as error:
            raise self.unreachable(error) from error
        except _TryAgainError as error:
            if not resend and error.error.code == DIGEST_MISMATCH:
                raise error.error from None
            raise self.unreachable(error) from error.error
        raise AssertionError("stamina ends by returning or raising")

    def _telling(self, once: Callable[[], httpx.Response]) -> httpx.Response:
        """Whoever waits for the first answer is told so, once."""
        waiting, self._waiting = self._waiting, None
        try:
            return once()
        except (httpx.TransportError, _TryAgainError) as error:
            if waiting is not None:
                waiting(self.unreachable(error))
            raise

    def unreachable(self, error: httpx.TransportError | _TryAgainError) -> UnreachableError:
        if isinstance(error, _TryAgainError):
            return UnreachableError(f"the coordinator at {self.url} is not available: {error}")
        if (fault := certificate_fault(error)) is not None:
            return UnreachableError(
                f"the certificate of {self.url} is not trusted here ({fault}); if a private authority has signed "
                "it, name that one's PEM file with ISTHMUS_CA_FILE",
                lasts=True,
            )
        if is_no_tls(error):
            plain = self.url.replace("https", "http", 1)
            return UnreachableError(f"what answers at {self.url} is not HTTPS: is its URL {plain}?", lasts=True)
        return UnreachableError(
            f"no answer from the coordinator at {self.url} ({error or type(error).__name__}); "
            "is it running, and is the URL right?"
        )

    @staticmethod
    def _checked(response: httpx.Response) -> httpx.Response:
        if not agrees(response.headers.get(FIELD), response.content) and response.request.method != "HEAD":
            where = f"{response.request.method} {response.request.url}"
            raise _TryAgainError(UnavailableError(DIGEST_MISMATCH, f"the answer to {where} was changed on its way"))
        if response.is_success:
            return response
        error = _problem_of(response)
        if response.status_code in _TRY_AGAIN or error.code == DIGEST_MISMATCH:
            raise _TryAgainError(error, _retry_after(response))
        raise error


def _problem_of(response: httpx.Response) -> ProblemError:
    if response.headers.get("content-type", "").startswith(PROBLEM_MEDIA_TYPE):
        try:
            return error_from_problem(Problem.model_validate_json(response.content))
        except ValidationError:
            pass
    status = response.status_code
    return error_from_problem(
        Problem(
            type=f"urn:isthmus:problem:http_{status}",
            title=response.reason_phrase,
            status=status,
            code=f"http_{status}",
            detail=f"{response.request.method} {response.request.url} was answered {status} {response.reason_phrase} "
            "by something that is not an Isthmus coordinator, such as a proxy in between",
        )
    )
