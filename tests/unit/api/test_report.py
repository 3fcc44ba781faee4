"""The report of a run, and the words around its status."""

import io
from datetime import UTC, datetime

import pytest
from rich.console import Console

from api.report import (
    _agreement,
    build_report,
    digests_equal,
    print_report,
    print_table,
    print_warnings,
    run_table,
    steps_done,
    why,
)
from api.schemas import Condition, Run, StoredPoint
from api.specs import OuterSpec, RunSpec

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def run_of(*digests: str | None, status="stopped", reason="", condition="active") -> Run:
    members = [
        {
            "site": site,
            "region": "west",
            "attempt": 1,
            "ready": True,
            "condition": condition,
            "since": NOW,
            "reason": "",
            "digest": digest,
        }
        for site, digest in zip("abc", digests, strict=False)
    ]
    return Run(
        id="x",
        spec=RunSpec(name="x", task="nothing", steps=3),
        status=status,
        reason=reason,
        since=NOW,
        created_at=NOW,
        step=1,
        outer_rounds=0,
        members=members,
        regions=[{"name": "west", "step": 1, "tokens": 0}],
        alarms=[],
    )


A, B = "a" * 64, "b" * 64


@pytest.mark.parametrize(
    ("run", "equal"),
    [
        (run_of(None, None), None),
        (run_of(), None),
        (run_of(A, None), None),
        (run_of(A, A), True),
        (run_of(A, B, None), False),
        (run_of(A, B, condition="away"), None),
    ],
)
def test_whether_digests_are_equal(run, equal):
    assert digests_equal(run) is equal


@pytest.mark.parametrize(
    ("status", "reason", "words"),
    [
        ("paused", "paused: the loss is NaN, `isthmus run resume`", "the loss is NaN, `isthmus run resume`"),
        ("paused", "paused, `isthmus run resume` goes on", "`isthmus run resume` goes on"),
        ("paused", "paused; all 3 steps done", "all 3 steps done"),
        ("stopped", "stopped by request at step 0 of 3", "by request at step 0 of 3"),
        ("failed", "failedly", "failedly"),
        ("starting", "waiting for 1 of 2 sites to join: b", "waiting for 1 of 2 sites to join: b"),
    ],
)
def test_the_status_is_not_said_twice(status, reason, words):
    assert why(run_of(status=status, reason=reason)) == words


def test_steps_of_regions_that_came_later_do_not_count():
    run = run_of(None, None)
    regions = [{"name": name, "step": 0, "tokens": 0, "came_later": name == "north"} for name in ("west", "north")]
    members = [run.members[0], run.members[1].model_copy(update={"region": "north"})]
    spec = run.spec.model_copy(update={"exchange": "none", "outer": OuterSpec(every=3)})
    run = Run(**run.model_dump() | {"spec": spec, "regions": regions, "members": members})
    points = [StoredPoint(site=site, step=step, at=NOW, values={}) for site, step in (("a", 3), ("a", 17), ("b", 1))]
    assert steps_done(run, points) == 17


def test_the_list_of_runs_marks_those_with_alarms():
    alarmed = run_of(None).model_copy(update={"id": "loud", "alarms": ["[b] one", "two"]})
    console = Console(width=200)
    with console.capture() as said:
        console.print(run_table([alarmed, run_of(None)]))
    lines = [line.split("│") for line in said.get().splitlines() if "│" in line]
    assert [(line[1].strip(), line[4].strip()) for line in lines] == [("loud", "2"), ("x", "-")]


@pytest.mark.parametrize("terminal", [False, True])
def test_ids_of_runs_are_never_cut(terminal: bool):
    run = run_of(None).model_copy(update={"id": "two-regions-" + "x" * 50, "reason": "because " * 40})
    said = io.StringIO()
    print_table(run_table([run]), Console(file=said, width=80, force_terminal=terminal, color_system=None))
    lines = said.getvalue().splitlines()
    assert sum(run.id in line for line in lines) == 1
    assert (max(map(len, lines)) <= 80) == terminal
    if not terminal:
        assert run.reason.strip() in said.getvalue()


def test_a_warning_is_a_line():
    console = Console(width=20)
    with console.capture() as said:
        print_warnings(run_of(None).model_copy(update={"warnings": ["region [b] has one site: it is alone"]}), console)
    assert said.get() == "warning: region [b] has one site: it is alone\n"


def printed(**values):
    report = {
        "status": "running",
        "steps": 17,
        "wall_s": 34.2,
        "heldout_loss_start": None,
        "ddp_bytes_per_step": None,
        "outer_rounds": 0,
        "outer_copies_averaged": 0,
        "digests_equal": None,
        "sites": [],
    }
    console = Console(width=200)
    with console.capture() as said:
        print_report(report | values, console)
    return said.get()


def test_a_run_that_goes_on_is_so_for_a_while():
    assert printed().endswith("\nrunning for 34 s\n")
    assert printed(status="paused").endswith("\npaused for 34 s\n")
    assert printed(status="stopped").endswith("\nstopped in 34 s\n")


class Told:
    """What build_report asks a coordinator for."""

    def __init__(self, *points):
        self.points = [StoredPoint(site=site, step=step, at=NOW, values=values) for site, step, values in points]

    def metrics(self, run):
        return self.points

    def outer_rounds(self, run):
        return []


def test_a_site_that_never_trained_has_no_steps():
    run = run_of(A, A, None, status="succeeded")
    late = run.members[2].model_copy(update={"condition": Condition.JOINING})
    run = run.model_copy(update={"step": 150, "members": [*run.members[:2], late]})
    run = run.model_copy(update={"regions": [run.regions[0].model_copy(update={"step": 150})]})

    report = build_report(Told(("a", 149, {"bytes_up": 9})), run)
    assert [site["steps"] for site in report["sites"]] == [150, 150, None]
    console = Console(width=200)
    with console.capture() as said:
        print_report(report, console)
    (row,) = [line.split() for line in said.get().splitlines() if line.startswith("c ")]
    assert row == ["c", "west", *"-------"]
    assert said.get().endswith("; 2 of 3 sites hold the same parameters\n")

    report = build_report(Told(("c", 30, {"bytes_up": 9})), run)
    assert [site["steps"] for site in report["sites"]] == [150, 150, 30]


def test_all_sites_agree_only_if_all_have_told_their_digest():
    told, silent = {"name": "a", "digest": A}, {"name": "b", "digest": None}
    assert _agreement({"digests_equal": True, "sites": [told, told]}) == "; all sites hold the same parameters"
    assert _agreement({"digests_equal": True, "sites": [told]}) == "; all sites hold the same parameters"
    assert _agreement({"digests_equal": True, "sites": [told, silent]}) == ""
