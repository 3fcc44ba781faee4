"""Real runs of real sites: without rounds, stopped and with a coordinator that is killed; and with too little room."""

import pytest

from api.schemas import RunStatus
from api.specs import OuterSpec
from tests.conftest import wait_until
from tests.faults.points import OF_OUTER_ROUNDS
from tests.faults.stage import GatedRun, Stage
from tests.processes import processes_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

EVERY = 3
APART = ("a", "c")
OUTER = OuterSpec(every=EVERY, fragments=2)


def without_rounds(stage: Stage, steps: int) -> GatedRun:
    return GatedRun(stage, steps=steps, sites=APART, exchange="none", outer=OUTER)


def anchors(run: GatedRun, region: str) -> list[tuple[int, int, str]]:
    entries = run.client.log(run.id, region, 0).items
    return [(entry["step"], entry["fragment"], entry["digest"]) for entry in entries if entry["kind"] == "anchor"]


def test_runs_without_rounds_are_stopped_and_outlive_their_coordinator() -> None:
    """Stopped between two outer rounds; killed between two, while sites train on, and in the middle of one."""
    with Stage(sites=APART) as stage:
        stopped = without_rounds(stage, 4 * EVERY)
        stopped.let(EVERY + 1)
        stopped.until_trained(EVERY + 1)
        assert stopped.view.outer_rounds == 1
        stage.client.stop_run(stopped.id)
        run = stopped.until(lambda run: run.status.terminal, "the end")
        assert (run.status, run.reason) == (RunStatus.STOPPED, f"stopped by request at step {EVERY} of {4 * EVERY}")
        for site in APART:
            wait_until(lambda: not processes_of(stage.site(site) / "runs"), f"the end of the ranks of {site}")  # noqa: B023
        assert len(anchors(stopped, "west")) == 3
        assert anchors(stopped, "west") == anchors(stopped, "east")

        run = without_rounds(stage, 4 * EVERY)
        run.let(EVERY + 1)
        run.until_trained(EVERY + 1)
        stage.kill("coordinator")
        run.let(2 * EVERY)
        run.until_trained(2 * EVERY - 1)
        stage.start_again("coordinator", "a")
        run.until(run.settled, "the second outer round")
        (point,) = [point for point in OF_OUTER_ROUNDS if point.name == "both drafts are whole, none is stored"]
        run.strike(point, "coordinator", "a", lambda: run.let(3 * EVERY))
        run.end()
        ended = run.judge(whole_log=False)
        assert [member.attempt for member in run.view.members] == [1, 1]
        assert anchors(run, "west")[:3] == anchors(stopped, "west")

        undisturbed = without_rounds(stage, 4 * EVERY)
        undisturbed.end()
        assert undisturbed.judge(whole_log=False) == ended


def test_a_run_pauses_at_the_quota_and_goes_on_once_it_is_raised() -> None:
    """Each outer round keeps an anchor of 17 KB, which the log names."""
    rounds = 12
    with Stage("--blob-quota-gb", "0.00015", sites=APART) as stage:
        run = GatedRun(stage, steps=EVERY * rounds, sites=APART, outer=OUTER)
        run.let(EVERY * rounds)
        paused = run.until(lambda run: run.status is RunStatus.PAUSED, "the pause")
        assert "blob_quota_gb allows 150000" in paused.reason
        assert 0 < paused.outer_rounds < rounds
        assert sum(path.stat().st_size for path in (stage.data / "blobs").glob("??/*")) <= 150_000

        stage.kill("coordinator")
        stage.set_options("--blob-quota-gb", "1")
        stage.start_again("coordinator", "a")
        assert run.view.status is RunStatus.PAUSED
        stage.client.resume_run(run.id)
        run.end()
        ended = run.judge()
        assert run.view.alarms == []

        undisturbed = GatedRun(stage, steps=EVERY * rounds, sites=APART, outer=OUTER)
        undisturbed.end()
        assert undisturbed.judge() == ended
