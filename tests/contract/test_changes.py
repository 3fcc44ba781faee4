"""Changes of settings in a run that goes on, over real HTTP."""

import httpx
import numpy as np
import pytest

from algorithms.codec import pack_contribution
from algorithms.layout import ParameterLayout, TensorSpec
from algorithms.parts import cut
from algorithms.updates import restrict
from api.errors import ConflictError, InvalidError
from api.payload import decode_message
from api.schemas import RunStatus
from api.specs import Change, OuterSpec
from tests.conftest import wait_until
from tests.contract.by_hand import OPTIMIZER, WAIT_S, RunByHand, coefficients, problem

LARGE = ParameterLayout([TensorSpec("w", (320, 240), 0)], 32)
LIMIT = 1024


def bodies(site, step, k):
    """The parts of a contribution with so many coefficients per chunk."""
    ranges = cut(LARGE, k, OPTIMIZER.codec, OPTIMIZER.indices, LIMIT)
    whole = coefficients([step, *site.name.encode()], layout=LARGE, k=k)
    facts = {"layout": LARGE.digest, "k": k, "parts": len(ranges)}
    return [
        site.message(step, facts | {"part": part}, arrays=pack_contribution(restrict(whole, chunks), LARGE, "sign"))
        for part, chunks in enumerate(ranges)
    ]


def send(site, step, bodies, wait=0.0):
    """The last answer, which is that to the last part, unless an earlier one is refused."""
    for part, body in enumerate(bodies):
        answer = site.send(step, body, part=part, wait=wait if part == len(bodies) - 1 else 0.0)
        if answer.status_code >= 400:
            break
    return answer


@pytest.fixture
def run(patient):
    """Of two sites; contributions have many parts, the more the larger k is."""
    run = RunByHand(patient, steps=9, part_bytes=LIMIT, begin=False)
    for site in run.sites:
        site.join(LARGE)
    run.sites[0].upload_start(np.ones(LARGE.parameter_count, "<f4").tobytes())
    return run


def test_from_its_step_on_a_change_of_k_is_what_contributions_and_their_cut_follow(run):
    first, second = run.sites
    change = Change(from_step=2, k=16, lr=0.25)
    assert run.admin.change_run(run.id, change).changes == [change]
    many, few = (len(cut(LARGE, k, OPTIMIZER.codec, OPTIMIZER.indices, LIMIT)) for k in (OPTIMIZER.k, change.k))
    assert many > few > 1
    assert send(first, 1, bodies(first, 1, OPTIMIZER.k)).status_code == 202
    position = first.position()
    answer = send(second, 1, bodies(second, 1, OPTIMIZER.k), WAIT_S)
    assert len(decode_message("entry", answer.content)[0]["parts"]) == many
    assert first.position().seq == position.seq + 2
    step = first.ranks.log(run.id, "west", position.seq + 1).items[0]
    assert (step["kind"], step["k"], len(step["parts"])) == ("step", OPTIMIZER.k, many)

    def stale(site):
        header = {"position": {"seq": step["seq"], "hash": "0" * 64}, "layout": LARGE.digest, "parts": many}
        return site.send(2, site.message(2, header, arrays={}))

    for site in run.sites:
        detail = problem(stale(site), 410, "settings_changed")["detail"]
        assert f"site {site.name} is to apply entry {step['seq'] + 1}" in detail
    assert "k is 64, the run's is 16" in problem(send(first, 2, bodies(first, 2, 64)), 409, "settings_differ")["detail"]
    assert send(first, 2, bodies(first, 2, change.k)).status_code == 202
    header, _ = decode_message("entry", send(second, 2, bodies(second, 2, change.k), WAIT_S).content)
    assert (header["k"], len(header["parts"])) == (change.k, few)
    assert header["lr"] != step["lr"]


def test_what_a_paused_run_keeps_back_is_told_of_the_change(run):
    """Its parts are stored, and are not in the way of those with the new settings."""
    first, second = run.sites
    for site in run.sites:
        answer = send(site, 1, bodies(site, 1, OPTIMIZER.k), WAIT_S if site is second else 0)
    assert answer.status_code == 200
    for site in run.sites:
        send(site, 2, bodies(site, 2, OPTIMIZER.k))
    run.admin.pause_run(run.id)
    assert send(first, 2, bodies(first, 2, OPTIMIZER.k)).status_code == 200
    early = bodies(first, 3, OPTIMIZER.k)
    answer = send(first, 3, early)
    assert (answer.status_code, answer.headers["isthmus-accepted"]) == (202, "false")
    run.admin.change_run(run.id, Change(from_step=3, k=16))
    answer = send(first, 3, early)
    assert (answer.status_code, answer.headers["isthmus-accepted"]) == (202, "false")
    run.admin.resume_run(run.id)
    problem(send(first, 3, early), 410, "settings_changed")
    assert send(first, 3, bodies(first, 3, 16)).headers["isthmus-accepted"] == "true"
    assert send(second, 3, bodies(second, 3, 16), WAIT_S).status_code == 200


def test_what_cannot_be_changed_is_refused_with_the_reason(patient):
    run = RunByHand(patient, steps=9, outer=OuterSpec(every=5))

    def refused(error, code, **change):
        with pytest.raises(error) as caught:
            run.admin.change_run(run.id, Change(**change))
        assert caught.value.code == code
        return caught.value

    assert refused(ConflictError, "step_open", from_step=1, k=8).context == {"from_step": 2}
    refused(InvalidError, "nothing_to_change", from_step=2)
    refused(InvalidError, "bad_change", from_step=2, k=1025)
    assert refused(InvalidError, "bad_change", from_step=2, every=10).errors
    assert run.view.changes == []
    headers = {"Authorization": f"Bearer {patient.token('observer')}"}
    answer = httpx.post(f"{run.url}/v1/runs/{run.id}/changes", json={"from_step": 2, "k": 8}, headers=headers)
    problem(answer, 403, "wrong_scope")
    run.admin.change_run(run.id, Change(from_step=3, every=2))
    for step in (1, 2, 3):
        run.round(step, "west")
    assert run.view.regions[0].step == 3
    run.round(4, "west")
    copy = np.zeros_like(run.parameters).tobytes()
    for site in run.sites:
        site.announce(1, 0, copy)
    wait_until(lambda: run.view.outer_rounds == 1, "the outer round after step 4")
    run.round(5, "west")
    assert run.view.status is RunStatus.RUNNING
