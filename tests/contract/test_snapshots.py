"""Snapshots over real HTTP against a real coordinator and Redis, every site driven by hand."""

import json
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from api.errors import ConflictError, NotFoundError, ProblemError
from api.schemas import Manifest, SnapshotUpload
from api.specs import BeginSpec, OuterSpec, SnapshotsSpec
from tests.conftest import wait_until
from tests.contract.by_hand import LAYOUT, WAIT_S, RunByHand


def answers(run, step):
    """Everybody's answer to a step, once it is closed."""
    for site in run.sites:
        site.contribute(step)
    return {site.name: site.ranks.update_answer(run.id, site.region, step, 0, WAIT_S).snapshot for site in run.sites}


def take(site, number, parameters, buffers=None):
    """As a site does that was asked, at the head of its log."""
    head = site.position()
    upload = SnapshotUpload(
        position=head,
        step=site.ranks.log(site.run, site.region, head.seq).items[0]["step"],
        parameters=site.ranks.put_blob(parameters),
        buffers=None if buffers is None else site.ranks.put_blob(buffers),
    )
    site.ranks.take_snapshot(site.run, number, site.name, upload)
    return upload


def made(run, number):
    def found():
        return next((one for one in run.admin.snapshots(run.id).items if one.number == number), None)

    return wait_until(found, f"snapshot {number}")


def test_one_site_is_asked_and_the_log_is_entered_there(patient):
    run = RunByHand(patient, steps=9, snapshots=SnapshotsSpec(keep=2))
    first, second = run.sites
    assert answers(run, 1) == {first.name: None, second.name: None}
    assert run.admin.request_snapshot(run.id).wanted == 1
    assert run.admin.request_snapshot(run.id).wanted == 1
    asked = answers(run, 2)
    assert sorted(asked.values(), key=str) == [1, None]
    site = next(site for site in run.sites if asked[site.name])
    assert site.ranks.update_answer(run.id, "west", 2, 0, WAIT_S).snapshot == 1, "an answer may be lost"
    upload = take(site, 1, run.parameters.tobytes(), b"buffers")
    snapshot = made(run, 1)
    assert (snapshot.step, snapshot.positions) == (2, {"west": upload.position})
    body = run.admin.get_blob(snapshot.manifest)
    manifest = Manifest.model_validate_json(body)
    assert body == json.dumps(json.loads(body), sort_keys=True, separators=(",", ":")).encode()
    assert (manifest.run, manifest.number, manifest.step, manifest.outer) == (run.id, 1, 2, None)
    assert (manifest.parameters, manifest.buffers) == ([upload.parameters], upload.buffers)
    assert (manifest.layout["digest"], manifest.spec) == (LAYOUT.digest, run.spec)
    assert set(answers(run, 3).values()) == {None}
    second.beat(second.failed())
    resume = second.start_again().resume
    assert (resume.position, resume.step) == (upload.position, 2)
    assert (resume.anchors, resume.buffers) == ([upload.parameters], upload.buffers)
    assert run.admin.snapshots(run.id).wanted is None


def test_another_site_is_asked_if_the_first_is_lost(patient):
    run = RunByHand(patient, ("west",) * 3, steps=9, snapshots=SnapshotsSpec(every=2, keep=1))
    assert set(answers(run, 1).values()) == {None}
    asked = answers(run, 2)
    assert sorted(asked.values(), key=str) == [1, None, None]
    lost = next(site for site in run.sites if asked[site.name])
    lost.beat(lost.failed())
    run.sites = [site for site in run.sites if site is not lost]
    again = answers(run, 3)
    assert sorted(again.values(), key=str) == [1, None]
    (site,) = (site for site in run.sites if again[site.name])
    with pytest.raises(ConflictError, match="wants no snapshot 2"):
        take(site, 2, run.parameters.tobytes())
    take(site, 1, run.parameters.tobytes())
    assert made(run, 1).step == 3
    assert sorted(answers(run, 4).values(), key=str) == [2, None]
    take(site, 2, run.parameters.tobytes())
    made(run, 2)
    assert [one.number for one in run.admin.snapshots(run.id).items] == [2]


def test_anchors_are_the_snapshot_of_a_run_with_outer_steps(patient):
    outer = OuterSpec(every=2, fragments=2)
    run = RunByHand(patient, ("west", "east"), steps=8, outer=outer, snapshots=SnapshotsSpec(every=3))
    copies = []
    for tensors in LAYOUT.fragments(2):
        start = LAYOUT.offsets[tensors.start]
        copies.append(run.parameters[start : start + LAYOUT.fragment_elements(tensors)].tobytes())
    for number, steps in enumerate(((1, 2), (3, 4)), start=1):
        for step in steps:
            assert set(answers(run, step).values()) == {None}
        for fragment, copy in enumerate(copies):
            for site in run.sites:
                site.announce(number, fragment, copy)
        wait_until(lambda number=number: run.view.outer_rounds == number, "the outer round")
    snapshot = made(run, 1)
    assert [one.number for one in run.admin.snapshots(run.id).items] == [1], "none at step 2, before step 3"
    manifest = Manifest.model_validate_json(run.admin.get_blob(snapshot.manifest))
    assert (manifest.step, manifest.outer.rounds) == (4, 2)
    assert manifest.positions == {region: run.admin.log(run.id, region, 0).head for region in ("east", "west")}
    assert manifest.outer.anchors == manifest.parameters == run.admin.outer_rounds(run.id)[-1].fragments
    assert [len(run.admin.get_blob(digest)) for digest in manifest.outer.momenta] == list(map(len, copies))
    with pytest.raises(NotFoundError):
        run.admin.snapshots("another-run")


