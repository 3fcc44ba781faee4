"""Runs over real HTTP against a real coordinator and Redis, every site driven by hand."""

import hashlib
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest

from algorithms.codec import digest_arrays
from algorithms.layout import ParameterLayout
from api.errors import ForbiddenError, GoneError
from api.payload import decode_message
from api.schemas import Abstention, Position, RunStatus
from api.specs import OuterSpec
from tests.conftest import wait_until
from tests.contract.by_hand import LAYOUT, WAIT_S, RunByHand, problem


def hash_of(header):
    return hashlib.sha256(json.dumps(header, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def digest_of_parts(*bodies):
    """By section 1 of docs/decisions/0004-durability.md."""
    return hashlib.sha256(",".join(hashlib.sha256(body).hexdigest() for body in bodies).encode()).hexdigest()


def assert_chained(headers):
    previous = "0" * 64
    for seq, header in enumerate(headers):
        assert (header["seq"], header["previous"]) == (seq, previous)
        previous = hash_of(header)


def thinking(work):
    """Runs `work` in a thread; returns a function that waits for its result."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(work)
    pool.shutdown(wait=False)
    return lambda: future.result(60)


# --- whole runs -------------------------------------------------------------------------------------------------------


def test_two_sites_in_two_regions_to_the_end(patient):
    outer = OuterSpec(every=2, lr=1.0, momentum=0.0, fragments=2)
    run = RunByHand(patient, ("west", "east"), steps=3, outer=outer)
    layout_ranges = LAYOUT.fragments(2)
    anchor = run.parameters
    for number, steps in ((1, (1, 2)), (2, (3,))):
        for step in steps:
            for site in run.sites:
                header, arrays = run.round(step, site.region)
                assert header["step"] == step
                assert [line["site"] for line in header["contributors"]] == [site.name]
                assert header["parts"] == [digest_arrays(arrays)]
        copies = [anchor + np.float32(0.5), anchor - np.float32(0.25)]
        for fragment, tensors in enumerate(layout_ranges):
            start = LAYOUT.offsets[tensors.start]
            part = slice(start, start + LAYOUT.fragment_elements(tensors))
            for site, copy in zip(run.sites, copies, strict=True):
                assert site.announce(number, fragment, copy[part].tobytes())
        wait_until(lambda number=number: run.view.outer_rounds == number, "the outer round")
        anchor = ((copies[0].astype(np.float64) + copies[1].astype(np.float64)) / 2).astype("<f4")
    digest = hashlib.sha256(anchor.tobytes()).hexdigest()
    assert run.sites[0].report_final(digest).upload is False
    assert run.view.status is RunStatus.RUNNING
    assert run.sites[1].name in run.view.reason
    run.sites[1].report_final(digest)
    assert run.view.status is RunStatus.SUCCEEDED
    assert run.view.step == 3
    assert run.view.alarms == []
    model = run.admin.model(run.id)
    assert model.digest == digest
    assert b"".join(run.admin.get_blob(blob) for blob in model.blobs) == anchor.tobytes()
    assert ParameterLayout.from_json(model.layout).digest == LAYOUT.digest
    rounds = run.admin.outer_rounds(run.id)
    assert [(round_.number, round_.step, round_.distinct) for round_ in rounds] == [(1, 2, 4), (2, 3, 4)]
    assert [round_.weights for round_ in rounds] == [{"east": 20, "west": 20}, {"east": 10, "west": 10}]
    logs = [run.admin.log(run.id, region, 0) for region in ("west", "east")]
    for log in logs:
        assert log.ended
        assert [header["kind"] for header in log.items] == (
            ["start"] + ["step"] * 2 + ["anchor"] * 2 + ["step"] + ["anchor"] * 2
        )
        assert_chained(log.items)
        assert log.head == Position(seq=7, hash=hash_of(log.items[-1]))
    anchors = [[header["digest"] for header in log.items if header["kind"] == "anchor"] for log in logs]
    assert anchors[0] == anchors[1]


def test_one_region_without_outer_rounds(patient):
    run = RunByHand(patient, steps=2)
    for step in (1, 2):
        header, _ = run.round(step, "west")
        assert [line["tokens"] for line in header["contributors"]] == [10, 10]
    end = run.parameters.tobytes()
    digest = hashlib.sha256(end).hexdigest()
    first, second = run.sites
    assert first.report_final(digest).upload is (not patient.client().get_blob(digest))
    second.report_final(digest)
    wait_until(lambda: run.view.status.terminal, "the end")
    assert run.view.status is RunStatus.SUCCEEDED
    assert run.admin.model(run.id).blobs == [digest]


def test_sites_that_end_apart_fail_the_run_by_name(patient):
    run = RunByHand(patient, steps=1)
    run.round(1, "west")
    first, second = run.sites
    other = first.ranks.put_blob(b"\0" * len(run.parameters.tobytes()))
    first.report_final(other)
    second.report_final(hashlib.sha256(run.parameters.tobytes()).hexdigest())
    assert run.view.status is RunStatus.FAILED
    assert first.name in run.view.reason
    assert second.name in run.view.reason


def test_a_minority_copy_is_an_alarm(patient):
    run = RunByHand(patient, ("west",) * 3, steps=1, outer=OuterSpec(every=1))
    run.round(1, "west")
    copy = run.parameters.tobytes()
    for site in run.sites[:2]:
        site.announce(1, 0, copy)
    run.sites[2].announce(1, 0, b"\0" * len(copy))
    wait_until(lambda: run.view.outer_rounds == 1, "the outer round")
    (alarm,) = run.view.alarms
    assert run.sites[2].name in alarm
    assert "fragment 0" in alarm
    (anchor,) = [header for header in run.admin.log(run.id, "west", 0).items if header["kind"] == "anchor"]
    assert [part["digest"] for part in anchor["participants"]] == [hashlib.sha256(copy).hexdigest()]


def test_runs_side_by_side_do_not_mix(patient):
    runs = [RunByHand(patient, steps=2) for _ in range(2)]
    for step in (1, 2):
        for run in runs:
            header, _ = run.round(step, "west")
            assert [line["site"] for line in header["contributors"]] == [site.name for site in run.sites]
    one, other = runs
    strange = one.sites[0].message(2, {"run": other.id})
    problem(one.sites[0].send(3, strange), 422, "other_place")
    headers = {"Authorization": f"Bearer {one.sites[0].seat}"}
    problem(httpx.get(f"{one.url}/v1/runs/{other.id}/regions/west/log", headers=headers), 403, "wrong_run")


# --- contributions ----------------------------------------------------------------------------------------------------


def test_the_same_bytes_again_give_the_same_update(patient):
    run = RunByHand(patient)
    first, second = run.sites
    body = first.message(1)
    answer = first.send(1, body)
    assert (answer.status_code, answer.headers["content-type"]) == (202, "text/plain; charset=utf-8")
    assert answer.headers["isthmus-accepted"] == "true"
    assert answer.text.startswith(f"region west: step 1, waiting for 1 of 2 sites: {second.name}, since ")
    assert first.send(1, body).status_code == 202
    problem(first.send(1, first.message(1, seed=1)), 409, "other_bytes")
    second_body = second.message(1)
    update = second.send(1, second_body, wait=WAIT_S)
    assert (update.status_code, update.headers["content-type"]) == (200, "application/vnd.isthmus+safetensors")
    again = first.send(1, body)
    assert (again.status_code, again.content) == (200, update.content)
    assert first.ranks.update(run.id, "west", 1, 0, 0.0) == update.content
    header, _ = decode_message("entry", update.content)
    listed = {line["site"]: line["digest"] for line in header["contributors"]}
    assert listed == {
        first.name: digest_of_parts(body),
        second.name: digest_of_parts(second_body),
    }
    gone = problem(first.send(1, first.message(1, seed=1)), 410, "closed_without_you")
    assert gone["context"]["seq"] == header["seq"]
    assert run.view.regions[0].tokens == 20


def test_an_abstention_closes_a_round_and_is_not_a_contribution(patient):
    run = RunByHand(patient)
    first, second = run.sites
    abstention = Abstention(position=first.position(), reason="a gradient is not finite")
    assert first.ranks.abstain(run.id, "west", 1, first.name, abstention, 0.0).message is None
    problem(first.send(1, first.message(1)), 409, "other_bytes")
    late = first.message(1)
    update = second.contribute(1, wait=WAIT_S)
    assert first.ranks.abstain(run.id, "west", 1, first.name, abstention, 0.0).message == update
    problem(first.send(1, late), 410, "closed_without_you")
    with pytest.raises(GoneError, match="does not list"):
        second.ranks.abstain(run.id, "west", 1, second.name, abstention, 0.0)
    header, _ = decode_message("entry", update)
    assert header["abstentions"] == [{"site": first.name, "reason": "a gradient is not finite"}]
    assert [line["site"] for line in header["contributors"]] == [second.name]


def test_all_abstain(patient):
    run = RunByHand(patient, steps=1)
    for site in run.sites:
        abstention = Abstention(position=site.position(), reason="no data")
        message = site.ranks.abstain(run.id, "west", 1, site.name, abstention, 0.0).message
    header, arrays = decode_message("entry", message)
    assert (header["parts"], header["contributors"], arrays) == ([], [], {})
    assert run.view.step == 1


# --- before and after -------------------------------------------------------------------------------------------------


def test_entry_0_is_checked(patient):
    run = RunByHand(patient, begin=False)
    first, second = run.sites
    body = run.parameters.tobytes()
    headers = {"Authorization": f"Bearer {first.seat}"}
    path = f"{run.url}/v1/runs/{run.id}/sites/{first.name}/start"
    digest = first.ranks.put_blob(body)
    problem(httpx.put(path, json={"parameters": digest}, headers=headers), 409, "no_layout")
    problem(first.send(1, first.message(1)), 409, "no_layout")
    first.join()
    problem(httpx.put(path, json={"parameters": "0" * 64}, headers=headers), 404, "blob_not_found")
    short = first.ranks.put_blob(body[:-4])
    assert (
        str(len(body))
        in problem(httpx.put(path, json={"parameters": short}, headers=headers), 422, "wrong_size")["detail"]
    )
    problem(httpx.put(path, json={"parameters": digest, "buffers": "0" * 64}, headers=headers), 404, "blob_not_found")
    with pytest.raises(ForbiddenError, match=first.name):
        second.upload_start(body)
    first.upload_start(body)
    first.upload_start(body)
    other = first.ranks.put_blob(bytes(len(body)))
    problem(httpx.put(path, json={"parameters": other}, headers=headers), 409, "other_bytes")
    problem(first.send(1, first.message(1)), 409, "wrong_status")
    assert run.view.reason == f"waiting for 1 of 2 sites to join: {second.name}"
    second.join()
    assert run.view.status is RunStatus.RUNNING


def test_the_log_in_pages(patient):
    run = RunByHand(patient, ("west",), steps=3)
    for step in (1, 2, 3):
        run.round(step, "west")
    whole = run.admin.log(run.id, "west", 0)
    assert [header["seq"] for header in whole.items] == [0, 1, 2, 3]
    for start, stop, seqs in ((0, 1, [0]), (1, 3, [1, 2]), (3, 4, [3]), (3, 99, [3]), (2, None, [2, 3]), (4, None, [])):
        page = run.admin.log(run.id, "west", start, stop)
        assert [header["seq"] for header in page.items] == seqs
        assert page.head == whole.head
        assert not page.ended
    headers = {"Authorization": f"Bearer {patient.token('observer')}"}
    path = f"{run.url}/v1/runs/{run.id}/regions/west/log"
    problem(httpx.get(path, params={"from": 2, "to": 2}, headers=headers), 422, "empty_range")
    problem(httpx.get(path, params={"from": -1}, headers=headers), 422, "invalid_request")
    problem(httpx.get(path, params={"from": 10**20}, headers=headers), 422, "invalid_request")
    problem(httpx.get(f"{path}/4/parts/0", headers=headers), 404, "entry_not_found")
    problem(httpx.get(f"{path}/3/parts/1", headers=headers), 404, "part_not_found")
    steps = f"{run.url}/v1/runs/{run.id}/regions/west/steps"
    assert httpx.get(f"{steps}/3/update/parts/0", headers=headers).content == run.admin.entry(run.id, "west", 3)
    problem(httpx.get(f"{steps}/3/update/parts/1", headers=headers), 404, "part_not_found")
    problem(httpx.get(f"{steps}/4/update/parts/0", headers=headers), 404, "step_not_found")
    problem(httpx.get(f"{steps}/0/update/parts/0", headers=headers), 422, "invalid_request")


def test_polls_wait_for_what_they_ask_for(patient):
    run = RunByHand(patient, steps=2)
    first, second = run.sites
    headers = {"Authorization": f"Bearer {first.seat}"}
    path = f"{run.url}/v1/runs/{run.id}/regions/west/steps/1/update/parts/0"
    empty = httpx.get(path, params={"wait": 0.01}, headers=headers)
    assert (empty.status_code, empty.content) == (204, b"")
    first.contribute(1)
    update = thinking(lambda: first.ranks.update(run.id, "west", 1, 0, WAIT_S))
    page = thinking(lambda: first.ranks.log(run.id, "west", 1, None, WAIT_S))
    message = second.contribute(1, wait=WAIT_S)
    assert update() == message
    assert [header["step"] for header in page().items] == [1]


def test_stop_answers_every_poll_at_once(patient):
    run = RunByHand(patient, steps=2)
    first, second = run.sites
    body = first.message(1)
    assert first.send(1, body).status_code == 202
    headers = {"Authorization": f"Bearer {first.seat}"}
    path = f"{run.url}/v1/runs/{run.id}/regions/west/steps/1/update/parts/0"
    answers = []

    def poll():
        answers.append((httpx.get(path, params={"wait": 25}, headers=headers, timeout=60), time.monotonic()))

    def contribute():
        answers.append((first.send(1, body, wait=25), time.monotonic()))

    polls = [threading.Thread(target=target) for target in (poll, poll, contribute)]
    for thread in polls:
        thread.start()
    stopped = time.monotonic()
    assert run.admin.stop_run(run.id).status is RunStatus.STOPPING
    for thread in polls:
        thread.join(60)
    assert len(answers) == 3
    for answer, at in answers:
        problem(answer, 410, "run_ended")
        assert at - stopped < 10
    problem(second.send(1, second.message(1)), 410, "run_ended")
    assert run.view.reason == f"waiting for the processes at {first.name}, {second.name} to end"
    assert first.name in run.admin.run(run.id).reason
