"""What an agent starts and stops, without processes or a coordinator; and when a signal may break in."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from api.client import UnreachableError
from api.errors import ConflictError, NotFoundError
from api.schemas import Assignment, Condition, Heartbeat, HeartbeatReply, ProcessReport, ProcessState, RunStatus
from site_agent import daemon as daemon_module
from site_agent.attempts import Attempt, Ending, Refusal
from site_agent.daemon import Daemon
from site_agent.settings import Settings
from site_agent.supervisor import Exit


def assignment(run: str = "run-1", task: str = "tiny", region: str = "west") -> Assignment:
    return Assignment(run=run, attempt=1, region=region, task=task)


def member(site: str, attempt: int = 1, region: str = "west", condition: Condition = Condition.ACTIVE) -> Any:
    reason = f"of site {site}\nand more"
    return SimpleNamespace(site=site, attempt=attempt, region=region, condition=condition, reason=reason)


class World:
    """The coordinator and the groups of ranks as one agent sees them; `events` is what happened, in order.

    `beats` are the answers to heartbeats, or errors; after the last one the agent gets SIGTERM.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.events: list[str] = []
        self.reports: list[list[ProcessReport]] = []
        self.beats: list[list[Assignment] | Exception] = []
        self.status: RunStatus | Exception = RunStatus.FAILED
        self.ends: dict[str, Exit] = {}
        self.on: dict[str, Callable[[], None]] = {}
        self.stubborn = False
        self.refusal: Exception | None = None
        self.goodbye: Exception | None = None
        self.attempt = 1
        self.condition = Condition.ACTIVE
        self.others: list[Any] = []
        self.regions: dict[str, list[str]] | None = None
        world = self

        class Client:
            def __init__(self, *_: Any, **__: Any) -> None: ...
            def __enter__(self) -> Any:
                return self

            def __exit__(self, *_: object) -> None: ...
            def close(self) -> None: ...
            def register_site(self, *_: Any) -> Any:
                world.happened("register")
                return SimpleNamespace(heartbeat_s=0.01)

            def heartbeat(self, name: str, heartbeat: Heartbeat, wait: float) -> HeartbeatReply:
                world.reports.append(heartbeat.processes)
                if not world.beats:
                    world.daemon.interrupt()
                answer = world.beats.pop(0)
                if isinstance(answer, Exception):
                    raise answer
                return HeartbeatReply(assignments=answer, lease_s=15.0)

            def take_seat(self, run: str, *_: Any) -> None:
                world.happened(f"seat {run}")
                if world.refusal:
                    raise world.refusal

            def run(self, run: str) -> Any:
                if isinstance(world.status, Exception):
                    raise world.status
                return SimpleNamespace(
                    id=run,
                    status=world.status,
                    reason="of the run\nand more",
                    members=[*world.others, member("a", world.attempt, "east", world.condition)],
                    spec=SimpleNamespace(regions=world.regions),
                )

            def leave(self, name: str) -> None:
                world.happened(f"leave {name}")
                if world.goodbye:
                    raise world.goodbye

        class Group:
            def __init__(self, command: Any, ranks: int, logs: Path, environment: Any) -> None:
                self.run = logs.parent.name
                assert Path(environment["ISTHMUS_SESSION_FILE"]).stat().st_mode & 0o777 == 0o600
                world.happened(f"start {self.run}")

            def poll(self) -> Exit | None:
                return world.ends.get(self.run)

            def terminate(self) -> None:
                world.happened(f"terminate {self.run}")
                if not world.stubborn:
                    world.ends[self.run] = Exit(-15)

            def kill(self) -> None:
                world.happened(f"kill {self.run}")

            def stop(self, grace_s: float) -> None:
                world.happened(f"stop {self.run}")
                world.events.append(f"stopped {self.run}")

        monkeypatch.setattr(daemon_module, "CoordinatorClient", Client)
        monkeypatch.setattr(daemon_module, "RankGroup", Group)
        self.daemon = Daemon(
            Settings(name="a", region="west", task=["tiny=true"], join_token="t", site_dir=folder, finish_s=3600)
        )

    def happened(self, event: str) -> None:
        self.events.append(event)
        if event in self.on:
            self.on.pop(event)()

    def serve(self, *beats: list[Assignment] | Exception) -> list[str]:
        self.beats = list(beats)
        self.daemon.serve()
        return self.events


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> World:
    return World(monkeypatch, tmp_path)


STARTED = ["register", "seat run-1", "start run-1"]
STOPPED = ["stop run-1", "stopped run-1"]
ENDED = ["terminate run-1", "kill run-1"]


