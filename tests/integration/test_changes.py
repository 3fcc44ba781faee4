"""Real agents whose run is given another learning rate, k and H on the way, and `isthmus replay` of it."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from algorithms.schedule import learning_rate
from api.errors import ConflictError
from api.schemas import Condition, Run
from api.specs import Change, OuterSpec
from tests.conftest import LiveCoordinator
from tests.integration.test_agents import Agents, digests, member
from tests.integration.test_replay import replay
from tests.integration.test_three_sites import read_headers
from tests.processes import processes_of

STEPS, K, EVERY = 40, 64, 4
OUTER = OuterSpec(every=EVERY, fragments=2)
REGIONS = {"hen": "west", "jay": "west", "owl": "east"}


@pytest.fixture(scope="module")
def agents(coordinator: LiveCoordinator, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agents]:
    """hen and jay, which has two ranks, in region west; owl in region east."""
    agents = Agents(coordinator, tmp_path_factory.mktemp("agents-that-change"))
    for name, region in REGIONS.items():
        agents.start(name, region, ranks=2 if name == "jay" else 1)
    yield agents
    agents.close()
    assert not processes_of(agents.folder)


def soon(agents: Agents, run: Run) -> int:
    """The first step of a paused run that no region has opened."""
    with pytest.raises(ConflictError) as caught:
        agents.client.change_run(run.id, Change(from_step=1, k=1))
    return int(caught.value.context["from_step"])


def changed(agents: Agents, run: Run) -> Change:
    """The change, which holds by now in a run that is paused again."""
    agents.until(run, lambda now: now.step > 2, "step 3")
    agents.client.pause_run(run.id)
    change = Change(from_step=soon(agents, run), lr=5e-4, k=8, every=3)
    agents.client.change_run(run.id, change)
    agents.client.resume_run(run.id)
    agents.until(run, lambda now: now.step > change.from_step, "the change")
    agents.client.pause_run(run.id)
    return change


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True], ids=["at once", "overlapping"])
def test_all_sites_follow_a_change_and_so_does_one_that_joins_after_it(
    agents: Agents, tmp_path: Path, overlap: bool
) -> None:
    params, optimizer = {"size": [300, 200]}, {"k": K, "lr": 1e-3, "schedule": "linear"}
    spec = {"steps": STEPS, "outer": OUTER, "optimizer": optimizer, "part_bytes": 1024, "rounds": {"overlap": overlap}}
    run = agents.run("linear", list(REGIONS), tmp_path, params, **spec)
    change = changed(agents, run)
    agents.ranks("hen")[-1].kill()
    again = agents.until(run, lambda now: member(now, "hen").attempt == 2, "the next attempt")
    assert again.status == "paused"
    agents.until(run, lambda now: member(now, "hen").condition is Condition.ACTIVE, "the ranks to catch up")
    agents.client.resume_run(run.id)
    run = agents.end(run)
    assert (run.status, run.alarms, run.changes) == ("succeeded", [], [change]), run.reason
    assert len({one.digest for one in run.members}) == 1
    for region in set(REGIONS.values()):
        check_log(read_headers(agents.client, run.id, region), change)
    tail = [digests(tmp_path, "jay", rank)[-10:] for rank in (0, 1)]
    assert tail[0] == tail[1]
    done = replay(tmp_path, agents.coordinator.url, agents.coordinator.token("observer"), run.id, "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["equal"]) == (0, True), done.stderr
    assert all(line["copies"] and not line["copies_differ"] for line in report["regions"])


def check_log(headers: list[dict[str, object]], change: Change) -> None:
    """One change, in its place; and before and after it, steps and outer rounds by its settings."""
    (found,) = [header for header in headers if header["kind"] == "change"]
    assert (found["from_step"], found["step"]) == (change.from_step, change.from_step - 1)
    steps = [header for header in headers if header["kind"] == "step"]
    parts = {(header["k"], len(header["parts"])) for header in steps}
    assert len(parts) == len({count for _, count in parts}) == 2
    for header in steps:
        new = header["step"] >= change.from_step
        assert header["k"] == (change.k if new else K)
        peak = change.lr if new else 1e-3
        assert header["lr"][0] == learning_rate(header["step"], lr=peak, steps=STEPS, warmup=0, schedule="linear")
    held = {header["step"] for header in headers if header["kind"] == "anchor"}
    before, after = range(1, change.from_step), range(change.from_step, STEPS + 1)
    due = {step for step in before if step % EVERY == 0} | {step for step in after if step % 3 == 0}
    assert held == due | {STEPS}
