"""The real `isthmus` command against a real coordinator: what a user sees, above all when something is wrong."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from api.schemas import MetricPoint
from api.specs import OuterSpec, RoundsSpec, SnapshotsSpec
from tests.conftest import wait_until
from tests.contract.by_hand import RunByHand, SiteByHand, new_name

BIN = Path(sys.executable).parent / "isthmus"
Isthmus = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def isthmus(coordinator, tmp_path) -> Isthmus:
    """Runs the command in an empty folder, with the coordinator's admin token unless told otherwise."""

    def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("ISTHMUS_")}
        given = {"ISTHMUS_COORDINATOR": coordinator.url, "ISTHMUS_TOKEN": coordinator.token("admin"), "COLUMNS": "200"}
        environment = kept | given | variables
        environment = {name: value for name, value in environment.items() if value}
        return subprocess.run(
            [BIN, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
        )

    return run


@pytest.fixture
def first_line(coordinator, tmp_path) -> Callable[..., str]:
    """What the command says first, which is then ended."""

    def run(*words: str) -> str:
        environment = os.environ | {"ISTHMUS_COORDINATOR": coordinator.url, "ISTHMUS_TOKEN": coordinator.token("admin")}
        with subprocess.Popen(
            [BIN, *words], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            process.terminate()
        return line

    return run


def write_spec(folder: Path, **values: object) -> str:
    path = folder / "run.json"
    path.write_text(json.dumps({"name": "cli", "task": "nothing", "steps": 10, **values}))
    return str(path)


def test_tokens(isthmus):
    made = isthmus("token", "create", "screen", "--scope", "observer", "--expires-in-s", "3600")
    assert made.returncode == 0, made.stderr
    token = made.stdout.strip()
    assert isthmus("run", "list", ISTHMUS_TOKEN=token).returncode == 0
    assert "scope admin, not observer" in isthmus("token", "list", ISTHMUS_TOKEN=token).stderr
    (listed,) = [
        item for item in json.loads(isthmus("token", "list", "--json").stdout)["items"] if item["name"] == "screen"
    ]
    assert listed["id"] in isthmus("token", "list").stdout
    assert isthmus("token", "revoke", listed["id"]).returncode == 0
    assert "revoked or has expired" in isthmus("run", "list", ISTHMUS_TOKEN=token).stderr
    issued = json.loads(isthmus("token", "create", "paris", "--scope", "join", "--json").stdout)
    assert (issued["scope"], issued["expires_at"]) == ("join", None)
    newest, before = json.loads(isthmus("audit", "--limit", "2", "--json").stdout)["items"]
    assert (newest["act"], newest["target"], newest["status"]) == ("token.create", f"tokens/{issued['id']}", 201)
    assert before["target"] == f"tokens/{listed['id']}"
    assert f"tokens/{issued['id']}" in isthmus("audit").stdout


@pytest.mark.parametrize(
    ("words", "variables", "message"),
    [
        (("token", "revoke", "nope"), {}, "there is no token 'nope'; `isthmus token list` shows"),
        (("token", "revoke", "admin"), {}, "set another with ISTHMUS_ADMIN_TOKEN"),
        (("token", "create", "x", "--scope", "site"), {}, "scope: Input should be 'admin', 'observer' or 'join'"),
        (("run", "show", "nope"), {}, "there is no run 'nope'; `isthmus run list` shows"),
        (("run", "list"), {"ISTHMUS_TOKEN": "x" * 40}, "nobody has issued this token"),
        (("run", "list"), {"ISTHMUS_TOKEN": ""}, "no token: set ISTHMUS_TOKEN"),
        (("run", "start", "missing.json"), {}, "there is no file missing.json"),
        (("run", "create", "missing.json"), {}, "cannot read the run spec missing.json: No such file"),
        (("site", "remove", "nowhere"), {}, "there is no site 'nowhere'"),
        (("run", "start", "."), {}, "'.' is neither a run's id nor a name"),
        (("run", "start", "/dev/null"), {}, "there is no file and no run /dev/null: `isthmus run list` shows"),
        (("run", "remove-site", "nope", "a/b"), {}, "'a/b' is neither a run's id nor a name: it has a slash"),
        (("run", "delete", ".."), {}, "'..' is neither a run's id nor a name"),
        (("run", "pause", "nope"), {}, "there is no run 'nope'"),
        (("run", "resume", "nope"), {}, "there is no run 'nope'"),
        (("run", "add-site", "nope", "ant"), {}, "there is no run 'nope'"),
        (("run", "remove-site", "nope", "ant"), {}, "there is no run 'nope'"),
        (("run", "export", "nope", "--out", "x"), {}, "there is no run 'nope'"),
        (("run", "export", "nope", "--snapshot", "1", "--out", "x"), {}, "there is no run 'nope'"),
        (("run", "snapshot", "nope"), {}, "there is no run 'nope'"),
        (("run", "snapshots", "nope"), {}, "there is no run 'nope'"),
        (("run", "start", "nope", "--from", "nope/1"), {}, "--from is for new runs: give a JSON file"),
    ],
)
def test_errors_name_the_thing_and_the_remedy(isthmus, words, variables, message):
    done = isthmus(*words, **variables)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"outer": {"every": 20}}, "outer.every = 20 is more than steps = 10"),
        ({"steps": 0}, "steps: Input should be greater than or equal to 1"),
        ({"optimizer": {"k": 5000}}, "k must be 1 to 4096 for chunks of 64 x 64, got 5000"),
        ({"stepps": 5}, "there is no 'stepps': did you mean 'steps'?"),
        ({"name": "Big Name"}, "'Big Name' is no name: use lower-case letters"),
    ],
)
def test_a_spec_that_makes_no_sense_is_refused(isthmus, tmp_path, values, message):
    done = isthmus("run", "start", write_spec(tmp_path, **values))
    assert done.returncode == 1
    assert message in done.stderr
    assert "run.json" in done.stderr


