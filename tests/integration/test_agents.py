"""Real agents, torchrun, ranks and coordinator: how runs of small scripts go, and how they end if something breaks."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from algorithms.bits import packed_size
from algorithms.layout import ParameterLayout
from algorithms.traffic import contribution_bytes
from api.client import CoordinatorClient
from api.errors import ConflictError
from api.export import export_model, file_digest
from api.message import PROTOCOL_VERSION
from api.payload import encode_message
from api.processes import Service
from api.schemas import ContributionHeader, MemberView, Position, Run
from api.specs import Change, RunSpec
from tests import reference
from tests.conftest import ROOT, LiveCoordinator, wait_until
from tests.integration.test_three_sites import read_log, tensors_of
from tests.processes import processes_of

SCRIPTS = Path(__file__).parent / "scripts"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


@dataclass
class Agents:
    """Agents of one coordinator, and the runs that they do together."""

    coordinator: LiveCoordinator
    folder: Path
    services: dict[str, Service] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.client: CoordinatorClient = self.coordinator.client()

    def start(self, name: str, region: str, ranks: int = 1) -> None:
        options = {
            "--name": name,
            "--region": region,
            "--ranks": str(ranks),
            "--coordinator": self.coordinator.url,
            "--join-token-file": str(self.coordinator.directory / "join-token"),
            "--site-dir": str(self.site(name)),
            "--grace-s": "2",
        }
        arguments = [word for option in options.items() for word in option]
        for task in ("linear", "odd"):
            arguments += ["--task", f"{task}=python {shlex.quote(str(SCRIPTS / f'{task}.py'))}"]
        self.services[name] = Service("site_agent", arguments, self.folder / f"{name}.log", ROOT, ENVIRONMENT)

    def site(self, name: str) -> Path:
        return self.folder / f"data-of-{name}"

    def ranks(self, name: str) -> list[psutil.Process]:
        """torchrun and what it started, at one site."""
        return processes_of(self.site(name) / "runs")

    def run(self, task: str, sites: list[str], folder: Path, params: dict[str, Any], **spec: Any) -> Run:
        """A run that has just been started."""
        wait_until(lambda: all(self._online(site) for site in sites), f"{sites}", seconds=60)
        params = {"folder": str(folder), **params}
        if "regions" not in spec:
            spec["sites"] = sites
        run = self.client.create_run(RunSpec(name=task, task=task, params=params, **spec))
        return self.client.start_run(run.id)

    def _online(self, name: str) -> bool:
        self.services[name].check()
        return any(site.name == name and site.status == "online" for site in self.client.sites())

    def until(self, run: Run, condition: Callable[[Run], bool], what: str) -> Run:
        def look() -> Run | None:
            now = self.client.run(run.id)
            return now if condition(now) else None

        return wait_until(look, f"{what} of {run.id}; {self.client.run(run.id).reason}", seconds=100)

    def end(self, run: Run) -> Run:
        return self.until(run, lambda now: now.status.terminal, "the end")

    def nothing_left(self, *sites: str) -> None:
        wait_until(lambda: not any(self.ranks(site) for site in sites), f"the processes at {sites} to end", 60)

    def close(self) -> None:
        for service in self.services.values():
            service.interrupt()
        for service in self.services.values():
            service.join()


@pytest.fixture(scope="module")
def agents(coordinator: LiveCoordinator, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agents]:
    """ant and bee in region west with one rank each; cat and dog in region pets with two."""
    agents = Agents(coordinator, tmp_path_factory.mktemp("agents"))
    for name in ("ant", "bee"):
        agents.start(name, "west")
    for name in ("cat", "dog"):
        agents.start(name, "pets", ranks=2)
    yield agents
    agents.close()
    assert not processes_of(agents.folder)


def digests(folder: Path, site: str, rank: int = 0) -> list[str]:
    """Of the parameters after each step, as this rank saw them."""
    return (folder / f"digests-{site}-{rank}").read_text().split()


def replayed(client: CoordinatorClient, run: Run, region: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The parameters at the start and at the end of the log, by the reference."""
    layout = ParameterLayout.from_json(client.model(run.id).layout)
    log = read_log(client, run.id, region)
    start = tensors_of(layout, client.get_blob(log[0][0]["parameters"]))
    groups = [tensor.group for tensor in layout.tensors]
    fragments = layout.fragments(run.spec.outer.fragments if run.spec.outer else 1)
    ranges = [(tensors.start, tensors.stop) for tensors in fragments]
    optimizer = run.spec.optimizer
    rule = {"transform": optimizer.transform, "base_update": optimizer.base_update, "beta2": optimizer.beta2}
    grid = {"chunk": layout.chunk, "fragments": ranges, "groups": groups}
    return start, reference.replay(log, start, client.get_blob, **grid, **rule)


