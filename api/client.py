"""CoordinatorClient: the REST API as methods. Used by the command line and by site agents.

The transport is injectable, so that tests and the byte counters see every request.
"""

import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Self, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel

from api import schemas, specs
from api.access import AuditPage, IssuedToken, Token, TokenPage, TokenRequest
from api.errors import IsthmusError, UnreachableError
from api.patient_http import PatientHttp, Waiting
from api.service import Answer
from api.transfers import OtherBytesError, Source, download, source_of, upload

__all__ = ["CoordinatorClient", "UnreachableError"]

_DAMAGED_AT_MOST = 3
"""Downloads of one blob that arrive with other bytes."""

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")


class CoordinatorClient:
    """Talks to one coordinator with one token.

    Args:
        url: of the coordinator, with a path prefix if there is one.
        token: bearer token; None for the few public routes.
        transport: replaces the network, in tests and for counting bytes; `ca_file` is its own business.
        ca_file: PEM file of the authority whose certificates are trusted, and of no other.
        patience: seconds for which an unreachable coordinator is tried again.
        waiting: called when the first try of the first request has failed, with the error that it may come to, before
            the next one; if it raises that, there is none.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        transport: httpx.BaseTransport | None = None,
        ca_file: Path | None = None,
        patience: float = 60.0,
        waiting: Waiting | None = None,
    ) -> None:
        self._http = PatientHttp(url, token, transport, ca_file, patience, waiting)

    @property
    def url(self) -> str:
        return self._http.url

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def _get(self, answer: type[M], path: str, **params: Any) -> M:
        return answer.model_validate_json(self._http.send("GET", path, params=params).content)

    # --- public -------------------------------------------------------------------------------------------------------

    def version(self) -> schemas.Version:
        return self._get(schemas.Version, "/version")

    def ready(self) -> schemas.Health:
        return self._get(schemas.Health, "/readyz")

    # --- sites --------------------------------------------------------------------------------------------------------

    def register_site(self, name: str, registration: schemas.SiteRegistration) -> schemas.Registered:
        response = self._http.send("PUT", f"/v1/sites/{_segment(name)}", json=registration)
        return schemas.Registered.model_validate_json(response.content)

    def sites(self) -> list[schemas.Site]:
        return self._get(schemas.SitePage, "/v1/sites").items

    def site(self, name: str) -> schemas.Site:
        return self._get(schemas.Site, f"/v1/sites/{_segment(name)}")

    def remove_site(self, name: str) -> None:
        self._http.send("DELETE", f"/v1/sites/{_segment(name)}")

    def heartbeat(self, name: str, heartbeat: schemas.Heartbeat, wait: float) -> schemas.HeartbeatReply:
        response = self._http.send(
            "POST", f"/v1/sites/{_segment(name)}/heartbeat", json=heartbeat, params={"wait": wait}
        )
        return schemas.HeartbeatReply.model_validate_json(response.content)

    def leave(self, name: str) -> None:
        self._http.send("POST", f"/v1/sites/{_segment(name)}/leave")

    # --- runs ---------------------------------------------------------------------------------------------------------

    def create_run(self, spec: specs.RunSpec, idempotency_key: str | None = None) -> schemas.Run:
        headers = {"Idempotency-Key": idempotency_key or secrets.token_hex(16)}  # sent twice, it creates one run
        return schemas.Run.model_validate_json(self._http.send("POST", "/v1/runs", json=spec, headers=headers).content)

    def runs(self) -> list[schemas.Run]:
        return self._get(schemas.RunPage, "/v1/runs").items

    def run(self, run: str) -> schemas.Run:
        return self._get(schemas.Run, f"/v1/runs/{_segment(run)}")

    def delete_run(self, run: str) -> None:
        self._http.send("DELETE", f"/v1/runs/{_segment(run)}")

    def start_run(self, run: str) -> schemas.Run:
        return schemas.Run.model_validate_json(self._http.send("POST", f"/v1/runs/{_segment(run)}/start").content)

    def stop_run(self, run: str) -> schemas.Run:
        return schemas.Run.model_validate_json(self._http.send("POST", f"/v1/runs/{_segment(run)}/stop").content)

    def pause_run(self, run: str) -> schemas.Run:
        return schemas.Run.model_validate_json(self._http.send("POST", f"/v1/runs/{_segment(run)}/pause").content)

    def resume_run(self, run: str) -> schemas.Run:
        return schemas.Run.model_validate_json(self._http.send("POST", f"/v1/runs/{_segment(run)}/resume").content)

    def change_run(self, run: str, change: specs.Change) -> schemas.Run:
        response = self._http.send("POST", f"/v1/runs/{_segment(run)}/changes", json=change)
        return schemas.Run.model_validate_json(response.content)

    def add_site(self, run: str, site: str) -> schemas.Run:
        path = f"/v1/runs/{_segment(run)}/sites/{_segment(site)}"
        return schemas.Run.model_validate_json(self._http.send("PUT", path).content)

    def exclude_site(self, run: str, site: str) -> schemas.Run:
        path = f"/v1/runs/{_segment(run)}/sites/{_segment(site)}"
        return schemas.Run.model_validate_json(self._http.send("DELETE", path).content)

    def model(self, run: str) -> schemas.Model:
        return self._get(schemas.Model, f"/v1/runs/{_segment(run)}/model")

    def layout(self, run: str) -> dict[str, Any]:
        return self._get(schemas.RunLayout, f"/v1/runs/{_segment(run)}/layout").layout

    def outer_rounds(self, run: str) -> list[schemas.OuterRound]:
        return self._get(schemas.OuterRoundPage, f"/v1/runs/{_segment(run)}/outer-rounds").items

    # --- access -------------------------------------------------------------------------------------------------------

    def create_token(self, request: TokenRequest) -> IssuedToken:
        return IssuedToken.model_validate_json(self._http.send("POST", "/v1/tokens", json=request).content)

    def tokens(self) -> list[Token]:
        return self._get(TokenPage, "/v1/tokens").items

    def revoke_token(self, token: str) -> None:
        self._http.send("DELETE", f"/v1/tokens/{_segment(token)}")

    def audit(self, cursor: str | None = None, limit: int | None = None) -> AuditPage:
        return self._get(AuditPage, "/v1/audit", cursor=cursor, limit=limit)

    # --- ranks --------------------------------------------------------------------------------------------------------

    def take_seat(self, run: str, site: str, seat: schemas.Seat) -> None:
        self._http.send("PUT", f"/v1/runs/{_segment(run)}/sites/{site}/seat", json=seat)

    def join(self, run: str, site: str, request: schemas.JoinRequest) -> schemas.JoinReply:
        response = self._http.send("PUT", f"/v1/runs/{_segment(run)}/sites/{site}/layout", json=request)
        return schemas.JoinReply.model_validate_json(response.content)

    def caught_up(self, run: str, site: str, report: schemas.CaughtUp) -> schemas.CaughtUpReply:
        response = self._http.send("POST", f"/v1/runs/{_segment(run)}/sites/{site}/caught-up", json=report)
        return schemas.CaughtUpReply.model_validate_json(response.content)

    def upload_start(self, run: str, site: str, start: schemas.StartUpload) -> None:
        self._http.send("PUT", f"/v1/runs/{_segment(run)}/sites/{site}/start", json=start)

    def report_final(self, run: str, site: str, report: schemas.FinalReport) -> schemas.FinalReply:
        response = self._http.send("PUT", f"/v1/runs/{_segment(run)}/sites/{site}/final", json=report)
        return schemas.FinalReply.model_validate_json(response.content)

    def contribute(self, run: str, region: str, step: int, site: str, part: int, body: bytes, wait: float) -> Answer:
        path = f"/v1/runs/{_segment(run)}/regions/{region}/steps/{step}/contributions/{site}/parts/{part}"
        return _answer(self._http.send("PUT", path, body=body, params={"wait": wait}))

    def abstain(
        self, run: str, region: str, step: int, site: str, abstention: schemas.Abstention, wait: float
    ) -> Answer:
        path = f"/v1/runs/{_segment(run)}/regions/{region}/steps/{step}/abstentions/{site}"
        return _answer(self._http.send("PUT", path, json=abstention, params={"wait": wait}))

    def update(self, run: str, region: str, step: int, part: int, wait: float) -> bytes | None:
        """The entry's message, or None while the round is still open."""
        return self.update_answer(run, region, step, part, wait).message

    def update_answer(self, run: str, region: str, step: int, part: int, wait: float) -> Answer:
        path = f"/v1/runs/{_segment(run)}/regions/{region}/steps/{step}/update/parts/{part}"
        return _answer(self._http.send("GET", path, params={"wait": wait}))

    def log(
        self, run: str, region: str, start: int, stop: int | None = None, wait: float | None = None
    ) -> schemas.LogPage:
        """Headers of entries `start` to `stop` (exclusive), waiting until there is at least one."""
        path = f"/v1/runs/{_segment(run)}/regions/{region}/log"
        return self._get(schemas.LogPage, path, **{"from": start, "to": stop, "wait": wait})

    def entry(self, run: str, region: str, seq: int, part: int = 0) -> bytes:
        return self._http.send("GET", f"/v1/runs/{_segment(run)}/regions/{region}/log/{seq}/parts/{part}").content

    def announce(
        self, run: str, number: int, fragment: int, site: str, announcement: schemas.Announcement, wait: float
    ) -> schemas.AnnouncementReply:
        """Waits until the outer round is open; still not open is a ConflictError `outer_round_not_open`."""
        path = f"/v1/runs/{_segment(run)}/outer-rounds/{number}/fragments/{fragment}/sites/{site}"
        response = self._http.send("PUT", path, json=announcement, params={"wait": wait})
        return schemas.AnnouncementReply.model_validate_json(response.content)

    # --- snapshots ----------------------------------------------------------------------------------------------------

    def request_snapshot(self, run: str) -> schemas.SnapshotPage:
        response = self._http.send("POST", f"/v1/runs/{_segment(run)}/snapshots")
        return schemas.SnapshotPage.model_validate_json(response.content)

    def snapshots(self, run: str) -> schemas.SnapshotPage:
        return self._get(schemas.SnapshotPage, f"/v1/runs/{_segment(run)}/snapshots")

    def take_snapshot(self, run: str, number: int, site: str, upload: schemas.SnapshotUpload) -> None:
        """What a site that was asked for it has stored."""
        self._http.send("PUT", f"/v1/runs/{_segment(run)}/snapshots/{number}/sites/{site}", json=upload)

    # --- blobs --------------------------------------------------------------------------------------------------------

    def put_blob(self, body: bytes | Path | Source) -> str:
        """Uploads a blob unless it is stored already, and returns its digest.

        What is large goes in pieces, and goes on where a link broke; files and sources are never whole in memory.
        """
        return upload(self._http.send, source_of(body), self._http.patience)

    def get_blob(self, digest: str) -> bytes:
        """The blob, verified against its name."""
        return self._verified(digest, lambda: b"".join(self.read_blob(digest)))

    def read_blob(self, digest: str) -> Iterator[bytes]:
        """The blob in blocks, in bounded memory; goes on where a link broke.

        Raises:
            OtherBytesError: after the last block, that they were not those of the blob of this name.
        """
        try:
            yield from download(self._http.open, digest, self._http.patience)
        except httpx.TransportError as error:
            raise self._http.unreachable(error) from error

    def copy_blob(self, digest: str, file: IO[bytes]) -> None:
        """Replaces what is in a file by the blob, verified against its name."""

        def write() -> None:
            file.seek(0)
            file.truncate()
            file.writelines(self.read_blob(digest))

        self._verified(digest, write)

    @staticmethod
    def _verified(digest: str, fetch: Callable[[], T]) -> T:
        """Bytes that were changed on their way are asked for again."""
        for _ in range(_DAMAGED_AT_MOST):
            try:
                return fetch()
            except OtherBytesError:
                continue
        try:
            return fetch()
        except OtherBytesError:
            damaged = f"blob {digest} is damaged at the coordinator: {_DAMAGED_AT_MOST + 1} times it arrived with other"
            raise OtherBytesError(f"{damaged} bytes than its name says; restore it there from a backup") from None

    # --- metrics ------------------------------------------------------------------------------------------------------

    def add_metrics(self, run: str, site: str, points: Sequence[schemas.MetricPoint], session: str = "") -> None:
        report = schemas.MetricReport(site=site, session=session, points=list(points))
        self._http.send("POST", f"/v1/runs/{_segment(run)}/metrics", json=report)

    def metrics(self, run: str, max_points: int | None = None) -> list[schemas.StoredPoint]:
        return self._get(schemas.MetricPage, f"/v1/runs/{_segment(run)}/metrics", max_points=max_points).items


def _segment(text: str) -> str:
    if text in ("", ".", ".."):  # which would be taken out of the path
        raise IsthmusError(f"{text!r} is neither a run's id nor a name")
    if "/" in text:
        raise IsthmusError(f"{text!r} is neither a run's id nor a name: it has a slash")
    return quote(text, safe="")


def _answer(response: httpx.Response) -> Answer:
    evaluate = {"true": True, "false": False}.get(response.headers.get("Isthmus-Evaluate", ""))
    if response.status_code == 200:
        number = response.headers.get("Isthmus-Snapshot", "")
        return Answer(response.content, evaluate=evaluate, snapshot=int(number) if number.isdecimal() else None)
    accepted = response.headers.get("Isthmus-Accepted") != "false"
    return Answer(None, response.text, accepted=accepted, evaluate=evaluate)