def test_a_spec_that_is_no_text_is_refused(isthmus, tmp_path):
    (tmp_path / "run.json").write_bytes(b'{"name": "\xff"}')
    done = isthmus("run", "start", "run.json")
    assert (done.returncode, done.stderr.strip()) == (
        1,
        "isthmus: run spec run.json is not UTF-8 text: invalid start byte at byte 10",
    )


def test_a_spec_to_simulate_is_not_varied_by_options(isthmus, tmp_path):
    spec = write_spec(tmp_path, task="tiny_lm")
    done = isthmus("simulate", "--spec", spec, "--steps", "3", "--outer-every", "1")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"isthmus: --spec says it all: leave out --steps, --outer-every, or change {spec}" in done.stderr
    done = isthmus("simulate", "--spec", write_spec(tmp_path, task="mine"))
    assert "trains the task tiny_lm; this spec names the task mine" in done.stderr
    assert "Invalid value for '--steps'" in isthmus("simulate", "--steps", "-5").stderr


def test_a_new_run_that_cannot_start_leaves_nothing_behind(isthmus, tmp_path):
    before = [run["id"] for run in json.loads(isthmus("run", "list", "--json").stdout)]
    done = isthmus("run", "start", write_spec(tmp_path, sites=["nowhere"]))
    assert done.returncode == 1
    assert "site nowhere is not registered" in done.stderr
    assert [run["id"] for run in json.loads(isthmus("run", "list", "--json").stdout)] == before


@pytest.mark.parametrize(
    ("begin", "message"),
    [
        ("gone.safetensors", "--from gone.safetensors: there is no such file, and it is no snapshot, which is RUN/NUM"),
        ("nope/1", "there is no run 'nope'"),
        ("run.json", "--from run.json: not a safetensors file"),
    ],
)
def test_what_a_new_run_cannot_begin_with(isthmus, tmp_path, begin, message):
    done = isthmus("run", "start", write_spec(tmp_path), "--from", begin)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_snapshots_are_made_listed_and_exported(isthmus, coordinator, tmp_path):
    run = RunByHand(coordinator, ("west",), outer=OuterSpec(every=1), snapshots=SnapshotsSpec(every=1))
    (site,) = run.sites
    site.contribute(1, wait=20)
    site.announce(1, 0, run.parameters.tobytes())
    wait_until(lambda: run.admin.snapshots(run.id).items, "the snapshot")
    assert f"{run.id}/1" in isthmus("run", "snapshots", run.id).stdout
    assert isthmus("run", "export", run.id, "--snapshot", "1", "--out", "model.safetensors").returncode == 0
    assert "its snapshots: 1" in isthmus("run", "export", run.id, "--snapshot", "7", "--out", "x").stderr
    nowhere = isthmus("run", "export", run.id, "--snapshot", "1", "--out", "no/where/model.safetensors")
    assert (nowhere.returncode, nowhere.stderr.strip()) == (
        1,
        "isthmus: cannot write no/where/model.safetensors: there is no folder no/where; make it first",
    )
    started = isthmus("run", "start", write_spec(tmp_path, sites=["nowhere"]), "--from", "model.safetensors")
    assert "site nowhere is not registered" in started.stderr
    run.admin.stop_run(run.id)
    site.beat(site.failed())
    assert "as many as its spec says in `snapshots.keep`" in " ".join(
        isthmus("run", "snapshot", "--help").stdout.split()
    )
    for command in ("snapshot", "resume", "export"):
        more = ("--out", "x") if command == "export" else ()
        ended = isthmus("run", command, run.id, *more)
        assert f"run {run.id} is stopped" in ended.stderr
        assert f"a new run can go on from its last snapshot, `isthmus run start FILE --from {run.id}/1`" in ended.stderr