# --- runs that succeed ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_sites_of_two_ranks_with_outer_steps(agents: Agents, tmp_path: Path) -> None:
    outer = {"every": 3, "fragments": 2}
    run = agents.end(agents.run("linear", ["cat", "dog"], tmp_path, {"size": [140, 90]}, steps=6, outer=outer))
    assert run.status == "succeeded", run.reason
    assert (run.alarms, run.outer_rounds) == ([], 2)
    seen = [digests(tmp_path, site, rank) for site in ("cat", "dog") for rank in (0, 1)]
    assert len(seen[0]) == 6
    assert seen[1:] == seen[:1] * 3  # every rank of every site, after every step
    assert len(set(seen[0])) == 6
    assert {member.digest for member in run.members} == {digest_of(replayed(agents.client, run, "pets")[1])}
    layout = ParameterLayout.from_json(agents.client.model(run.id).layout)
    steps = [(header, arrays) for header, arrays in read_log(agents.client, run.id, "pets") if header["kind"] == "step"]
    for header, arrays in steps:
        assert [contributor["tokens"] for contributor in header["contributors"]] == [8, 8]  # 4 samples at each rank
        update = reference.unpack_update(arrays, [(t.name, t.shape) for t in layout.tensors], layout.chunk)
        assert all(chunk and chunk.values for chunk in update)  # from both ranks' halves of the chunks
    agents.nothing_left("cat", "dog")


def test_a_bit_that_flips_at_one_of_three_sites_is_seen_named_and_repaired(agents: Agents, tmp_path: Path) -> None:
    """The flat hybrid: one region, whose outer step is the mean (A11, A13)."""
    agents.start("eel", "west")
    sites, outer = ["ant", "bee", "eel"], {"every": 3, "lr": 1, "momentum": 0}
    run = agents.run("linear", sites, tmp_path, {"flipping": "bee"}, steps=5, outer=outer, regions={"west": sites})
    run = agents.end(run)
    assert run.status == "succeeded", run.reason
    assert run.alarms == ["step 3: fragment 0 of bee differs from region west's"]
    ant, bee, eel = (digests(tmp_path, site) for site in sites)
    assert ant == eel
    assert [mine == theirs for mine, theirs in zip(ant, bee, strict=True)] == [True, False, True, True, True]
    assert [outer_round.distinct for outer_round in agents.client.outer_rounds(run.id)] == [1, 1]


# --- regions without rounds -------------------------------------------------------------------------------------------

APART = {"one": ["ant"], "three": ["cat"], "two": ["bee"]}


