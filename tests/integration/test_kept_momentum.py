"""Real agents, ranks and coordinator: a site that was stopped goes on with the momentum of its earlier ranks."""

from pathlib import Path

import pytest

from tests.conftest import LiveCoordinator, wait_until
from tests.integration.test_agents import Agents

RANKS = ("mole-0", "newt-0", "newt-1")


@pytest.mark.slow
def test_a_stopped_agent_comes_back_with_its_momentum(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    """Site newt has two ranks, each with its part of the momentum; mole goes on meanwhile."""
    agents = Agents(coordinator, tmp_path)
    try:
        agents.start("mole", "farm")
        agents.start("newt", "farm", ranks=2)
        run = agents.run("linear", ["mole", "newt"], tmp_path, {"size": [70, 90]}, steps=10**6)
        wait_until(lambda: agents.client.run(run.id).step >= 5, "some steps")
        agents.services["newt"].interrupt()
        agents.services["newt"].join()
        kept = list((agents.site("newt") / "runs" / run.id).glob("momentum-*.safetensors"))
        assert {path.name for path in kept} == {"momentum-0.safetensors", "momentum-1.safetensors"}
        stopped_at = agents.client.run(run.id).step
        wait_until(lambda: agents.client.run(run.id).step > stopped_at, "a step without it")
        agents.start("newt", "farm", ranks=2)
        wait_until(lambda: listed(agents, run.id, stopped_at + 1, "newt"), "a step with it")
        logs = "".join(path.read_text() for path in (agents.site("newt") / "runs" / run.id).rglob("stdout.log"))
        assert logs.count("going on with the momentum of earlier ranks") == 2
        agents.client.pause_run(run.id)
        wait_until(lambda: len({last_line(tmp_path / f"digests-{rank}") for rank in RANKS}) == 1, "equal parameters")
    finally:
        agents.client.stop_run(run.id)
        for service in agents.services.values():
            service.interrupt()
            service.join()


def listed(agents: Agents, run_id: str, after: int, site: str) -> bool:
    while headers := agents.client.log(run_id, "farm", after + 1).items:
        if any(site in {sent["site"] for sent in header["contributors"]} for header in headers):
            return True
        after = headers[-1]["seq"]
    return False


def last_line(path: Path) -> str:
    return path.read_text().splitlines()[-1]
