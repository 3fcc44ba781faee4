"""The agent of a site: registers, heartbeats, and runs what it is assigned. It never accepts connections."""

import secrets
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import structlog

from api.client import CoordinatorClient, UnreachableError
from api.errors import ConflictError, NotFoundError, ProblemError, UnauthorizedError
from api.message import PROTOCOL_VERSION
from api.schemas import (
    Assignment,
    Heartbeat,
    HeartbeatReply,
    ProcessReport,
    ProcessState,
    RunStatus,
    Seat,
    SiteRegistration,
)
from site_agent.attempts import Attempt, Ending, Refusal, how_to_move, why_not_wanted
from site_agent.settings import Session, Settings
from site_agent.supervisor import RankGroup

__all__ = ["Daemon"]

_BUSY_WAIT_S = 1.0
"""Longest heartbeat poll while ranks run: so soon is their end reported."""

_GOODBYE_S = 2.0
"""Patience with a coordinator that is not there while we leave."""

T = TypeVar("T")

log = structlog.get_logger()


class _Interrupted(BaseException):
    """Ends a wait for the coordinator."""


class Daemon:
    """One per site and directory. `serve` returns after `interrupt`; everything it started is gone then."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._directory = settings.directory
        self._secret = _own_secret(self._directory / "secret")
        self._client = self._connect(self._secret, patience=10.0)
        self._heartbeat_s = 5.0
        self._interrupted = self._waiting = False
        self._running: dict[tuple[str, int], Attempt] = {}
        self._ending: list[Ending] = []

    def interrupt(self) -> None:
        """For signal handlers. Breaks off a wait for the coordinator, but never the start or the end of ranks."""
        self._interrupted = True
        if self._waiting:
            raise _Interrupted

    def serve(self) -> None:
        """Until interrupted.

        Raises:
            IsthmusError: the coordinator refuses this site, with its reason.
        """
        try:
            self._wait_for(self._register)
        except _Interrupted:
            return
        try:
            while True:
                reply = self._wait_for(self._beat)
                if reply is not None and not self._follow(reply):
                    self._wait_for(self._pause)
        except _Interrupted:
            pass
        finally:
            self._leave()

    def _wait_for(self, answer: Callable[[], T]) -> T:
        """Only in here is an interruption raised."""
        self._waiting = True
        try:
            if self._interrupted:
                raise _Interrupted
            return answer()
        finally:
            self._waiting = False

    # --- the coordinator ----------------------------------------------------------------------------------------------

    def _connect(self, token: str, patience: float) -> CoordinatorClient:
        return CoordinatorClient(self._settings.coordinator, token, ca_file=self._settings.ca_file, patience=patience)

    def _register(self) -> None:
        registration = SiteRegistration(
            protocol_version=PROTOCOL_VERSION,
            secret=self._secret,
            region=self._settings.region,
            tasks=list(self._settings.tasks),
            ranks=self._settings.ranks,
            versions=self._settings.versions(),
        )
        token = self._settings.read_join_token()
        log.info("registering", site=self._settings.name, coordinator=self._settings.coordinator)
        with self._connect(token, patience=5.0) as client:
            while True:
                try:
                    self._heartbeat_s = client.register_site(self._settings.name, registration).heartbeat_s
                    break
                except UnreachableError as error:
                    log.warning("cannot register yet, trying again", error=str(error))
        log.info("registered", site=self._settings.name, coordinator=self._settings.coordinator)

    def _beat(self) -> HeartbeatReply | None:
        """One heartbeat; None if the coordinator cannot be reached, which stops nothing here."""
        reports = [_report_of(attempt) for attempt in self._running.values()]
        reports += [_report(ending.attempt.assignment, ProcessState.STOPPING) for ending in self._ending]
        wait = min(_BUSY_WAIT_S, self._heartbeat_s) if reports else self._heartbeat_s
        try:
            return self._client.heartbeat(self._settings.name, self._heartbeat(reports), wait)
        except (NotFoundError, UnauthorizedError):
            log.warning("the coordinator does not know this site any more, registering again")
            self._register()
        except (UnreachableError, ProblemError) as error:
            log.warning("no heartbeat, going on", error=str(error))
            time.sleep(self._heartbeat_s)
        return None

    def _pause(self) -> None:
        """The next heartbeat is answered at once while something is still to be started."""
        time.sleep(min(_BUSY_WAIT_S, self._heartbeat_s))

    def _heartbeat(self, reports: list[ProcessReport]) -> Heartbeat:
        return Heartbeat(processes=reports, versions=self._settings.versions())

    def _leave(self) -> None:
        self._client.close()
        last = "left"
        try:
            with self._connect(self._secret, patience=_GOODBYE_S) as client:
                client.leave(self._settings.name)
        except (ProblemError, UnreachableError) as error:
            last = "ended without leaving: the coordinator takes it for lost"
            log.warning("could not say that this site leaves", error=str(error))
        for attempt in [*self._running.values(), *(ending.attempt for ending in self._ending)]:
            attempt.group.stop(self._settings.grace_s)
        log.info(last, site=self._settings.name)

    # --- assignments --------------------------------------------------------------------------------------------------

    def _follow(self, reply: HeartbeatReply) -> bool:
        """Starts what is missing, stops what is extra. Whether everything could be started."""
        wanted = {(assignment.run, assignment.attempt): assignment for assignment in reply.assignments}
        for key in self._running.keys() - wanted.keys():
            self._release(self._running.pop(key))
        self._ending = [ending for ending in self._ending if not ending.is_over(time.monotonic())]
        for key in wanted.keys() - self._running.keys():
            try:
                self._running[key] = self._start(wanted[key])
            except (ProblemError, UnreachableError) as error:
                log.warning("cannot start yet, trying again", run=key[0], error=str(error))
        return wanted.keys() == self._running.keys()

    def _release(self, attempt: Attempt) -> None:
        """Ranks of a run that succeeded may finish; others are told to end now."""
        left_alone = self._settings.finish_s if self._has_succeeded(attempt.assignment) else 0.0
        stop_at = time.monotonic() + left_alone
        self._ending.append(Ending(attempt, stop_at, stop_at + self._settings.grace_s))

    def _has_succeeded(self, of: Assignment) -> bool:
        try:
            run = self._client.run(of.run)
        except (ProblemError, UnreachableError) as error:
            log.warning("cannot tell how the run ended, stopping its ranks", run=of.run, error=str(error))
            return False
        what, reason = why_not_wanted(run, of, self._settings.name)
        log.info(what, run=of.run, attempt=of.attempt, status=str(run.status), reason=reason.partition("\n")[0])
        return run.status is RunStatus.SUCCEEDED

    def _start(self, assignment: Assignment) -> Attempt:
        task = self._settings.tasks.get(assignment.task)
        if task is None:
            allowed = ", ".join(self._settings.tasks)
            return Attempt(
                assignment, Refusal(f"this site does not allow task {assignment.task!r} any more; it allows {allowed}")
            )
        if shutil.which(task.command[0]) is None:
            return Attempt(
                assignment,
                Refusal(f"task {task.name!r} cannot start: there is no program {task.command[0]!r} at this site"),
            )
        self._warn_of_another_region(assignment)
        secret = secrets.token_urlsafe(32)
        seat = Seat(attempt=assignment.attempt, secret=secret, version=self._settings.versions()[task.name])
        try:
            self._client.take_seat(assignment.run, self._settings.name, seat)
        except ConflictError as error:
            if error.code == "other_version":
                return Attempt(assignment, Refusal(str(error)))
            raise
        runs = self._directory / "runs" / assignment.run
        runs.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f"{assignment.attempt}-", dir=runs))
        session = Session(
            coordinator=self._settings.coordinator,
            ca_file=self._settings.ca_file and self._settings.ca_file.absolute(),
            secret=secret,
            run=assignment.run,
            attempt=assignment.attempt,
            site=self._settings.name,
            region=assignment.region,
        )
        _write_private(folder / "session.json", session.model_dump_json())
        log.info("starting", run=assignment.run, task=task.name, ranks=self._settings.ranks, logs=str(folder))
        environment = {"ISTHMUS_SESSION_FILE": str(folder / "session.json")}
        return Attempt(assignment, RankGroup(task.command, self._settings.ranks, folder, environment), logs=folder)

    def _warn_of_another_region(self, assignment: Assignment) -> None:
        """A member stays in its region, whatever --region its agent is started with later."""
        site, own = self._settings.name, self._settings.region
        if assignment.region == own:
            return
        run = self._client.run(assignment.run)
        if site not in (run.spec.regions or {}).get(assignment.region, ()):
            log.warning(
                "this site joined the run in another region than its --region, and stays there",
                run=assignment.run,
                region=assignment.region,
                agent_region=own,
                remedy=how_to_move(run, site, assignment.region),
            )


def _report_of(attempt: Attempt) -> ProcessReport:
    end = attempt.ended()
    if end is None:
        return _report(attempt.assignment, ProcessState.RUNNING)
    return _report(attempt.assignment, ProcessState.EXITED, exit_code=end.code, rank=end.rank, detail=end.detail)


def _report(assignment: Assignment, state: ProcessState, **end: Any) -> ProcessReport:
    return ProcessReport(run=assignment.run, attempt=assignment.attempt, state=state, **end)


def _own_secret(path: Path) -> str:
    """What this site is known by, made once and kept (rule C9)."""
    if not path.exists():
        _write_private(path, secrets.token_urlsafe(32))
    return path.read_text()


def _write_private(path: Path, text: str) -> None:
    draft = path.with_suffix(".draft")
    draft.touch(0o600)
    draft.write_text(text)
    draft.replace(path)
