"""The checks after chaos must find what they are for: each gets evidence that is right, and evidence that is not."""

from types import SimpleNamespace

import pytest

from api.payload import digest_json
from site_agent.chaos.checks import Applied, differing, lost, repeated, unchained
from site_agent.chaos.evidence import applied
from site_agent.journal import Line

REGIONS = {"a": "west", "b": "west"}


def log(*rounds, steps=None):
    """A start, and an entry for each round, which lists digests by site."""
    headers = [{"kind": "start", "seq": 0, "step": 0, "previous": "0" * 64}]
    for seq, listed in enumerate(rounds, 1):
        contributors = [{"site": site, "digest": digest} for site, digest in listed.items() if digest]
        refusals = [{"site": site, "reason": "NaN"} for site, digest in listed.items() if not digest]
        headers.append(
            {
                "kind": "step",
                "seq": seq,
                "step": steps[seq - 1] if steps else seq,
                "previous": digest_json(headers[-1]),
                "contributors": contributors,
                "refusals": refusals,
            }
        )
    return {"west": headers}


def accepted(step, digest):
    return Line(step=step, digest=digest, answer="accepted")


LOG = log({"a": "a1", "b": "b1"}, {"a": "a2", "b": None}, {"b": "b3"})


@pytest.mark.parametrize(
    ("line", "losses"),
    [
        (accepted(1, "a1"), 0),
        (accepted(1, "other"), 1),
        (accepted(2, "b1"), 1),
        (accepted(3, "a3"), 1),
        (accepted(4, "a4"), 1),
        (Line(step=3, digest="a3", answer="closed"), 0),
        (Line(step=3, digest="a3", answer="bad_values"), 0),
    ],
)
def test_accepted_contributions_are_listed(line, losses):
    assert len(lost({"a": [line, accepted(2, "a2")], "b": [accepted(3, "b3")]}, LOG, REGIONS)) == losses


def test_a_recorded_refusal_accounts_for_what_was_accepted():
    assert lost({"b": [accepted(2, "b2")]}, LOG, REGIONS) == []
    assert "site a, step 2" in lost({"a": [accepted(2, "b2")]}, LOG, REGIONS)[0]


def test_entries_follow_one_another():
    assert unchained(LOG) == []
    headers = list(LOG["west"])
    for broken in (headers[1:], [*headers[:2], headers[3]], [*headers[:2], headers[1]]):
        assert unchained({"west": broken})
    headers[2] = {**headers[2], "step": 7}
    assert unchained({"west": headers}) == ["region west: entry 3 does not follow the one before it"]


def test_nothing_happens_twice():
    assert repeated(LOG, [Applied("a", "west", [(1, "x"), (2, "y")]), Applied("a", "west", [(2, "y"), (5, "z")])]) == []
    assert repeated(log({"a": "a1"}, {"a": "a2"}, steps=[4, 4]), []) == ["region west: step 4 again"]
    assert repeated(log({"a": "a1"}, {"a": "a1"}), []) == ["region west: a contribution is listed twice"]
    (found,) = repeated(LOG, [Applied("a", "west", [(1, "x"), (2, "y"), (2, "z")])])
    assert found == "site a: a process has applied step 2 again"


def test_what_a_process_said_is_found_among_what_it_logged(tmp_path):
    run = SimpleNamespace(id="run")
    (rank := tmp_path / "runs" / "run" / "1-x" / "0").mkdir(parents=True)
    said = [f'{{"step": {step}, "digest": "{step:02x}"}}\n' for step in (1, 2, 3, 4)]
    text = (
        f"{said[0]}2026-11-30 [warning] again kwargs={{}} waited=0.0{said[1]}\nlost {{'a': 1}}\n{said[2]}{said[3][:-1]}"
    )
    (rank / "stdout.log").write_text(text)
    (found,) = applied(tmp_path, run, "a", "west")
    assert found == Applied("a", "west", [(1, "01"), (2, "02"), (3, "03")])


def test_processes_of_a_region_hold_the_same_after_a_step():
    same = [Applied("a", "west", [(1, "x"), (2, "y")]), Applied("b", "west", [(2, "y")])]
    assert differing(same) == []
    assert differing([*same, Applied("c", "east", [(2, "z")])]) == []
    (found,) = differing([*same, Applied("b", "west", [(1, "x"), (2, "z")])])
    assert found == "region west, step 2: parameters differ between a, b"