def test_what_a_site_sent_before_it_started_again_counts(isthmus, first_line, coordinator):
    run = RunByHand(coordinator, ("west",))
    (site,) = run.sites
    site.contribute(1, wait=20)
    for session, sent in (("a", 3_000_000), ("b", 4_000_000)):
        site.ranks.add_metrics(run.id, site.name, [MetricPoint(step=1, values={"bytes_up": sent})], session)
    assert first_line("run", "watch", run.id) == "step 1/3  sent 7.0 MB\n"
    report = json.loads(isthmus("run", "show", run.id, "--json").stdout)["report"]
    assert [site["bytes_up"] for site in report["sites"] + report["regions"]] == [7_000_000] * 2
    run.admin.stop_run(run.id)


def test_create_show_stop_and_delete(isthmus, tmp_path):
    created = json.loads(isthmus("run", "create", write_spec(tmp_path), "--json").stdout)
    assert created["status"] == "pending"
    assert created["id"] in isthmus("run", "list").stdout
    assert "not started yet" in isthmus("run", "show", created["id"]).stdout
    assert json.loads(isthmus("run", "stop", created["id"], "--json").stdout)["status"] == "stopped"
    assert isthmus("run", "delete", created["id"]).returncode == 0
    assert created["id"] not in isthmus("run", "list").stdout


def test_pause_resume_and_members(isthmus, first_line, coordinator):
    run = RunByHand(coordinator, ("west",) * 2, steps=10)
    second = run.sites[1]
    for site in run.sites:
        site.beat()
    goes_on = "`isthmus run resume` goes on; region west: step 1, waiting for 2 of 2 sites: "
    assert f"{run.id}: paused, step 0 of 10; {goes_on}" in isthmus("run", "pause", run.id).stdout
    assert f"step 0/10  paused: {goes_on}" in first_line("run", "watch", run.id)
    assert json.loads(isthmus("run", "resume", run.id, "--json").stdout)["status"] == "running"
    second.agent.leave(second.name)
    report = json.loads(isthmus("run", "show", run.id, "--json").stdout)["report"]
    (region,) = report["regions"]
    assert (region["sites"], region["outer_bytes_up"]) == (sorted(site.name for site in run.sites), 0)
    shown = isthmus("run", "show", run.id).stdout
    assert re.search(rf"{second.name} .* away .* its agent was stopped", shown)
    assert json.loads(isthmus("run", "remove-site", run.id, second.name, "--json").stdout)["status"] == "running"
    shown = isthmus("run", "show", run.id)
    assert "removed by an administrator" in shown.stdout
    assert "has one site" not in shown.stdout + shown.stderr
    assert "warning: region west has one site: it exchanges" in isthmus("run", "start", run.id).stderr
    refused = isthmus("run", "add-site", run.id, second.name)
    assert (refused.returncode, refused.stderr.strip()) == (
        1,
        f"isthmus: site {second.name} cannot be added: site {second.name} is left: its agent was stopped; start it "
        "again",
    )
    assert isthmus("run", "stop", run.id).returncode == 0
    shown = isthmus("run", "show", run.id)
    report = json.loads(isthmus("run", "show", run.id, "--json").stdout)["report"]
    assert report["digests_equal"] is None
    assert "DIFFER" not in shown.stdout


def test_a_site_that_brings_a_region_is_pointed_out(isthmus, coordinator):
    run = RunByHand(coordinator, outer=OuterSpec(every=2, fragments=1))
    added = SiteByHand(new_name("cli"), "wset", coordinator.url)
    added.register(coordinator.token("join"))
    done = isthmus("run", "add-site", run.id, added.name, "--json")
    assert (
        f"isthmus: region wset is new in run {run.id}, with site {added.name} alone; if that is a slip" in done.stderr
    )
    assert {region["name"] for region in json.loads(done.stdout)["regions"]} == {"west", "wset"}
    assert isthmus("run", "add-site", run.id, added.name).stderr == ""
    run.admin.stop_run(run.id)


def test_a_reason_that_looks_like_markup_is_shown_as_it_is(isthmus, coordinator):
    run = RunByHand(coordinator, ("west",), rounds=RoundsSpec(restarts=0))
    (site,) = run.sites
    site.beat(site.failed(detail="ValueError: [/red] is no [bold]colour[/]"))
    wait_until(lambda: run.admin.run(run.id).status == "failed", "the end")
    for command in (("list",), ("show", run.id)):
        assert "ValueError: [/red] is no [bold]colour[/]" in isthmus("run", *command, COLUMNS="400").stdout


@pytest.mark.slow
def test_an_unreachable_coordinator_is_named(tmp_path):
    environment = {**os.environ, "ISTHMUS_COORDINATOR": "http://127.0.0.1:1", "ISTHMUS_TOKEN": "x" * 40}
    done = subprocess.run(
        [BIN, "run", "list"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("isthmus: no answer from http://127.0.0.1:1 yet, trying for 10 s\n")
    assert "no answer from the coordinator at http://127.0.0.1:1" in done.stderr
    assert done.stdout == ""
