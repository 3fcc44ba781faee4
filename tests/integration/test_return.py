"""Real agents, ranks and coordinator: sites whose ranks or agents die, or that join late, end with equal bits."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from api.schemas import Run
from tests.conftest import LiveCoordinator, wait_until
from tests.integration.test_agents import SCRIPTS, Agents, digests, member
from tests.integration.test_three_sites import read_headers


@pytest.fixture(scope="module")
def agents(coordinator: LiveCoordinator, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agents]:
    """auk and boa in region west with one rank each, doe in the same with two."""
    agents = Agents(coordinator, tmp_path_factory.mktemp("agents"))
    for name, ranks in (("auk", 1), ("boa", 1), ("doe", 2)):
        agents.start(name, "west", ranks)
    yield agents
    agents.close()


@pytest.fixture(autouse=True)
def nothing_goes_on(agents: Agents) -> Iterator[None]:
    """A test that fails leaves no run to the next one."""
    yield
    for run in agents.client.runs():
        if not run.status.terminal and {member.site for member in run.members} & agents.services.keys():
            agents.client.stop_run(run.id)
            agents.end(run)


def endless(agents: Agents, sites: list[str], folder: Path, params: dict[str, Any] | None = None, **spec: Any) -> Run:
    run = agents.run("linear", sites, folder, params or {}, steps=10**6, **spec)
    return agents.until(run, lambda now: now.step > 2, "step 3")


def until_active(agents: Agents, run: Run, site: str, attempt: int) -> Run:
    def active(now: Run) -> bool:
        return (member(now, site).attempt, member(now, site).condition) == (attempt, "active")

    return agents.until(run, active, f"the return of {site}")


def end_together(agents: Agents, run: Run, folder: Path, *sites: str) -> None:
    """A few steps with all of these sites, then the end: each holds the bits of the first one wherever both saw one."""
    reached = agents.client.run(run.id).step
    agents.until(run, lambda now: now.step > reached + 5, "some more steps")
    agents.client.stop_run(run.id)
    assert agents.end(run).status == "stopped"
    agents.nothing_left(*sites)
    steps = [header for header in read_headers(agents.client, run.id, "west") if header["kind"] == "step"]
    assert {contributor["site"] for contributor in steps[reached + 4]["contributors"]} == set(sites)
    first, *others = sites
    places = {digest: place for place, digest in enumerate(dict.fromkeys(digests(folder, first)))}
    for site in others:
        seen = [places[digest] for digest in dict.fromkeys(digests(folder, site)) if digest in places]
        assert len(seen) > 3
        assert seen == list(range(seen[0], seen[0] + len(seen)))


@pytest.mark.slow
@pytest.mark.parametrize(("site", "outer"), [("boa", None), ("doe", {"every": 4, "fragments": 2})])
def test_killed_ranks_are_started_again_and_catch_up(agents: Agents, tmp_path: Path, site: str, outer: Any) -> None:
    run = endless(agents, ["auk", site], tmp_path, outer=outer)
    *_, rank = (process for process in agents.ranks(site) if process.cmdline()[1] == str(SCRIPTS / "linear.py"))
    rank.kill()
    until_active(agents, run, site, attempt=2)
    end_together(agents, run, tmp_path, "auk", site)


@pytest.mark.slow
def test_a_killed_agent_that_is_started_again_brings_its_site_back(agents: Agents, tmp_path: Path) -> None:
    agents.start("gar", "west")
    run = endless(agents, ["auk", "gar"], tmp_path)
    agents.services.pop("gar").kill()
    agents.until(run, lambda now: member(now, "gar").condition == "away", "the loss of gar")
    agents.start("gar", "west")
    until_active(agents, run, "gar", attempt=1)
    end_together(agents, run, tmp_path, "auk", "gar")


@pytest.mark.slow
@pytest.mark.parametrize("outer", [None, {"every": 3, "fragments": 2}])
@pytest.mark.parametrize("base_update", ["signum", "adam"])
def test_a_site_that_joins_late_reaches_the_head(
    agents: Agents, tmp_path: Path, base_update: str, outer: dict[str, int] | None
) -> None:
    """With adam it replays everything from entry 0, the anchors of outer rounds among it."""
    run = endless(agents, ["auk"], tmp_path, optimizer={"base_update": base_update, "lr": 1e-4}, outer=outer)
    agents.client.add_site(run.id, "doe")
    until_active(agents, run, "doe", attempt=1)
    end_together(agents, run, tmp_path, "auk", "doe")


@pytest.mark.slow
def test_the_evaluation_goes_on_at_another_site_when_the_one_that_ran_it_goes_away(
    agents: Agents, tmp_path: Path
) -> None:
    agents.start("ape", "west")
    run = endless(agents, ["ape", "boa", "doe"], tmp_path, params={"evaluate_every": 2})

    def evaluated() -> dict[str, set[int]]:
        steps: dict[str, set[int]] = {}
        for point in agents.client.metrics(run.id):
            if "heldout_loss" in point.values:
                steps.setdefault(point.site, set()).add(point.step)
        return steps

    wait_until(lambda: len(evaluated().get("ape", ())) > 2, "evaluations at ape")
    assert evaluated().keys() == {"ape"}
    assert 0 in evaluated()["ape"]
    agents.services.pop("ape").interrupt()
    wait_until(lambda: len(evaluated().get("boa", ())) > 2, "evaluations at boa")
    before = max(evaluated()["boa"])
    agents.client.exclude_site(run.id, "boa")
    wait_until(lambda: len(evaluated().get("doe", ())) > 2, "evaluations at doe, which has two ranks")
    assert max(evaluated()["doe"]) > before
    agents.client.stop_run(run.id)
    assert agents.end(run).status == "stopped"


@pytest.mark.slow
def test_a_run_whose_only_site_was_killed_goes_on_to_its_end(agents: Agents, tmp_path: Path) -> None:
    run = agents.run("linear", ["boa"], tmp_path, {}, steps=60)
    agents.until(run, lambda now: now.step > 2, "step 3")
    for process in agents.ranks("boa"):
        process.kill()
    ended = agents.end(run)
    assert ended.status == "succeeded", ended.reason
    assert member(ended, "boa").attempt == 2
    assert member(ended, "boa").digest == digests(tmp_path, "boa")[-1]
