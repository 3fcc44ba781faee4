"""The agent of a site: registers, heartbeats, and runs what it is assigned. It never accepts connections."""

import secrets
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
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
    Run,
    RunStatus,
    Seat,
    SiteRegistration,
)
from site_agent.settings import Session, Settings
from site_agent.supervisor import Exit, RankGroup

__all__ = ["Daemon"]

_BUSY_WAIT_S = 1.0
"""Longest heartbeat poll while ranks run: so soon is their end reported."""

_GOODBYE_S = 2.0
"""Patience with a coordinator that is not there while we leave."""

T = TypeVar("T")

log = structlog.get_logger()


@dataclass(frozen=True)
class _Refusal:
    """Stands for ranks that were never started."""

    because: str

    def poll(self) -> Exit:
        return Exit(1, detail=self.because)

    def terminate(self) -> None:
        """There is nothing to end."""

    def kill(self) -> None:
        """There is nothing to kill."""

    def stop(self, grace_s: float) -> None:
        """There is nothing to stop."""


@dataclass(frozen=True)
class _Running:
    assignment: Assignment
    group: RankGroup | _Refusal


@dataclass
class _Ending:
    """Ranks that are no longer wanted, seen to between heartbeats: told to end at `stop_at`, killed at `kill_at`.

    Those of a run that succeeded are first left alone: what a training script does after its loop takes time.
    """

    assignment: Assignment
    group: RankGroup | _Refusal
    stop_at: float
    kill_at: float
    told: bool = False


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
        self._running: dict[tuple[str, int], _Running] = {}
        self._ending: list[_Ending] = []

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
        reports = [self._report(running) for running in self._running.values()]
        reports += [_report(ending.assignment, ProcessState.STOPPING) for ending in self._ending]
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

    @staticmethod
    def _report(running: _Running) -> ProcessReport:
        ended = running.group.poll()
        if ended is None:
            return _report(running.assignment, ProcessState.RUNNING)
        return _report(
            running.assignment, ProcessState.EXITED, exit_code=ended.code, rank=ended.rank, detail=ended.detail
        )

    def _leave(self) -> None:
        self._client.close()
        last = "left"
        try:
            with self._connect(self._secret, patience=_GOODBYE_S) as client:
                client.leave(self._settings.name)
        except (ProblemError, UnreachableError) as error:
            last = "ended without leaving: the coordinator takes it for lost"
            log.warning("could not say that this site leaves", error=str(error))
        for group in [*(r.group for r in self._running.values()), *(ending.group for ending in self._ending)]:
            group.stop(self._settings.grace_s)
        log.info(last, site=self._settings.name)

    # --- assignments --------------------------------------------------------------------------------------------------

    def _follow(self, reply: HeartbeatReply) -> bool:
        """Starts what is missing, stops what is extra. Whether everything could be started."""
        wanted = {(assignment.run, assignment.attempt): assignment for assignment in reply.assignments}
        for key in self._running.keys() - wanted.keys():
            self._release(self._running.pop(key))
        self._ending = [ending for ending in self._ending if not self._is_over(ending)]
        for key in wanted.keys() - self._running.keys():
            try:
                self._running[key] = _Running(wanted[key], self._start(wanted[key]))
            except (ProblemError, UnreachableError) as error:
                log.warning("cannot start yet, trying again", run=key[0], error=str(error))
        return wanted.keys() == self._running.keys()

    def _release(self, running: _Running) -> None:
        """Ranks of a run that succeeded may finish; others are told to end now."""
        left_alone = self._settings.finish_s if self._has_succeeded(running.assignment) else 0.0
        stop_at = time.monotonic() + left_alone
        self._ending.append(_Ending(running.assignment, running.group, stop_at, stop_at + self._settings.grace_s))

    def _has_succeeded(self, of: Assignment) -> bool:
        try:
            run = self._client.run(of.run)
        except (ProblemError, UnreachableError) as error:
            log.warning("cannot tell how the run ended, stopping its ranks", run=of.run, error=str(error))
            return False
        what = self._what_happened(run, of)
        log.info(what, run=of.run, attempt=of.attempt, status=str(run.status), reason=run.reason.partition("\n")[0])
        return run.status is RunStatus.SUCCEEDED

    def _what_happened(self, run: Run, of: Assignment) -> str:
        """That ranks are not wanted any more."""
        if run.status.terminal:
            return "run ended"
        if run.status is RunStatus.STOPPING:
            return "run is being stopped, ending its ranks"
        replaced = any(one.site == self._settings.name and one.attempt > of.attempt for one in run.members)
        return "another attempt takes over, ending these ranks" if replaced else "run goes on without this site"

    @staticmethod
    def _is_over(ending: _Ending) -> bool:
        now = time.monotonic()
        if ending.group.poll() is not None or now >= ending.kill_at:
            ending.group.kill()
            return True
        if now >= ending.stop_at and not ending.told:
            ending.group.terminate()
            ending.told = True
        return False

    def _start(self, assignment: Assignment) -> RankGroup | _Refusal:
        task = self._settings.tasks.get(assignment.task)
        if task is None:
            allowed = ", ".join(self._settings.tasks)
            return _Refusal(f"this site does not allow task {assignment.task!r} any more; it allows {allowed}")
        if shutil.which(task.command[0]) is None:
            return _Refusal(f"task {task.name!r} cannot start: there is no program {task.command[0]!r} at this site")
        secret = secrets.token_urlsafe(32)
        seat = Seat(attempt=assignment.attempt, secret=secret, version=self._settings.versions()[task.name])
        try:
            self._client.take_seat(assignment.run, self._settings.name, seat)
        except ConflictError as error:
            if error.code == "other_version":
                return _Refusal(str(error))
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
        return RankGroup(task.command, self._settings.ranks, folder, environment)


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