def test_follows_assignments(world: World):
    assert world.serve([], [assignment()], [assignment()], [], []) == [*STARTED, *ENDED, "leave a"]
    states = [[report.state for report in reports] for reports in world.reports]
    running, stopping = [ProcessState.RUNNING], [ProcessState.STOPPING]
    assert states == [[], [], running, running, stopping, []]


def test_another_version_of_the_task_than_that_of_others_is_reported_and_not_tried_again(world: World):
    world.refusal = ConflictError("other_version", "the sites have different versions of task tiny: a 2, b 1")
    assert world.serve([assignment()], [assignment()]) == ["register", "seat run-1", "leave a"]
    ended = ProcessReport(run="run-1", attempt=1, state=ProcessState.EXITED, exit_code=1, detail=str(world.refusal))
    assert world.reports == [[], [ended], [ended]]


def test_what_cannot_start_yet_is_tried_again_after_a_pause(world: World, monkeypatch: pytest.MonkeyPatch):
    world.refusal = ConflictError("other_attempt", "site a is at attempt 2")
    monkeypatch.setattr(daemon_module.time, "sleep", lambda seconds: world.happened(f"pause {seconds}"))
    tried = ["seat run-1", "pause 0.01"]
    assert world.serve([assignment()], [assignment()]) == ["register", *tried, *tried, "leave a"]


def test_an_outage_stops_nothing(world: World):
    world.serve([assignment()], UnreachableError("away"), [assignment()])
    assert world.events == [*STARTED, "leave a", *STOPPED]


def test_a_coordinator_that_forgot_the_site_is_registered_with_again(world: World):
    assert world.serve(NotFoundError("site_not_found", "no such site")) == ["register", "register", "leave a"]


def test_the_end_of_ranks_is_reported(world: World):
    world.ends["run-1"] = Exit(-9, rank=3, detail="the last line")
    world.serve([assignment()], [assignment()])
    (report,) = world.reports[1]
    assert (report.state, report.exit_code, report.rank, report.detail) == ("exited", -9, 3, "the last line")


def test_a_task_that_is_not_allowed_is_reported_as_a_failure(world: World):
    world.serve([assignment(task="other")], [assignment(task="other")])
    assert world.events == ["register", "leave a"]
    (report,) = world.reports[1]
    assert report.exit_code == 1
    assert "does not allow task 'other'" in report.detail


def test_ranks_of_a_run_that_succeeded_may_finish(world: World):
    world.status = RunStatus.SUCCEEDED
    world.on["leave a"] = lambda: world.events.append("still there")
    assert world.serve([assignment()], [], [], []) == [*STARTED, "leave a", "still there", *STOPPED]


def test_ranks_of_a_run_that_is_not_known_any_more_are_stopped(world: World):
    world.status = NotFoundError("run_not_found", "deleted")
    assert world.serve([assignment()], [], []) == [*STARTED, *ENDED, "leave a"]


def test_ranks_that_do_not_end_are_killed_after_the_grace(world: World, monkeypatch: pytest.MonkeyPatch):
    times = iter([100.0, 100.0, 109.0, 110.5])
    monkeypatch.setattr(daemon_module.time, "monotonic", lambda: next(times))
    world.stubborn = True
    assert world.serve([assignment()], [], [], []) == [*STARTED, *ENDED, "leave a"]
    assert len(world.reports) == 5


def test_a_signal_during_the_start_of_ranks_does_not_lose_them(world: World):
    world.on["start run-1"] = world.daemon.interrupt
    assert world.serve([assignment()], [assignment()]) == [*STARTED, "leave a", *STOPPED]
    assert len(world.reports) == 1


def test_a_signal_while_ranks_are_stopped_does_not_leave_any(world: World):
    world.on["terminate run-1"] = world.daemon.interrupt
    assert world.serve([assignment()], [], []) == [*STARTED, "terminate run-1", "leave a", *STOPPED]
    assert len(world.reports) == 2


def test_a_second_signal_changes_nothing(world: World):
    world.on["leave a"] = world.daemon.interrupt
    world.on["stop run-1"] = world.daemon.interrupt
    assert world.serve([assignment()]) == [*STARTED, "leave a", *STOPPED]


def test_a_signal_before_the_registration(world: World):
    world.daemon.interrupt()
    assert world.serve() == []


