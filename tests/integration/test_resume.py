"""Real agents, ranks and coordinators: a run goes on after everything was stopped, with other sites, from snapshots."""

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from api.export import export_model, manifest_of
from api.schemas import Condition, Manifest, Snapshot
from site_agent.rebuild import rebuild
from tests.conftest import LiveCoordinator, wait_until
from tests.integration.test_agents import Agents

OPTIONS = ("--lease-s", "5", "--tick-s", "0.2", "--log-recent", "3", "--log-keep", "1")
HERDS = (("ibex", "kudu", "oryx"), ("ibex", "oryx"), ("ibex", "kudu", "oryx", "zebu"))


def stop_everything(agents: Agents) -> None:
    for service in (*agents.services.values(), agents.coordinator.service):
        service.interrupt()
    for service in (*agents.services.values(), agents.coordinator.service):
        service.join()


def snapshot_after(agents: Agents, run: str, step: int) -> Snapshot:
    def made() -> Snapshot | None:
        for service in agents.services.values():
            service.check()
        return next((one for one in agents.client.snapshots(run).items if one.step > step), None)

    return wait_until(made, f"a snapshot after step {step}")


def seen(folder: Path, site: str) -> list[str]:
    """Digests of the parameters that the site's ranks had after a step, but for the step that is being written."""
    return (folder / f"digests-{site}-0").read_text().split("\n")[:-1]


def grazes(agents: Agents, run: str, herd: tuple[str, ...]) -> None:
    """Until rounds go on that wait for every site of the herd, of which zebu is new."""
    if "zebu" in herd:
        wait_until(lambda: any(site.name == "zebu" for site in agents.client.sites()), "zebu")
        agents.client.add_site(run, "zebu")

    def together() -> int:
        now = agents.client.run(run)
        active = {member.site for member in now.members if member.condition is Condition.ACTIVE}
        return now.step if active >= set(herd) else 0

    first = wait_until(together, f"all of {herd}")
    wait_until(lambda: together() > first + 2, f"steps with all of {herd}")


@pytest.mark.slow
def test_a_run_resumes_after_everything_was_stopped(
    new_coordinator: Callable[..., LiveCoordinator], tmp_path: Path
) -> None:
    """With 3, then 2, then 4 sites; those that come back enter the log at a snapshot, what was before is trimmed."""
    run = ""
    for herd in HERDS:
        agents = Agents(new_coordinator(*OPTIONS), tmp_path)
        for site in herd:
            agents.start(site, "farm")
        if not run:
            spec = {"steps": 10**6, "snapshots": {"every": 4, "keep": 2}}
            run = agents.run("linear", list(herd), tmp_path, {"size": [40, 30]}, **spec).id
        grazes(agents, run, herd)
        snapshot = snapshot_after(agents, run, agents.client.run(run).step)
        if herd is not HERDS[-1]:
            stop_everything(agents)
    agents.client.pause_run(run)
    manifest = Manifest.model_validate_json(agents.client.get_blob(snapshot.manifest))
    assert manifest.step == snapshot.step
    assert sum(manifest.parameters[0] in seen(tmp_path, site) for site in HERDS[-1]) >= 2, "equal at several sites"
    assert export_model(agents.client, run, tmp_path / "model", snapshot.number) == manifest.parameters[0]
    assert {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "model").items()} == {
        "weight": (30, 40),
        "bias": (30,),
    }
    newest = manifest_of(agents.client, run, agents.client.snapshots(run).items[-1].number)
    rebuilt = rebuild(agents.client, agents.client.run(run), "farm", None, lambda *_: None, newest)
    assert rebuilt.first == newest.positions["farm"].seq > 1, "entry 1 was trimmed"
    assert rebuilt.digest in {digest for site in HERDS[-1] for digest in seen(tmp_path, site)}
    agents.client.stop_run(run)
    agents.close()
