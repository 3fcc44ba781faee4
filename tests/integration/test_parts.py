"""Real agents with two ranks each: where a contribution is cut makes no difference to any bit of the parameters."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from api.schemas import RunStatus
from api.specs import OuterSpec
from tests.conftest import LiveCoordinator
from tests.integration.test_agents import Agents, digests
from tests.processes import processes_of

SITES = ["yak", "yew"]
STEPS = 6


@pytest.fixture(scope="module")
def agents(coordinator: LiveCoordinator, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agents]:
    agents = Agents(coordinator, tmp_path_factory.mktemp("agents-in-parts"))
    for name in SITES:
        agents.start(name, "parts", ranks=2)
    yield agents
    agents.close()
    assert not processes_of(agents.folder)


def steps_of(agents: Agents, folder: Path, part_bytes: int) -> tuple[set[int], list[list[str]]]:
    """How many parts the updates of a run have, and the digests of the parameters after each step at every rank."""
    folder.mkdir()
    params = {"size": [640, 640], "seed": 5}
    outer = OuterSpec(every=4)
    run = agents.run("linear", SITES, folder, params, steps=STEPS, part_bytes=part_bytes, outer=outer)
    ended = agents.end(run)
    assert ended.status is RunStatus.SUCCEEDED, ended.reason
    assert len({member.digest for member in ended.members}) == 1
    headers = [header for header in agents.client.log(run.id, "parts", 0).items if header["kind"] == "step"]
    assert [len(header["contributors"]) for header in headers] == [2] * STEPS
    seen = [digests(folder, site, rank) for site in SITES for rank in range(2)]
    assert all(len(steps) == STEPS for steps in seen)
    return {len(header["parts"]) for header in headers}, seen


@pytest.mark.slow
def test_the_cut_makes_no_difference(agents: Agents, tmp_path: Path) -> None:
    """100 chunks of 54 bytes and a bias: at most 18 of them in a part of 1,024 bytes."""
    counts, many = steps_of(agents, tmp_path / "many", 1024)
    assert counts == {6}
    counts, one = steps_of(agents, tmp_path / "one", 6 << 20)
    assert counts == {1}
    assert many == one
    assert len({tuple(steps) for steps in one}) == 1
    assert len(set(one[0])) == STEPS
