"""Real agents, ranks and coordinator: a run of two regions goes on with a third one, whose site comes later."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from api.schemas import Run
from api.specs import OuterSpec
from site_agent.rebuild import rebuild
from site_agent.replay import compared
from tests.conftest import LiveCoordinator, wait_until
from tests.integration.test_agents import Agents, digests, member
from tests.integration.test_three_sites import read_headers

SITES = {"moor": "west", "fen": "east", "dune": "north"}
DEMO = {"outer": {"every": 6, "fragments": 2}}
SPECS: dict[str, dict[str, Any]] = {
    "hierarchical": DEMO,
    "adam": {**DEMO, "optimizer": {"base_update": "adam", "lr": 1e-3}},
    "int8": {"outer": {"every": 6, "fragments": 2, "codec": "int8"}},
    "streaming": {"outer": {"every": 6, "fragments": 2, "stagger": True, "delay": 2}},
    "diloco": {"exchange": "none", "outer": {"every": 6, "fragments": 2}, "optimizer": {"kind": "adamw", "lr": 1e-3}},
}


@pytest.fixture(scope="module")
def agents(coordinator: LiveCoordinator, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agents]:
    agents = Agents(coordinator, tmp_path_factory.mktemp("regions"))
    try:
        for site, region in SITES.items():
            agents.start(site, region)
        yield agents
    finally:
        agents.close()


def of_two_regions(agents: Agents, folder: Path, **spec: Any) -> Run:
    """moor is held at step 14, until dune has joined; fen later, until it is active."""
    spec["outer"] = OuterSpec(**spec["outer"])
    params = {"seed": 5, "size": [40, 30], "holding": {"moor": 14, "fen": 20}}
    return agents.run("linear", ["moor", "fen"], folder, params, steps=32, **spec)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SPECS)
def test_a_third_region_comes_to_a_run_of_two(agents: Agents, tmp_path: Path, kind: str) -> None:
    run = of_two_regions(agents, tmp_path, **SPECS[kind])
    wait_until((tmp_path / "held-moor").exists, "moor to be held")
    wait_until(lambda: any(site.name == "dune" for site in agents.client.sites()), "dune")
    agents.client.add_site(run.id, "dune")
    agents.until(run, lambda now: member(now, "dune").ready, "the layout of dune")
    (tmp_path / "go-moor").touch()
    agents.until(run, lambda now: member(now, "dune").condition == "active", "dune to be active")
    (tmp_path / "go-fen").touch()
    run = agents.end(run)
    assert run.status == "succeeded", run.reason
    assert run.alarms == []
    assert len({one.digest for one in run.members}) == 1

    logs = {region: read_headers(agents.client, run.id, region) for region in SITES.values()}
    held = logs["north"][1]["outer_round"]
    assert held >= 1
    together = [line for line in logs["north"] if line["kind"] == "anchor" and "north" in regions_of(line)]
    assert {line["outer_round"] for line in together} >= {5}
    assert all(line["participants"] == [] for line in logs["north"][1:3])
    anchors = {(line["outer_round"], line["fragment"], line["digest"]) for line in logs["west"] if "fragment" in line}
    assert {(line["outer_round"], line["fragment"], line["digest"]) for line in together} <= anchors
    if kind != "streaming":
        shared = set(digests(tmp_path, "dune")) & set(digests(tmp_path, "moor")) & set(digests(tmp_path, "fen"))
        assert len(shared) == len({line["outer_round"] for line in together}) >= 2

    report = compared(run, [rebuild(agents.client, run, region, None, lambda *_: None) for region in logs])
    assert report["equal"] is True
    assert [line["copies_differ"] for line in report["regions"]] == [[], [], []]
    assert {line["region"]: line["copies"] > 0 for line in report["regions"]} == dict.fromkeys(
        logs, SPECS[kind].get("exchange") != "none"
    )


def regions_of(line: dict[str, Any]) -> set[str]:
    return {one["region"] for one in line["participants"]}
