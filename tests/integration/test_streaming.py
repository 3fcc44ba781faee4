"""Three real sites, torchrun, HTTP and Redis: fragments that are due by turns, late anchors, uploads in fewer bits."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from algorithms.layout import ParameterLayout
from api.schemas import MemberView, Run
from api.specs import OuterSpec
from site_agent.rebuild import rebuild
from site_agent.replay import compared
from tests import reference
from tests.conftest import LiveCoordinator, wait_until
from tests.integration.test_agents import Agents
from tests.integration.test_three_sites import read_log, tensors_of
from tests.reference_outer import check_outer_rounds

SITES = {"stream-a": "west", "stream-b": "west", "stream-c": "east"}
STREAMING = {"stagger": True, "delay": 2, "mix": 0.5}


@pytest.fixture(scope="module")
def agents(coordinator: LiveCoordinator, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agents]:
    agents = Agents(coordinator, tmp_path_factory.mktemp("streaming"))
    try:
        for site, region in SITES.items():
            agents.start(site, region)
        yield agents
    finally:
        agents.close()


def begun(agents: Agents, folder: Path, sites: list[str], outer: dict[str, Any], **spec: Any) -> Run:
    params = {"seed": 3, "size": [40, 30], **spec.pop("params", {})}
    outer_spec = OuterSpec(**{"every": 6, "fragments": 2} | outer)
    return agents.run("linear", sites, folder, params, **{"steps": 14, "outer": outer_spec} | spec)


def ended(agents: Agents, run: Run, *alarms: str) -> Run:
    """With equal digests at all sites, and at the end of the log of every region."""
    run = agents.end(run)
    assert run.status == "succeeded", run.reason
    assert run.alarms == list(alarms)
    assert len({member.digest for member in run.members}) == 1
    regions = [region.name for region in run.regions]
    report = compared(run, [rebuild(agents.client, run, name, None, lambda *_: None) for name in regions])
    assert report["equal"] is True
    assert [line["copies_differ"] for line in report["regions"]] == [[] for _ in regions]
    return run


def check(agents: Agents, run: Run) -> dict[str, list[dict[str, Any]]]:
    """By the reference, from the logs alone; the anchors in each log."""
    client, outer = agents.client, run.spec.outer
    layout = ParameterLayout.from_json(client.model(run.id).layout)
    fragments = [(tensors.start, tensors.stop) for tensors in layout.fragments(outer.fragments)]
    grid = {"chunk": layout.chunk, "fragments": fragments, "groups": [tensor.group for tensor in layout.tensors]}
    logs = {region.name: read_log(client, run.id, region.name) for region in run.regions}
    copied: dict[str, dict[int, dict[str, np.ndarray]]] = {}
    for region, log in logs.items():
        start, copied[region] = tensors_of(layout, client.get_blob(log[0][0]["parameters"])), {}
        rebuilt = reference.replay(log, start, client.get_blob, mix=outer.mix, copied=copied[region], **grid)
        digest = reference.parameters_digest([rebuilt[tensor.name] for tensor in layout.tensors])
        assert digest == run.members[0].digest
    place = {"fragments": fragments, "chunk": layout.chunk}
    check_outer_rounds(log, start, copied, client.get_blob, outer=outer.model_dump(), **place)
    return {region: [header for header, _ in log if header["kind"] == "anchor"] for region, log in logs.items()}


def places(anchors: list[dict[str, Any]]) -> list[tuple[int, int, int]]:
    return [(header["fragment"], header["taken_after"], header["step"]) for header in anchors]


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "topk"])
def test_staggered_and_late_and_in_fewer_bits(agents: Agents, tmp_path: Path, codec: str) -> None:
    outer = {**STREAMING, "codec": codec, **({"k": 64} if codec == "topk" else {})}
    run = ended(agents, begun(agents, tmp_path, list(SITES), outer))
    assert [outer.step for outer in agents.client.outer_rounds(run.id)] == [3, 6, 9, 12, 14]
    for anchors in check(agents, run).values():
        assert places(anchors)[:4] == [(0, 3, 5), (1, 6, 8), (0, 9, 11), (1, 12, 14)]
        assert sorted(places(anchors)[4:]) == [(0, 14, 14), (1, 14, 14)]


@pytest.mark.slow
@pytest.mark.parametrize("alone", [False, True])
def test_a_site_that_is_killed_between_a_copy_and_its_anchor_comes_back(
    agents: Agents, tmp_path: Path, alone: bool
) -> None:
    """After step 7; the copy is that of step 6, its anchor is applied after step 8."""
    params = {"holding": list(SITES), "hold_at": 8}
    places = {"exchange": "none", "regions": {"p": ["stream-a"], "q": ["stream-b"], "r": ["stream-c"]}}
    outer = {**STREAMING, "codec": "int8"}
    started = begun(agents, tmp_path, list(SITES), outer, steps=20, params=params, **(places if alone else {}))
    for site in SITES:
        wait_until((tmp_path / f"held-{site}").exists, f"{site} to hold")
    for process in agents.ranks("stream-b"):
        process.kill()
    agents.until(started, lambda now: member_of(now).attempt == 2 and member_of(now).condition == "active", "a return")
    for site in SITES:
        (tmp_path / f"go-{site}").touch()
    run = ended(agents, started)
    numbers = [one.number for one in agents.client.outer_rounds(run.id)]
    anchors = [header for header, _ in read_log(agents.client, run.id, run.regions[0].name)]
    assert [header["outer_round"] for header in anchors if header["kind"] == "anchor"] == [*numbers, numbers[-1]]


@pytest.mark.slow
@pytest.mark.parametrize("outer", [{"codec": "int8"}, STREAMING], ids=["int8", "streaming"])
def test_a_region_that_misses_an_outer_round_keeps_what_it_did(
    agents: Agents, tmp_path: Path, outer: dict[str, Any]
) -> None:
    """Its ranks die after step 7, when the others have come to the next outer round: new ones have it from the log."""
    missed, ends = (9, 11) if outer is STREAMING else (12, 12)
    params = {"holding": {"stream-c": 8, "stream-a": ends + 1, "stream-b": ends + 1}}
    started = begun(agents, tmp_path, list(SITES), outer, steps=20, params=params)
    wait_until((tmp_path / "held-stream-c").exists, "the region to be held")
    agents.until(started, lambda now: step_of(now, "west") == ends, "the others to wait")
    for process in agents.ranks("stream-c"):
        process.kill()
    (tmp_path / "go-stream-c").touch()
    agents.until(started, lambda now: member_of(now, "stream-c").attempt == 2, "another attempt")
    agents.until(started, lambda now: member_of(now, "stream-c").condition == "active", "a return")
    for site in ("stream-a", "stream-b"):
        (tmp_path / f"go-{site}").touch()
    run = ended(agents, started)
    weights = {one.step: one.weights for one in agents.client.outer_rounds(run.id)}
    assert weights[missed].keys() == {"west"}
    after = min(step for step in weights if step > missed)
    steps = {"east": 1 + after - ends, "west": after - missed}
    each = weights[after]["west"] // steps["west"] // 2
    assert weights[after] == {"east": each * steps["east"], "west": 2 * each * steps["west"]}
    kept = [place for place in check(agents, run)["east"] if place.get("before") is not None]
    assert places(kept) == [(fragment, missed, ends) for fragment in ([0] if outer is STREAMING else [0, 1])]


@pytest.mark.slow
def test_a_site_that_is_late_for_an_outer_round_keeps_what_it_did(agents: Agents, tmp_path: Path) -> None:
    """It holds before step 5; the others go on 8 s after they have come to step 6."""
    regions = {"p": ["stream-a"], "q": ["stream-b"], "r": ["stream-c"]}
    outer = {"every": 3, "deadline_s": 8}
    params = {"holding": {"stream-c": 5}}
    spec = {"exchange": "none", "regions": regions, "steps": 12}
    started = begun(agents, tmp_path, list(SITES), outer, params=params, **spec)
    agents.until(started, lambda now: now.outer_rounds == 2, "the others to go on")
    (tmp_path / "go-stream-c").touch()
    run = ended(agents, started, "site stream-c was late for an outer round, which went on without it: number 2")
    rounds = agents.client.outer_rounds(run.id)
    assert [one.late for one in rounds] == [[], ["stream-c"], [], []]
    assert rounds[2].weights["r"] == 2 * rounds[2].weights["p"] == 2 * rounds[3].weights["r"]
    kept = [header for header, _ in read_log(agents.client, run.id, "r") if header.get("before") is not None]
    assert places(kept) == [(0, 6, 6), (1, 6, 6)]


def step_of(run: Run, name: str) -> int:
    return next(region.step for region in run.regions if region.name == name)


def member_of(run: Run, site: str = "stream-b") -> MemberView:
    return next(member for member in run.members if member.site == site)
