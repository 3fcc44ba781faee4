"""CoordinatorClient: the REST API as methods. Used by the command line and by site agents.

The transport is injectable, so that tests and the byte counters see every request. Requests are idempotent by design,
so that a failed connection, a 408, a 429, a 502, a 503, a 504, a 507, or a body that was changed on its way, either
way, is tried again with the same bytes, no sooner than its Retry-After says.
"""

import random
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import IO, Any, Self, TypeVar
from urllib.parse import quote

import httpx
import stamina
from pydantic import BaseModel, ValidationError

from api import schemas
from api.access import AuditPage, IssuedToken, Token, TokenPage, TokenRequest
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
from api.service import Answer
from api.tls import certificate_fault, is_loopback, trusted
from api.transfers import OtherBytesError, Source, blocks, download, source_of, upload

__all__ = ["CoordinatorClient", "UnreachableError"]

_TRY_AGAIN = frozenset({408, 429, 502, 503, 504, 507})
_LONGEST_S = 60.0
"""Of what a Retry-After may ask for."""

_DAMAGED_AT_MOST = 3
"""Downloads of one blob that arrive with other bytes."""

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")


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


class CoordinatorClient:
    """Talks to one coordinator with one token.

    Args:
        url: of the coordinator, with a path prefix if there is one.
        token: bearer token; None for the few public routes.
        transport: replaces the network, in tests and for counting bytes; `ca_file` is its own business.
        ca_file: PEM file of the authority whose certificates are trusted, and of no other.
        patience: seconds for which an unreachable coordinator is tried again.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        transport: httpx.BaseTransport | None = None,
        ca_file: Path | None = None,
        patience: float = 60.0,
    ) -> None:
        self.url = url.rstrip("/")
        self._patience = patience
        self._http = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=httpx.Timeout(30.0, read=90.0),
            limits=httpx.Limits(max_connections=8, keepalive_expiry=4.0),
            transport=transport,
            verify=trusted(ca_file),
            trust_env=not is_loopback(self.url),
            follow_redirects=False,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    # --- the one way out ----------------------------------------------------------------------------------------------

    def _send(
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
        query = {name: value for name, value in (params or {}).items() if value is not None}

        def once() -> httpx.Response:
            content = blocks(body) if body is not None else None
            response = self._http.request(method, path, content=content, params=query, headers=sent)
            return response if response.status_code in fine else self._checked(response)

        return self._patiently(once, resend)

    def _open(self, path: str, headers: Mapping[str, str]) -> httpx.Response:
        """As `_send` of a GET, but the body of the answer is still to be read."""

        def once() -> httpx.Response:
            response = self._http.send(self._http.build_request("GET", path, headers=dict(headers)), stream=True)
            if response.is_success:
                return response
            with closing(response):
                response.read()
            return self._checked(response)

        return self._patiently(once)

    def _patiently(self, once: Callable[[], httpx.Response], resend: bool = True) -> httpx.Response:
        on = _again if resend else _again_if_refused
        try:
            for attempt in stamina.retry_context(on=on, attempts=None, timeout=self._patience, wait_max=2.0):
                with attempt:
                    return once()
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        except _TryAgainError as error:
            if not resend and error.error.code == DIGEST_MISMATCH:
                raise error.error from None
            raise UnreachableError(f"the coordinator at {self.url} is not available: {error}") from error.error
        raise AssertionError("stamina ends by returning or raising")

    def _unreachable(self, error: httpx.TransportError) -> UnreachableError:
        if (fault := certificate_fault(error)) is not None:
            return UnreachableError(
                f"the certificate of {self.url} is not trusted here ({fault}); if a private authority has signed "
                "it, name that one's PEM file with ISTHMUS_CA_FILE"
            )
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

    def _get(self, answer: type[M], path: str, **params: Any) -> M:
        return answer.model_validate_json(self._send("GET", path, params=params).content)

    # --- public -------------------------------------------------------------------------------------------------------

    def version(self) -> schemas.Version:
        return self._get(schemas.Version, "/version")

    def ready(self) -> schemas.Health:
        return self._get(schemas.Health, "/readyz")

    # --- sites --------------------------------------------------------------------------------------------------------

    def register_site(self, name: str, registration: schemas.SiteRegistration) -> schemas.Registered:
        response = self._send("PUT", f"/v1/sites/{_segment(name)}", json=registration)
        return schemas.Registered.model_validate_json(response.content)

    def sites(self) -> list[schemas.Site]:
        return self._get(schemas.SitePage, "/v1/sites").items

    def site(self, name: str) -> schemas.Site:
        return self._get(schemas.Site, f"/v1/sites/{_segment(name)}")

    def remove_site(self, name: str) -> None:
        self._send("DELETE", f"/v1/sites/{_segment(name)}")

    def heartbeat(self, name: str, heartbeat: schemas.Heartbeat, wait: float) -> schemas.HeartbeatReply:
        response = self._send("POST", f"/v1/sites/{_segment(name)}/heartbeat", json=heartbeat, params={"wait": wait})
        return schemas.HeartbeatReply.model_validate_json(response.content)

    def leave(self, name: str) -> None:
        self._send("POST", f"/v1/sites/{_segment(name)}/leave")

    # --- runs ---------------------------------------------------------------------------------------------------------

    def create_run(self, spec: schemas.RunSpec, idempotency_key: str | None = None) -> schemas.Run:
        headers = {"Idempotency-Key": idempotency_key or secrets.token_hex(16)}  # sent twice, it creates one run
        return schemas.Run.model_validate_json(self._send("POST", "/v1/runs", json=spec, headers=headers).content)

    def runs(self) -> list[schemas.Run]:
        return self._get(schemas.RunPage, "/v1/runs").items

    def run(self, run: str) -> schemas.Run:
        return self._get(schemas.Run, f"/v1/runs/{_segment(run)}")

    def delete_run(self, run: str) -> None:
        self._send("DELETE", f"/v1/runs/{_segment(run)}")

    def start_run(self, run: str) -> schemas.Run:
        return schemas.Run.model_validate_json(self._send("POST", f"/v1/runs/{_segment(run)}/start").content)

    def stop_run(self, run: str) -> schemas.Run:
        return schemas.Run.model_validate_json(self._send("POST", f"/v1/runs/{_segment(run)}/stop").content)

    def pause_run(self, run: str) -> schemas.Run:
        return schemas.Run.model_validate_json(self._send("POST", f"/v1/runs/{_segment(run)}/pause").content)

    def resume_run(self, run: str) -> schemas.Run:
        return schemas.Run.model_validate_json(self._send("POST", f"/v1/runs/{_segment(run)}/resume").content)

    def change_run(self, run: str, change: schemas.Change) -> schemas.Run:
        response = self._send("POST", f"/v1/runs/{_segment(run)}/changes", json=change)
        return schemas.Run.model_validate_json(response.content)

    def add_site(self, run: str, site: str) -> schemas.Run:
        path = f"/v1/runs/{_segment(run)}/sites/{_segment(site)}"
        return schemas.Run.model_validate_json(self._send("PUT", path).content)

    def exclude_site(self, run: str, site: str) -> schemas.Run:
        path = f"/v1/runs/{_segment(run)}/sites/{_segment(site)}"
        return schemas.Run.model_validate_json(self._send("DELETE", path).content)

    def model(self, run: str) -> schemas.Model:
        return self._get(schemas.Model, f"/v1/runs/{_segment(run)}/model")

    def layout(self, run: str) -> dict[str, Any]:
        return self._get(schemas.RunLayout, f"/v1/runs/{_segment(run)}/layout").layout

    def outer_rounds(self, run: str) -> list[schemas.OuterRound]:
        return self._get(schemas.OuterRoundPage, f"/v1/runs/{_segment(run)}/outer-rounds").items

    # --- access -------------------------------------------------------------------------------------------------------

    def create_token(self, request: TokenRequest) -> IssuedToken:
        return IssuedToken.model_validate_json(self._send("POST", "/v1/tokens", json=request).content)

    def tokens(self) -> list[Token]:
        return self._get(TokenPage, "/v1/tokens").items

    def revoke_token(self, token: str) -> None:
        self._send("DELETE", f"/v1/tokens/{_segment(token)}")

    def audit(self, cursor: str | None = None, limit: int | None = None) -> AuditPage:
        return self._get(AuditPage, "/v1/audit", cursor=cursor, limit=limit)

    # --- ranks --------------------------------------------------------------------------------------------------------

    def take_seat(self, run: str, site: str, seat: schemas.Seat) -> None:
        self._send("PUT", f"/v1/runs/{run}/sites/{site}/seat", json=seat)

    def join(self, run: str, site: str, request: schemas.JoinRequest) -> schemas.JoinReply:
        response = self._send("PUT", f"/v1/runs/{run}/sites/{site}/layout", json=request)
        return schemas.JoinReply.model_validate_json(response.content)

    def caught_up(self, run: str, site: str, report: schemas.CaughtUp) -> schemas.CaughtUpReply:
        response = self._send("POST", f"/v1/runs/{run}/sites/{site}/caught-up", json=report)
        return schemas.CaughtUpReply.model_validate_json(response.content)

    def upload_start(self, run: str, site: str, start: schemas.StartUpload) -> None:
        self._send("PUT", f"/v1/runs/{run}/sites/{site}/start", json=start)

    def report_final(self, run: str, site: str, report: schemas.FinalReport) -> schemas.FinalReply:
        response = self._send("PUT", f"/v1/runs/{run}/sites/{site}/final", json=report)
        return schemas.FinalReply.model_validate_json(response.content)

    def contribute(self, run: str, region: str, step: int, site: str, part: int, body: bytes, wait: float) -> Answer:
        path = f"/v1/runs/{run}/regions/{region}/steps/{step}/contributions/{site}/parts/{part}"
        return _answer(self._send("PUT", path, body=body, params={"wait": wait}))

    def abstain(
        self, run: str, region: str, step: int, site: str, abstention: schemas.Abstention, wait: float
    ) -> Answer:
        path = f"/v1/runs/{run}/regions/{region}/steps/{step}/abstentions/{site}"
        return _answer(self._send("PUT", path, json=abstention, params={"wait": wait}))

    def update(self, run: str, region: str, step: int, part: int, wait: float) -> bytes | None:
        """The entry's message, or None while the round is still open."""
        return self.update_answer(run, region, step, part, wait).message

    def update_answer(self, run: str, region: str, step: int, part: int, wait: float) -> Answer:
        path = f"/v1/runs/{run}/regions/{region}/steps/{step}/update/parts/{part}"
        return _answer(self._send("GET", path, params={"wait": wait}))

    def log(
        self, run: str, region: str, start: int, stop: int | None = None, wait: float | None = None
    ) -> schemas.LogPage:
        """Headers of entries `start` to `stop` (exclusive), waiting until there is at least one."""
        path = f"/v1/runs/{run}/regions/{region}/log"
        return self._get(schemas.LogPage, path, **{"from": start, "to": stop, "wait": wait})

    def entry(self, run: str, region: str, seq: int, part: int = 0) -> bytes:
        return self._send("GET", f"/v1/runs/{run}/regions/{region}/log/{seq}/parts/{part}").content

    def announce(
        self, run: str, number: int, fragment: int, site: str, announcement: schemas.Announcement, wait: float
    ) -> schemas.AnnouncementReply:
        """Waits until the outer round is open; still not open is a ConflictError `outer_round_not_open`."""
        path = f"/v1/runs/{run}/outer-rounds/{number}/fragments/{fragment}/sites/{site}"
        response = self._send("PUT", path, json=announcement, params={"wait": wait})
        return schemas.AnnouncementReply.model_validate_json(response.content)

    # --- snapshots ----------------------------------------------------------------------------------------------------

    def request_snapshot(self, run: str) -> schemas.SnapshotPage:
        response = self._send("POST", f"/v1/runs/{_segment(run)}/snapshots")
        return schemas.SnapshotPage.model_validate_json(response.content)

    def snapshots(self, run: str) -> schemas.SnapshotPage:
        return self._get(schemas.SnapshotPage, f"/v1/runs/{_segment(run)}/snapshots")

    def take_snapshot(self, run: str, number: int, site: str, upload: schemas.SnapshotUpload) -> None:
        """What a site that was asked for it has stored."""
        self._send("PUT", f"/v1/runs/{run}/snapshots/{number}/sites/{site}", json=upload)

    # --- blobs --------------------------------------------------------------------------------------------------------

    def put_blob(self, body: bytes | Path | Source) -> str:
        """Uploads a blob unless it is stored already, and returns its digest.

        What is large goes in pieces, and goes on where a link broke; files and sources are never whole in memory.
        """
        return upload(self._send, source_of(body), self._patience)

    def get_blob(self, digest: str) -> bytes:
        """The blob, verified against its name."""
        return self._verified(lambda: b"".join(self.read_blob(digest)))

    def read_blob(self, digest: str) -> Iterator[bytes]:
        """The blob in blocks, in bounded memory; goes on where a link broke.

        Raises:
            OtherBytesError: after the last block, that they were not those of the blob of this name.
        """
        try:
            yield from download(self._open, digest, self._patience)
        except httpx.TransportError as error:
            raise self._unreachable(error) from error

    def save_blob(self, digest: str, path: Path) -> None:
        """Writes the blob, verified against its name, to a file that is whole or not there."""
        draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            with draft.open("wb") as file:
                self.copy_blob(digest, file)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)

    def copy_blob(self, digest: str, file: IO[bytes]) -> None:
        """Replaces what is in a file by the blob, verified against its name."""

        def write() -> None:
            file.seek(0)
            file.truncate()
            file.writelines(self.read_blob(digest))

        self._verified(write)

    @staticmethod
    def _verified(fetch: Callable[[], T]) -> T:
        """Bytes that were changed on their way are asked for again."""
        for _ in range(_DAMAGED_AT_MOST):
            try:
                return fetch()
            except OtherBytesError:
                continue
        return fetch()

    # --- metrics ------------------------------------------------------------------------------------------------------

    def add_metrics(self, run: str, site: str, points: Sequence[schemas.MetricPoint]) -> None:
        self._send("POST", f"/v1/runs/{run}/metrics", json=schemas.MetricReport(site=site, points=list(points)))

    def metrics(self, run: str, max_points: int | None = None) -> list[schemas.StoredPoint]:
        return self._get(schemas.MetricPage, f"/v1/runs/{_segment(run)}/metrics", max_points=max_points).items


def _segment(text: str) -> str:
    return quote(text, safe="")


def _answer(response: httpx.Response) -> Answer:
    evaluate = {"true": True, "false": False}.get(response.headers.get("Isthmus-Evaluate", ""))
    if response.status_code == 200:
        number = response.headers.get("Isthmus-Snapshot", "")
        return Answer(response.content, evaluate=evaluate, snapshot=int(number) if number.isdecimal() else None)
    accepted = response.headers.get("Isthmus-Accepted") != "false"
    return Answer(None, response.text, accepted=accepted, evaluate=evaluate)


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