# --- runs that begin with one -----------------------------------------------------------------------------------------


def outer_round(run, fragments=1):
    """One step and an outer round, in which all sites hold the first parameters of the run plus one."""
    step = run.view.step + 1
    answers(run, step)
    for fragment, tensors in enumerate(LAYOUT.fragments(fragments)):
        start = LAYOUT.offsets[tensors.start]
        copy = (run.parameters + np.float32(1))[start : start + LAYOUT.fragment_elements(tensors)].tobytes()
        for site in run.sites:
            site.announce(step, fragment, copy)
    wait_until(lambda: run.view.outer_rounds == step, "the outer round")
    anchors = run.admin.outer_rounds(run.id)[-1].fragments
    return np.frombuffer(b"".join(map(run.admin.get_blob, anchors)), "<f4")


def test_a_run_begins_with_a_snapshot_and_its_momentum_if_the_fragments_are_the_same(patient):
    two, one = OuterSpec(every=1, fragments=2), OuterSpec(every=1, fragments=1)
    run = RunByHand(patient, steps=8, outer=two, snapshots=SnapshotsSpec(every=1))
    anchors, origin = outer_round(run, 2), BeginSpec(run=run.id, snapshot=1)
    made(run, 1)
    same = RunByHand(patient, steps=8, outer=two, origin=origin)
    (start,) = same.admin.log(same.id, "west", 0, wait=WAIT_S).items
    assert same.admin.get_blob(start["parameters"]) == anchors.tobytes()
    other = RunByHand(patient, steps=8, outer=one, origin=origin)
    after = outer_round(run, 2)
    np.testing.assert_array_equal(outer_round(same, 2), after)
    momentum_gone = -0.7 * 0.5 * 0.5  # lr, momentum, and once more ahead: of the buffer's -1
    np.testing.assert_allclose(outer_round(other), after + momentum_gone, atol=1e-5)


def test_what_a_run_cannot_begin_with(patient):
    run = RunByHand(patient, ("west",))
    for begin, message in [
        (BeginSpec(run=run.id, snapshot=1), f"run {run.id} has no snapshot 1; its snapshots: none; `isthmus run"),
        (BeginSpec(run="nothing", snapshot=1), "there is no run 'nothing'"),
        (BeginSpec(file="0" * 64), "is not stored here"),
        (BeginSpec(file=run.admin.put_blob(b"rubbish bytes"), called="x.st"), "with file x.st: not a safetensors file"),
    ]:
        with pytest.raises(ProblemError, match=message):
            run.admin.create_run(run.spec.model_copy(update={"begin": begin}))
    file = save({"bias": torch.zeros(5), "embedding": torch.zeros(9, 13)})
    begin = BeginSpec(file=run.admin.put_blob(file), called="models/other.safetensors")
    other = RunByHand(patient, ("west",), origin=begin, begin=False)
    differ = r"2 differ \(embedding: \[9, 12\] in the model, \[9, 13\] in file models/other.safetensors; head: "
    with pytest.raises(ConflictError, match=differ):
        other.sites[0].join()
    assert other.view.status == "failed"  # no other attempt could do better
    assert re.search(differ, other.view.reason)


def test_a_file_of_numbers_that_are_no_floats_ends_the_run(patient):
    shapes = {"bias": (5,), "embedding": (9, 12), "head": (40, 3)}
    file = patient.client().put_blob(save({name: torch.zeros(shape).int() for name, shape in shapes.items()}))
    run = RunByHand(patient, ("west",), origin=BeginSpec(file=file), begin=False)
    run.sites[0].join()
    wait_until(lambda: run.view.status == "failed", "the end")
    assert f"the run begins with the file in blob {file}, tensor bias: I32 is not read as floating" in run.view.reason


def test_a_run_begins_with_a_file(patient):
    tensors = {
        "module.bias": torch.linspace(-1, 1, 5, dtype=torch.bfloat16),
        "embedding": torch.linspace(0, 1, 108).view(9, 12).double(),
        "head": torch.linspace(2, 3, 120).view(40, 3).half(),
        "norm.running_mean": torch.ones(3),
        "norm.num_batches_tracked": torch.tensor(7),
    }
    file = patient.client().put_blob(save(tensors))
    run = RunByHand(patient, ("west",), origin=BeginSpec(file=file))
    (start,) = run.admin.log(run.id, "west", 0, wait=WAIT_S).items
    wanted = [tensors[name].float().numpy().tobytes() for name in ("module.bias", "embedding", "head")]
    assert run.admin.get_blob(start["parameters"]) == b"".join(wanted)
    buffers = load(run.admin.get_blob(start["buffers"]))
    assert {name: (tensor.dtype, tensor.tolist()) for name, tensor in buffers.items()} == {
        "norm.running_mean": (torch.float32, [1, 1, 1]),
        "norm.num_batches_tracked": (torch.int64, 7),
    }
