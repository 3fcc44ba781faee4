"""The specs of `examples/specs` on one set of real sites: each has the traffic that is its own, and no other."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from algorithms.layout import ParameterLayout
from api.client import CoordinatorClient
from api.report import build_report
from api.schemas import Run, RunSpec
from api.simulate import Simulation, services, wait_for_sites
from tests import reference
from tests.conftest import ROOT, run_to_its_end
from tests.integration.test_three_sites import read_log, tensors_of

pytestmark = pytest.mark.slow

SPECS = ROOT / "examples" / "specs"
STEPS, EVERY, OUTER_ROUNDS = 4, 2, 2
SMALL = {"data": str(ROOT / "README.md"), "batch": 1, "context": 64, "width": 96}


def spec_of(name: str) -> RunSpec:
    """As in the file, but for its length and its batches."""
    spec = RunSpec.model_validate_json((SPECS / f"{name}.json").read_text())
    outer = spec.outer and spec.outer.model_copy(update={"every": EVERY})
    return spec.model_copy(update={"steps": STEPS, "outer": outer, "params": SMALL, "evaluate_every": None})


def unmoved() -> RunSpec:
    """The flat hybrid at a rate that float32 rounds to nothing: every copy is entry 0's blob, and stays it."""
    spec = spec_of("flat-hybrid")
    assert spec.outer is not None
    optimizer, outer = {"lr": 1e-60}, {"fragments": 1}
    return spec.model_copy(
        update={
            "optimizer": spec.optimizer.model_copy(update=optimizer),
            "outer": spec.outer.model_copy(update=outer),
            "regions": {"west": ["a", "b"]},
        }
    )


@dataclass(frozen=True)
class Finished:
    client: CoordinatorClient
    run: Run

    @property
    def report(self) -> dict[str, Any]:
        return build_report(self.client, self.run)

    @property
    def layout(self) -> ParameterLayout:
        return ParameterLayout.from_json(self.client.model(self.run.id).layout)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Finished]]:
    """One run after the other, by the same three agents."""
    folder: Path = tmp_path_factory.mktemp("specs")
    everybody = Simulation.of(spec_of("hierarchical"))
    with services(everybody, folder) as (client, check):
        wait_for_sites(client, list(everybody.regions), check)
        finished = {}
        specs = {name: spec_of(name) for name in ("pure-demo", "flat-hybrid", "hierarchical", "pure-diloco")}
        for name, spec in (specs | {"unmoved": unmoved()}).items():
            run = client.start_run(client.create_run(spec).id)
            finished[name] = Finished(client, run_to_its_end(client, run.id, check))
        yield finished


def test_all_succeed_and_the_reference_rebuilds_each_from_its_log(runs: dict[str, Finished]) -> None:
    for name, finished in runs.items():
        assert finished.run.status == "succeeded", f"{name}: {finished.run.reason}"
        assert finished.run.alarms == []
        layout = finished.layout
        outer = finished.run.spec.outer
        fragments = [(part.start, part.stop) for part in layout.fragments(outer.fragments if outer else 1)]
        groups = [tensor.group for tensor in layout.tensors]
        for region in finished.run.regions:
            log = read_log(finished.client, finished.run.id, region.name)
            start = tensors_of(layout, finished.client.get_blob(log[0][0]["parameters"]))
            rebuilt = reference.replay(
                log, start, finished.client.get_blob, chunk=layout.chunk, fragments=fragments, groups=groups
            )
            digest = reference.parameters_digest([rebuilt[tensor.name] for tensor in layout.tensors])
            assert {member.digest for member in finished.run.members} == {digest}


def test_pure_demo_moves_no_parameters_after_entry_0(runs: dict[str, Finished]) -> None:
    report = runs["pure-demo"].report
    size = report["parameter_bytes"]
    for site in report["sites"]:
        assert site["round_bytes_up"] > 0
        assert site["outer_bytes_up"] == site["outer_bytes_down"] == 0
        uploads = 1 if site["name"] == "a" else 0  # entry 0
        assert uploads * size <= site["blob_bytes_up"] < uploads * size + 0.01 * size
        assert size <= site["blob_bytes_down"] < 1.01 * size


def test_flat_hybrid_uploads_one_copy_for_all_sites(runs: dict[str, Finished]) -> None:
    report = runs["flat-hybrid"].report
    (region,) = report["regions"]
    assert region["sites"] == ["a", "b", "c"]
    assert 1 <= region["outer_bytes_up"] / OUTER_ROUNDS / report["parameter_bytes"] <= 1.02
    assert all(site["round_bytes_up"] > 0 for site in report["sites"])
    for outer in runs["flat-hybrid"].client.outer_rounds(runs["flat-hybrid"].run.id):
        assert outer.distinct == len(outer.fragments)


def test_a_copy_that_the_store_has_is_announced_and_no_more(runs: dict[str, Finished]) -> None:
    report = runs["unmoved"].report
    assert report["outer_rounds"] == OUTER_ROUNDS
    for site in report["sites"]:
        assert site["round_bytes_up"] > 0
        for way in ("up", "down"):
            assert 0 < site[f"outer_bytes_{way}"] < 0.01 * report["parameter_bytes"]


def test_hierarchical_uploads_one_copy_per_region(runs: dict[str, Finished]) -> None:
    report = runs["hierarchical"].report
    assert {region["name"]: region["sites"] for region in report["regions"]} == {"west": ["a", "b"], "east": ["c"]}
    for region in report["regions"]:
        assert 1 <= region["outer_bytes_up"] / OUTER_ROUNDS / report["parameter_bytes"] <= 1.02
        assert region["round_bytes_up"] > 0


def test_pure_diloco_sends_parameters_at_outer_rounds_and_nothing_else(runs: dict[str, Finished]) -> None:
    finished = runs["pure-diloco"]
    report = finished.report
    assert [region["sites"] for region in report["regions"]] == [["b"], ["c"], ["a"]]  # east, north, west
    for site in report["sites"]:
        assert site["round_bytes_up"] == site["round_bytes_down"] == 0
        for way in ("up", "down"):
            assert 1 <= site[f"outer_bytes_{way}"] / OUTER_ROUNDS / report["parameter_bytes"] <= 1.02
    fragments = len(finished.client.outer_rounds(finished.run.id)[0].fragments)
    for region in finished.run.regions:
        kinds = [header["kind"] for header, _ in read_log(finished.client, finished.run.id, region.name)]
        assert kinds == ["start"] + ["anchor"] * fragments * OUTER_ROUNDS
