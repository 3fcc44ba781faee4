"""The specs of `examples/specs` on one set of real sites: each has the traffic that is its own, and no other."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from algorithms.layout import ParameterLayout
from api.client import CoordinatorClient
from api.report import build_report
from api.schemas import Run
from api.simulate import Simulation, services, wait_for_sites
from api.specs import RunSpec
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

    def log(self, region: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        return read_log(self.client, self.run.id, region)

    def replayed(self, region: str) -> str:
        """The digest that the reference comes to from the region's log."""
        layout, spec = ParameterLayout.from_json(self.client.model(self.run.id).layout), self.run.spec
        fragments = [(part.start, part.stop) for part in layout.fragments(spec.outer.fragments if spec.outer else 1)]
        groups = [tensor.group for tensor in layout.tensors]
        log = self.log(region)
        start = tensors_of(layout, self.client.get_blob(log[0][0]["parameters"]))
        rebuilt = reference.replay(
            log, start, self.client.get_blob, chunk=layout.chunk, fragments=fragments, groups=groups
        )
        return reference.parameters_digest([rebuilt[tensor.name] for tensor in layout.tensors])


RunToTheEnd = Callable[[RunSpec], Finished]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunToTheEnd]:
    """Runs a spec at the same three agents, and holds its log against the reference."""
    everybody = Simulation.of(spec_of("hierarchical"))
    with services(everybody, tmp_path_factory.mktemp("specs")) as (client, check):
        wait_for_sites(client, list(everybody.regions), check)

        def run_to_the_end(spec: RunSpec) -> Finished:
            started = client.start_run(client.create_run(spec).id)
            ended = run_to_its_end(client, started.id, check)
            assert ended.status == "succeeded", ended.reason
            assert ended.alarms == []
            finished = Finished(client, ended)
            for region in ended.regions:
                assert {member.digest for member in ended.members} == {finished.replayed(region.name)}
            return finished

        yield run_to_the_end


def test_pure_demo_moves_no_parameters_after_entry_0(run: RunToTheEnd) -> None:
    report = run(spec_of("pure-demo")).report
    size = report["parameter_bytes"]
    for site in report["sites"]:
        assert site["round_bytes_up"] > 0
        assert site["outer_bytes_up"] == site["outer_bytes_down"] == 0
        uploads = 1 if site["name"] == "a" else 0  # entry 0
        assert uploads * size <= site["blob_bytes_up"] < uploads * size + 0.01 * size
        assert size <= site["blob_bytes_down"] < 1.01 * size


def test_flat_hybrid_uploads_one_copy_for_all_sites(run: RunToTheEnd) -> None:
    finished = run(spec_of("flat-hybrid"))
    report = finished.report
    (region,) = report["regions"]
    assert region["sites"] == ["a", "b", "c"]
    assert 1 <= region["outer_bytes_up"] / OUTER_ROUNDS / report["parameter_bytes"] <= 1.02
    assert all(site["round_bytes_up"] > 0 for site in report["sites"])
    for outer in finished.client.outer_rounds(finished.run.id):
        assert outer.distinct == len(outer.fragments)


def test_a_copy_that_the_store_has_is_announced_and_no_more(run: RunToTheEnd) -> None:
    report = run(unmoved()).report
    assert report["outer_rounds"] == OUTER_ROUNDS
    for site in report["sites"]:
        assert site["round_bytes_up"] > 0
        for way in ("up", "down"):
            assert 0 < site[f"outer_bytes_{way}"] < 0.01 * report["parameter_bytes"]


def test_hierarchical_uploads_one_copy_per_region(run: RunToTheEnd) -> None:
    report = run(spec_of("hierarchical")).report
    assert {region["name"]: region["sites"] for region in report["regions"]} == {"west": ["a", "b"], "east": ["c"]}
    for region in report["regions"]:
        assert 1 <= region["outer_bytes_up"] / OUTER_ROUNDS / report["parameter_bytes"] <= 1.02
        assert region["round_bytes_up"] > 0


def test_pure_diloco_sends_parameters_at_outer_rounds_and_nothing_else(run: RunToTheEnd) -> None:
    finished = run(spec_of("pure-diloco"))
    report = finished.report
    assert [region["sites"] for region in report["regions"]] == [["b"], ["c"], ["a"]]  # east, north, west
    for site in report["sites"]:
        assert site["round_bytes_up"] == site["round_bytes_down"] == 0
        for way in ("up", "down"):
            assert 1 <= site[f"outer_bytes_{way}"] / OUTER_ROUNDS / report["parameter_bytes"] <= 1.02
    fragments = len(finished.client.outer_rounds(finished.run.id)[0].fragments)
    for region in finished.run.regions:
        kinds = [header["kind"] for header, _ in finished.log(region.name)]
        assert kinds == ["start"] + ["anchor"] * fragments * OUTER_ROUNDS


def test_streaming_sends_a_quarter_of_its_copies_by_turns(run: RunToTheEnd) -> None:
    """Fragment 0 after step 4, its anchor after 7; both after 8."""
    spec = spec_of("streaming")
    assert spec.outer is not None
    finished = run(spec.model_copy(update={"steps": 8, "outer": spec.outer.model_copy(update={"every": 8})}))
    report = finished.report
    layout = ParameterLayout.from_json(finished.client.model(finished.run.id).layout)
    copies = 1 + layout.fragment_elements(layout.fragments(2)[0]) / layout.parameter_count
    for site in report["sites"]:
        assert site["round_bytes_up"] == 0
        assert 0.25 * copies <= site["outer_bytes_up"] / report["parameter_bytes"] <= 0.25 * copies + 0.03
        assert copies <= site["outer_bytes_down"] / report["parameter_bytes"] <= copies + 0.03
    for region in finished.run.regions:
        anchors = [header for header, _ in finished.log(region.name) if header["kind"] == "anchor"]
        places = [(header["fragment"], header["taken_after"], header["step"]) for header in anchors]
        assert places == [(0, 4, 7), (0, 8, 8), (1, 8, 8)]