@pytest.mark.parametrize(
    ("status", "attempt", "condition", "said", "reason"),
    [
        (RunStatus.FAILED, 1, Condition.ACTIVE, "run ended", "of the run"),
        (RunStatus.STOPPING, 1, Condition.ACTIVE, "run is being stopped, ending its ranks", "of the run"),
        (RunStatus.RUNNING, 2, Condition.ACTIVE, "another attempt takes over, ending these ranks", "of site a"),
        (RunStatus.STARTING, 2, Condition.ACTIVE, "another attempt takes over, ending these ranks", "of site a"),
        (RunStatus.RUNNING, 1, Condition.EXCLUDED, "run goes on without this site", "of site a"),
        (RunStatus.RUNNING, 1, Condition.ACTIVE, "the ranks have done all that was asked of them", "of site a"),
    ],
)
def test_the_log_says_why_ranks_end(
    world: World, status: RunStatus, attempt: int, condition: Condition, said: str, reason: str
):
    world.status, world.attempt, world.condition = status, attempt, condition
    with capture_logs() as logs:
        world.serve([assignment()], [])
    about = [(entry["event"], entry["status"], entry["reason"]) for entry in logs if "reason" in entry]
    assert about == [(said, status, reason)]


def errors(logs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [dict(entry) for entry in logs if entry["log_level"] == "error"]


def test_the_log_says_once_that_ranks_have_failed(world: World, tmp_path: Path):
    world.ends["run-1"] = Exit(3, rank=1, detail="Traceback\nValueError: the last line\n[rank1]:[W1130 15:00] torch")
    with capture_logs() as logs:
        world.serve([assignment()], [assignment()], [assignment()], [], [])
    (error,) = errors(logs)
    assert list((tmp_path / "runs" / "run-1").glob("1-*")) == [Path(error.pop("logs"))]
    said = {"run": "run-1", "attempt": 1, "rank": 1, "exit_code": 3, "error": "ValueError: the last line"}
    assert error == {"event": "the ranks of a run have failed", "log_level": "error", **said}


def test_the_log_says_what_fails_after_a_run_that_succeeded():
    ending = Ending(Attempt(assignment(), Refusal("cannot export")), stop_at=1.0, kill_at=2.0)
    with capture_logs() as logs:
        assert ending.is_over(0.0)
    assert [error["error"] for error in errors(logs)] == ["cannot export"]


def test_ranks_that_were_told_to_end_have_not_failed(world: World):
    with capture_logs() as logs:
        assert world.serve([assignment()], [], []) == [*STARTED, *ENDED, "leave a"]
    assert errors(logs) == []


def test_the_log_says_that_ranks_were_never_started(world: World):
    with capture_logs() as logs:
        world.serve([assignment(task="other")], [assignment(task="other")])
    (error,) = errors(logs)
    assert error["logs"] is None
    assert "does not allow task 'other'" in error["error"]


@pytest.mark.parametrize(("regions", "warned"), [(None, True), ({"west": ["b"]}, True), ({"east": ["a"]}, False)])
def test_a_region_that_is_neither_the_agents_nor_the_specs(world: World, regions: Any, warned: bool):
    world.regions, world.others = regions, [member("b", region="east")]
    with capture_logs() as logs:
        world.serve([assignment(region="east")])
    (warning,) = [entry for entry in logs if entry["log_level"] == "warning"] or [None]
    assert (warning is not None) == warned
    if warning is not None:
        assert (warning["run"], warning["region"], warning["agent_region"]) == ("run-1", "east", "west")
        assert "`isthmus run remove-site run-1 a`, then `isthmus run add-site run-1 a`" in warning["remedy"]


@pytest.mark.parametrize("other", [member("b", region="west"), member("b", 1, "east", Condition.EXCLUDED)])
def test_the_last_site_of_a_region_is_not_told_to_move(world: World, other: Any):
    world.others = [other]
    with capture_logs() as logs:
        world.serve([assignment(region="east")])
    (warning,) = [entry for entry in logs if entry["log_level"] == "warning"]
    assert warning["remedy"].startswith("start the agent with --region east: it is the last site there")


def test_the_region_of_the_agent_needs_no_warning(world: World):
    world.status = NotFoundError("run_not_found", "not asked for")
    with capture_logs() as logs:
        assert world.serve([assignment()]) == [*STARTED, "leave a", *STOPPED]
    assert [entry for entry in logs if entry["log_level"] == "warning"] == []


def test_who_could_not_say_so_has_not_left(world: World):
    world.goodbye = UnreachableError("away")
    with capture_logs() as logs:
        world.serve([])
    assert [entry["event"] for entry in logs][-2:] == [
        "could not say that this site leaves",
        "ended without leaving: the coordinator takes it for lost",
    ]