@pytest.mark.slow
def test_sites_without_rounds_go_on_when_one_is_killed(agents: Agents, tmp_path: Path) -> None:
    """Pure DiLoCo; cat, with two ranks, is killed between the first outer round and the second."""
    sites = ["ant", "bee", "cat"]
    run = agents.run(
        "linear",
        sites,
        tmp_path,
        {"holding": sites, "hold_at": 7},
        steps=18,
        regions=APART,
        exchange="none",
        optimizer={"kind": "adamw", "lr": 0.01, "weight_decay": 0.1},
        outer={"every": 5, "fragments": 2},
    )
    wait_until(lambda: all((tmp_path / f"held-{site}").exists() for site in sites), "step 7 of all sites")
    assert agents.client.run(run.id).outer_rounds == 1
    for process in agents.ranks("cat"):
        if process.cmdline()[1] == str(SCRIPTS / "linear.py"):
            process.kill()
    (tmp_path / "go-cat").touch()
    agents.until(run, lambda now: (member(now, "cat").attempt, member(now, "cat").condition) == (2, "active"), "cat")
    for site in ("ant", "bee"):
        (tmp_path / f"go-{site}").touch()
    run = agents.end(run)
    assert run.status == "succeeded", run.reason
    assert (run.alarms, run.warnings, member(run, "cat").attempt) == ([], [], 2)
    (digest,) = {member.digest for member in run.members}
    first, *_ = agents.client.outer_rounds(run.id)
    assert (first.step, first.distinct) == (5, 6)
    for region in APART:
        kinds = [header["kind"] for header, _ in read_log(agents.client, run.id, region)]
        assert kinds == ["start"] + ["anchor"] * 8
        assert digest_of(replayed(agents.client, run, region)[1]) == digest
    assert digests(tmp_path, "ant")[4] == digests(tmp_path, "bee")[4] != digests(tmp_path, "ant")[5]


def test_sites_without_rounds_follow_a_change_behind_an_outer_round(agents: Agents, tmp_path: Path) -> None:
    """They hold still before the first outer round, until it has been asked for; the new rate moves nothing."""
    sites = ["ant", "bee"]
    run = agents.run(
        "linear",
        sites,
        tmp_path,
        {"holding": sites, "hold_at": 2},
        steps=9,
        regions={"one": ["ant"], "two": ["bee"]},
        exchange="none",
        optimizer={"kind": "sgd", "lr": 0.01, "momentum": 0, "schedule": "constant"},
        outer={"every": 3},
    )
    wait_until(lambda: all((tmp_path / f"held-{site}").exists() for site in sites), "step 2 of both sites")
    change = Change(from_step=4, lr=1e-30, every=4)
    assert agents.client.change_run(run.id, change).changes == [change]
    for site in sites:
        (tmp_path / f"go-{site}").touch()
    run = agents.end(run)
    assert run.status == "succeeded", run.reason
    assert (run.alarms, [member.attempt for member in run.members]) == ([], [1, 1])
    assert [outer_round.step for outer_round in agents.client.outer_rounds(run.id)] == [3, 4, 8, 9]
    for region in ("one", "two"):
        kinds = [header["kind"] for header, _ in read_log(agents.client, run.id, region)]
        assert kinds == ["start", "anchor", "change", "anchor", "anchor", "anchor"]
    ant, bee = (digests(tmp_path, site) for site in sites)
    assert [mine == theirs for mine, theirs in zip(ant, bee, strict=True)] == [False, False, *[True] * 7]


@pytest.mark.slow
def test_one_site_whose_outer_step_is_its_own_copy_trains_as_alone(agents: Agents, tmp_path: Path) -> None:
    """Whether it has outer rounds, and how many, changes no bit: an optimizer of the script's own keeps its state."""
    ends = []
    for every in (2, 6):
        (folder := tmp_path / str(every)).mkdir()
        outer = {"every": every, "optimizer": "sgd", "lr": 1, "momentum": 0, "state": "keep"}
        optimizer = {"kind": "custom", "lr": 0.01, "warmup": 3}
        params = {"seed": 5, "own": True}
        run = agents.run("linear", ["ant"], folder, params, steps=6, exchange="none", outer=outer, optimizer=optimizer)
        run = agents.end(run)
        assert run.status == "succeeded", run.reason
        ends.append(digests(folder, "ant"))
    assert ends[0] == ends[1]
    assert len(set(ends[0])) == 6


