"""Which sites a simulation has, and in which regions; the files of `examples/specs` are among the specs."""

from pathlib import Path

import pytest
from rich.console import Console

from api import simulate as simulate_module
from api.errors import IsthmusError
from api.simulate import Simulation, simulate, spec_of
from api.specs import RunSpec

SPECS = Path(__file__).parents[3] / "examples" / "specs"
OUTER = {"outer": {"every": 1}}


def regions_of(**values: object) -> dict[str, str]:
    spec = RunSpec.model_validate({"name": "x", "task": "tiny_lm", "steps": 2, **values})
    return dict(Simulation.of(spec).regions)


@pytest.mark.parametrize(
    ("values", "regions"),
    [
        ({}, {"a": "west", "b": "west", "c": "west"}),
        (OUTER, {"a": "west", "b": "west", "c": "east"}),
        ({"sites": ["x", "y"]}, {"x": "west", "y": "west"}),
        (OUTER | {"sites": ["v", "w", "x", "y", "z"]}, dict.fromkeys("vwxy", "west") | {"z": "east"}),
        (OUTER | {"regions": {"eu": ["p"], "us": ["q", "r"]}}, {"p": "eu", "q": "us", "r": "us"}),
    ],
)
def test_sites_and_regions(values, regions):
    assert regions_of(**values) == regions


def test_sites_are_named_in_the_run_unless_its_regions_name_them():
    spec = spec_of(sites=2, steps=3, outer_every=0, fragments=1, lr=1e-3, k=4, data=None)
    assert Simulation.of(spec.model_copy(update={"sites": None})).spec.sites == ["a", "b", "c"]
    placed = spec.model_copy(update={"sites": None, "regions": {"west": ["a"]}})
    assert Simulation.of(placed).spec == placed


def test_another_task_is_refused():
    with pytest.raises(IsthmusError, match="trains the task tiny_lm; this spec names the task mine"):
        regions_of(task="mine")


def test_the_files_are_specs_of_what_they_are_called():
    specs = {path.stem: RunSpec.model_validate_json(path.read_text()) for path in SPECS.glob("*.json")}
    assert {name: spec.name for name, spec in specs.items()} == {name: name for name in specs}
    counts = {name: sorted(map(len, (spec.regions or {}).values())) for name, spec in specs.items()}
    apart = {name: [1, 1, 1] for name in ("pure-diloco", "streaming")}
    assert counts == {"pure-demo": [3], "flat-hybrid": [3], "hierarchical": [1, 2], **apart}
    assert {name for name, spec in specs.items() if spec.outer is None} == {"pure-demo"}
    assert {name for name, spec in specs.items() if spec.exchange == "none"} == apart.keys()
    assert {name for name, spec in specs.items() if spec.outer and not spec.outer.together} == {"streaming"}


@pytest.mark.parametrize("option", ["out", "report_file"])
@pytest.mark.parametrize("name", ["no/where", ".", "file/x"])
def test_what_cannot_be_written_is_refused_before_anything_starts(tmp_path, monkeypatch, option, name):
    def services(*_: object) -> None:
        raise AssertionError("it has started")

    monkeypatch.setattr(simulate_module, "services", services)
    (tmp_path / "file").touch()
    spec = spec_of(sites=2, steps=3, outer_every=0, fragments=1, lr=1e-3, k=4, data=None)
    files = {"out": tmp_path / "ok", "report_file": tmp_path / "ok", option: tmp_path / name}
    with pytest.raises(IsthmusError, match=f"cannot write {tmp_path / name}"):
        simulate(Simulation.of(spec), **files, directory=None, console=Console())
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_directory_that_is_a_file(tmp_path):
    (tmp_path / "file").touch()
    spec = spec_of(sites=2, steps=3, outer_every=0, fragments=1, lr=1e-3, k=4, data=None)
    with pytest.raises(IsthmusError, match=f"cannot make the directory {tmp_path / 'file'}: it is a file"):
        simulate(Simulation.of(spec), out=None, report_file=None, directory=tmp_path / "file", console=Console())
