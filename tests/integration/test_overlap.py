"""Real agents, ranks and coordinator: rounds that overlap with the work on the next gradients."""

from pathlib import Path

import pytest

from tests.conftest import LiveCoordinator
from tests.integration.test_agents import Agents, digest_of, replayed


@pytest.mark.slow
def test_updates_are_applied_one_step_late(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    """Sites of one and of two ranks; steps 4 and 8 are followed by an outer round, before which nothing overlaps."""
    agents = Agents(coordinator, tmp_path)
    try:
        agents.start("kea", "west")
        agents.start("lynx", "west", ranks=2)
        outer, rounds = {"every": 4, "lr": 1, "momentum": 0}, {"overlap": True}
        run = agents.run("linear", ["kea", "lynx"], tmp_path, {"size": [70, 90]}, steps=8, outer=outer, rounds=rounds)
        run = agents.end(run)
        assert run.status == "succeeded", run.reason
        start, end = replayed(agents.client, run, "west")
        assert {member.digest for member in run.members} == {digest_of(end)}
        assert len(set(contributors(agents, run.id))) == 1
        for rank in ("kea-0", "lynx-0", "lynx-1"):
            digests = (tmp_path / f"digests-{rank}").read_text().split()
            before = [digest_of(start), *digests]
            same = [step for step in range(1, 9) if before[step] == before[step - 1]]
            assert same == [1, 5], rank  # nothing is applied at the first step after entry 0 or an outer round
            assert digests[3] != digests[2]
            assert digests[-1] == digest_of(end)
    finally:
        for service in agents.services.values():
            service.interrupt()
            service.join()


def contributors(agents: Agents, run_id: str) -> list[tuple[str, ...]]:
    """Of each step."""
    headers = agents.client.log(run_id, "west", 0).items
    return [tuple(sent["site"] for sent in header["contributors"]) for header in headers if header["kind"] == "step"]