def digest_of(tensors: dict[str, np.ndarray]) -> str:
    return reference.parameters_digest([tensors[name] for name in sorted(tensors)])


@dataclass(frozen=True)
class Finished:
    client: CoordinatorClient
    run: Run
    folder: Path


@pytest.fixture(scope="module")
def pure(agents: Agents, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """One region and no outer step."""
    folder = tmp_path_factory.mktemp("pure")
    optimizer = {"codec": "int8", "k": 64, "weight_decay": 0.1, "warmup": 3}
    params = {"size": [300, 256]}
    run = agents.end(agents.run("linear", ["ant", "bee"], folder, params, steps=8, optimizer=optimizer))
    assert run.status == "succeeded", run.reason
    return Finished(agents.client, run, folder)


def test_pure_demo_exports_what_the_sites_ended_with(pure: Finished, tmp_path: Path) -> None:
    (digest,) = {member.digest for member in pure.run.members}
    assert digests(pure.folder, "ant") == digests(pure.folder, "bee")
    assert digests(pure.folder, "ant")[-1] == digest
    assert export_model(pure.client, pure.run.id, tmp_path / "model") == file_digest(tmp_path / "model") == digest
    assert digest_of(replayed(pure.client, pure.run, "west")[1]) == digest
    assert pure.client.outer_rounds(pure.run.id) == []


OTHER_SETTINGS: list[dict[str, Any]] = [
    {"transform": "hadamard", "codec": "int4", "indices": "compact", "base_update": "adam", "average": "tokens"},
    {"transform": "random", "codec": "int2", "chunk": 32, "base_update": "sgd", "average": "sites", "lr": 0.5},
    {"preset": "paper", "transform": "identity", "codec": "int16", "average": "median", "largest": 24},
]


@pytest.mark.parametrize(
    "optimizer",
    [OTHER_SETTINGS[0], *(pytest.param(settings, marks=pytest.mark.slow) for settings in OTHER_SETTINGS[1:])],
)
def test_runs_with_other_settings_end_with_the_bits_of_the_reference(
    agents: Agents, tmp_path: Path, optimizer: dict[str, Any]
) -> None:
    """Site cat has two ranks, which share the momentum."""
    sites, params = ["ant", "cat"], {"size": [140, 90]}
    run = agents.run("linear", sites, tmp_path, params, steps=5, optimizer=optimizer, regions={"pets": sites})
    run = agents.end(run)
    assert run.status == "succeeded", run.reason
    start, end = replayed(agents.client, run, "pets")
    assert {member.digest for member in run.members} == {digest_of(end)} != {digest_of(start)}
    agents.nothing_left(*sites)


def http_head(request: httpx.Request) -> int:
    """Bytes of the request line, the headers and the empty line after them."""
    line = f"{request.method} {request.url.raw_path.decode()} HTTP/1.1\r\n"
    return len(line) + sum(len(name) + len(value) + 4 for name, value in request.headers.raw) + 2


def test_bytes_sent_are_the_formula_and_headers(pure: Finished) -> None:
    """Headers are two: that of the safetensors message (the contribution's own and the table of its arrays), and the
    head of the HTTP request. Both are taken from a message that is made here, of zeros."""
    spec, layout = pure.run.spec, ParameterLayout.from_json(pure.client.model(pure.run.id).layout)
    formula = contribution_bytes(layout, spec.optimizer.k, "int8")
    (tall,) = layout.shapes.keys() - {(4, 64)}
    assert len(layout.shapes) == 2  # all but the bias, which is (4, 64)
    arrays = {}
    for shape in (tall, (4, 64)):
        chunks, elements = layout.select(shape).size, shape[0] * shape[1]
        values = chunks * max(round(spec.optimizer.k * elements / layout.chunk**2), 1)
        sizes = {"indices": packed_size(values, (elements - 1).bit_length()), "values": values, "scales": 2 * chunks}
        arrays |= {f"{shape[0]}x{shape[1]}.{name}": np.zeros(size, np.uint8) for name, size in sizes.items()}
    assert sum(array.nbytes for array in arrays.values()) == formula
    header = ContributionHeader(
        version=PROTOCOL_VERSION,
        run=pure.run.id,
        region="west",
        site="ant",
        step=5,
        position=Position(seq=5, hash="0" * 64),
        layout=layout.digest,
        codec="int8",
        indices="packed",
        k=spec.optimizer.k,
        tokens=4,
        part=0,
        parts=1,
        absent=[],
    )
    body = encode_message("contribution", header.model_dump(mode="json"), arrays)
    heads: list[int] = []

    def answer(request: httpx.Request) -> httpx.Response:
        heads.append(http_head(request))
        return httpx.Response(200)

    secret = "s" * 43  # as long as the ranks'
    with CoordinatorClient(pure.client.url, secret, transport=httpx.MockTransport(answer)) as client:
        client.contribute(pure.run.id, "west", 5, "ant", 0, body, 25.0)
    per_step = formula + (len(body) - formula) + heads[0]
    for site in ("ant", "bee"):
        points = [point for point in pure.client.metrics(pure.run.id) if point.site == site]
        counted = max(point.values.get("round_bytes_up") or 0 for point in points)
        assert counted == pytest.approx(8 * per_step, rel=0.02)
    assert formula > 0.5 * per_step  # else the headers would say it all


# --- odd models and gradients -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def odd(agents: Agents, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Six steps; at the second one site abstains, at the fourth both."""
    folder = tmp_path_factory.mktemp("odd")
    params = {"not_finite": {"2": ["bee"], "4": ["ant", "bee"]}}
    run = agents.end(agents.run("odd", ["ant", "bee"], folder, params, steps=6, optimizer={"weight_decay": 0.1}))
    assert run.status == "succeeded", run.reason
    return Finished(agents.client, run, folder)


def test_code_after_the_loop_runs_to_its_end(odd: Finished, agents: Agents) -> None:
    assert not (odd.folder / "done-ant").exists()
    (odd.folder / "go").touch()
    for site in ("ant", "bee"):
        wait_until((odd.folder / f"done-{site}").exists, f"the end of {site}'s script", seconds=30)
    agents.nothing_left("ant", "bee")


def test_an_odd_model_ends_with_equal_digests(odd: Finished) -> None:
    (digest,) = {member.digest for member in odd.run.members}
    start, end = replayed(odd.client, odd.run, "west")
    assert digest_of(end) == digest
    untouched = {name for name in start if np.array_equal(start[name], end[name])}
    assert untouched == {"frozen", "unused"}
    headers = [header for header, _ in read_log(odd.client, odd.run.id, "west")]
    assert len(headers) == 7


def test_buffers_are_the_donors_everywhere(odd: Finished) -> None:
    ant, bee = (json.loads((odd.folder / f"buffers-{site}").read_text()) for site in ("ant", "bee"))
    assert ant == bee
    assert ant["norm.running_mean"] == [float(ord("a"))] * 12
    assert ant["norm.num_batches_tracked"] == ord("a")


def test_gradients_that_are_not_finite_abstain(odd: Finished) -> None:
    steps = [header for header, _ in read_log(odd.client, odd.run.id, "west") if header["kind"] == "step"]
    answers = [
        ([each["site"] for each in header["contributors"]], [each["site"] for each in header["abstentions"]])
        for header in steps
    ]
    assert answers[0] == (["ant", "bee"], [])
    assert answers[1] == (["ant"], ["bee"])
    assert answers[3] == ([], ["ant", "bee"])
    assert all("not finite" in each["reason"] for each in steps[3]["abstentions"])
    assert [bool(header["parts"]) for header in steps] == [True, True, True, False, True, True]
    seen = wait_until(lambda: digests_of_both(odd.folder), "the digests")
    assert seen[2] == seen[3]  # an empty entry changes nothing, not even by weight decay
    assert len(set(seen)) == 5


def digests_of_both(folder: Path) -> list[str] | None:
    if not all((folder / f"digests-{site}-0").exists() for site in ("ant", "bee")):
        return None
    ant, bee = (digests(folder, site) for site in ("ant", "bee"))
    assert ant == bee
    return ant


# --- runs that end before their time ----------------------------------------------------------------------------------


ONCE = {"restarts": 0}


def member(run: Run, site: str) -> MemberView:
    return next(member for member in run.members if member.site == site)


def test_a_script_that_raises_excludes_its_site_with_its_last_lines(agents: Agents, tmp_path: Path) -> None:
    run = agents.run("linear", ["ant", "bee"], tmp_path, {"raising": "bee", "raise_at": 2}, steps=10, rounds=ONCE)
    wait_until((tmp_path / "raised").exists, "the script to raise")
    raised = time.monotonic()
    run = agents.until(run, lambda now: member(now, "bee").condition == "excluded", "the exclusion of bee")
    assert time.monotonic() - raised < 10
    first, *log = member(run, "bee").reason.splitlines()
    assert first.startswith("rank 0: exit code 1: ")
    assert first.endswith("RuntimeError: the data are broken")
    assert "this is the last line before the end" in log
    assert log[-1].endswith("RuntimeError: the data are broken")
    agents.nothing_left("bee")
    ended = agents.end(run)
    assert ended.status == "succeeded", ended.reason
    agents.nothing_left("ant")


def test_ranks_without_ddp_are_refused(agents: Agents, tmp_path: Path) -> None:
    run = agents.end(agents.run("linear", ["cat"], tmp_path, {"plain": True}, steps=2, rounds=ONCE))
    assert run.status == "failed"
    assert run.reason.startswith("no site is left in region pets: site cat, rank ")
    assert "this site has 2 ranks, but the model is not wrapped in DistributedDataParallel" in run.reason


def test_regions_that_would_never_meet_are_refused(agents: Agents, tmp_path: Path) -> None:
    with pytest.raises(ConflictError, match="the sites are in regions pets, west, which would never meet"):
        agents.run("linear", ["ant", "cat"], tmp_path, {}, steps=2)


def test_an_agent_that_is_killed_and_started_again_joins_anew(agents: Agents, tmp_path: Path) -> None:
    agents.start("gnu", "west")
    run = agents.run("linear", ["gnu"], tmp_path, {}, steps=10**6, rounds={"restarts": 10**6})
    agents.until(run, lambda now: now.step > 2, "step 3")
    agents.services.pop("gnu").kill()
    agents.start("gnu", "west")
    run = agents.until(run, lambda now: member(now, "gnu").condition == "joining", "another seat")
    assert run.status == "running"
    agents.client.stop_run(run.id)
    assert agents.end(run).status == "stopped"
    agents.nothing_left("gnu")


@pytest.mark.slow
def test_a_rank_with_other_parameters_excludes_its_site_at_the_outer_step(agents: Agents, tmp_path: Path) -> None:
    params = {"straying": "dog"}
    run = agents.run("linear", ["cat", "dog"], tmp_path, params, steps=6, outer={"every": 3}, rounds=ONCE)
    run = agents.end(run)
    assert run.status == "succeeded", run.reason
    dog = member(run, "dog")
    assert (dog.condition, dog.digest) == ("excluded", None)
    assert "ranks [1] of site dog hold other parameters than rank 0" in dog.reason
    agents.nothing_left("cat", "dog")


def test_an_operator_stops_a_run_in_the_middle(agents: Agents, tmp_path: Path) -> None:
    run = agents.run("linear", ["ant", "bee"], tmp_path, {}, steps=10**6)
    agents.until(run, lambda now: now.step >= 2, "step 2")
    agents.client.stop_run(run.id)
    ended = agents.end(run)
    assert ended.status == "stopped"
    assert ended.reason.startswith("stopped by request at step ")
    assert 2 <= ended.step < 10**6
    agents.nothing_left("ant", "bee")


def test_a_run_whose_last_ranks_are_killed_fails(agents: Agents, tmp_path: Path) -> None:
    run = agents.run("linear", ["bee"], tmp_path, {}, steps=10**6, rounds=ONCE)
    agents.until(run, lambda now: now.step >= 2, "step 2")
    (rank,) = (process for process in agents.ranks("bee") if process.cmdline()[1] == str(SCRIPTS / "linear.py"))
    rank.kill()
    ended = agents.end(run)
    assert ended.status == "failed"
    assert ended.reason.startswith("no site is left in region west: site bee, rank 0: killed (out of memory?)")
    agents.nothing_left("bee")


def test_an_agent_that_is_told_to_end_leaves_and_the_others_go_on(agents: Agents, tmp_path: Path) -> None:
    agents.start("elk", "west")
    run = agents.run("linear", ["ant", "elk"], tmp_path, {}, steps=10**6)
    agents.until(run, lambda now: now.step >= 2, "step 2")
    agents.services["elk"].interrupt()
    run = agents.until(run, lambda now: member(now, "elk").condition == "away", "the leaving of elk")
    assert member(run, "elk").reason == "its agent was stopped; a heartbeat brings it back"
    wait_until(lambda: not processes_of(agents.site("elk")), "elk's processes to end", 60)
    assert agents.client.site("elk").status == "left"
    agents.until(run, lambda now: now.step > run.step + 2, "steps without elk")
    agents.client.stop_run(run.id)
    assert agents.end(run).status == "stopped"
    agents.nothing_left("ant")


@pytest.mark.slow
def test_a_killed_agent_takes_its_ranks_along_and_the_run_waits(agents: Agents, tmp_path: Path) -> None:
    agents.start("fox", "west")
    run = agents.run("linear", ["fox"], tmp_path, {}, steps=10**6)
    agents.until(run, lambda now: now.step > 2, "step 3")
    agents.services.pop("fox").kill()
    agents.nothing_left("fox")
    run = agents.until(run, lambda now: member(now, "fox").condition == "away", "the loss of fox")
    assert run.status == "running"
    assert "0 of at least 1 sites there: fox (away since" in run.reason
    agents.client.stop_run(run.id)
    assert agents.end(run).status == "stopped"


# --- the simulation ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_simulations_side_by_side_and_one_that_is_interrupted(tmp_path: Path) -> None:
    """Three on one machine at the same time: two go to their end, the third gets Ctrl-C in the middle."""
    isthmus = Path(sys.executable).with_name("isthmus")

    def simulate(name: str, steps: int) -> subprocess.Popen[str]:
        options = ["--sites", "1", "--outer-every", "0", "--steps", str(steps), "--directory", str(tmp_path / name)]
        return subprocess.Popen(
            [isthmus, "simulate", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=tmp_path,
            env={**os.environ, **ENVIRONMENT},
        )

    first, second, third = simulate("one", 2), simulate("two", 2), simulate("three", 10**6)
    with first, second, third:
        wait_until(lambda: "step 2" in trace(tmp_path / "three"), "the third one to train")
        third.send_signal(signal.SIGINT)
        assert third.wait(60) == 130
        assert not processes_of(tmp_path / "three")
        for simulation in (first, second):
            output, _ = simulation.communicate(timeout=100)
            assert simulation.returncode == 0, output
    assert not processes_of(tmp_path)


def trace(folder: Path) -> str:
    """What an observer sees of the only run of a simulation."""
    url, token = folder / "url", folder / "observer-token"
    if not url.exists():
        return ""
    with CoordinatorClient(url.read_text().strip(), token.read_text().strip()) as client:
        return "".join(f"step {run.step}" for run in client.runs())
