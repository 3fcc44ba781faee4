"""Buffers over real HTTP against a real coordinator: averaged at outer rounds, exported with the model."""

import hashlib
import os
import secrets

import pytest
import torch
from safetensors.torch import load, load_file, save

from algorithms.tensor_file import file_header
from api.errors import InvalidError
from api.export import export_model, file_digest
from api.schemas import FinalReport, RunStatus, StartUpload
from api.specs import BeginSpec, OuterSpec, SnapshotsSpec
from tests import reference
from tests.conftest import wait_until
from tests.contract.by_hand import LAYOUT, RunByHand


def buffers_of(number, dtype=torch.float32):
    mean = torch.full((2, 3), float(number), dtype=dtype)
    return save({"norm.mean": mean, "norm.batches": torch.tensor(int(number))})


def begin_with_buffers(run):
    for site in run.sites:
        site.join()
    first, parameters = run.sites[0], run.parameters.tobytes()
    start = StartUpload(parameters=first.ranks.put_blob(parameters), buffers=first.ranks.put_blob(buffers_of(0)))
    first.ranks.upload_start(run.id, first.name, start)


def announce(run, number, fragment, copies):
    for site, copy in zip(run.sites, copies, strict=True):
        site.announce(number, fragment, copy)


def test_floats_are_averaged_by_region_and_integers_are_the_first_sites(patient, tmp_path):
    """west's two sites share its weight, 20 tokens; east's site has 10."""
    spec = {"outer": OuterSpec(every=1, lr=1.0, momentum=0.0), "snapshots": SnapshotsSpec(every=1)}
    run = RunByHand(patient, ("west", "west", "east"), steps=2, begin=False, **spec)
    begin_with_buffers(run)
    parameters = run.parameters.tobytes()
    for number, (copies, mean, batches) in enumerate([((3, 6, 9), 6.0, 3), ((1, 1, 1), 1.0, 1)], 1):
        for region in ("west", "east"):
            run.round(number, region)
        announce(run, number, 0, [parameters] * 3)
        assert run.view.outer_rounds == number - 1, "the buffers are one more fragment"
        announce(run, number, 1, map(buffers_of, copies))
        wait_until(lambda number=number: run.view.outer_rounds == number, "the outer round")
        assert run.view.alarms == []
        logs = [run.admin.log(run.id, region, 0).items for region in ("west", "east")]
        (anchor,) = {log[-1]["digest"] for log in logs}
        held = load(run.admin.get_blob(anchor))
        assert torch.equal(held["norm.mean"], torch.full((2, 3), mean))
        sent = [load(buffers_of(copy))["norm.mean"].numpy().tobytes() for copy in copies]
        assert held["norm.mean"].numpy().tobytes() == reference.mean_of_buffers(sent, [10] * 3, "F32")
        assert held["norm.batches"].item() == batches
        wait_until(lambda number=number: run.admin.snapshots(run.id).items[-1:][0].number == number, "a snapshot")
    assert anchor == hashlib.sha256(buffers_of(1)).hexdigest()
    (summary, _) = run.admin.outer_rounds(run.id)
    assert (len(summary.fragments), summary.distinct) == (1, 1)
    for site in run.sites:
        site.report_final(hashlib.sha256(parameters).hexdigest())
    assert export_model(run.admin, run.id, tmp_path / "model") == file_digest(tmp_path / "model")
    export_model(run.admin, run.id, tmp_path / "first", 1)
    for name, mean in (("model", 1.0), ("first", 6.0)):
        exported = load_file(tmp_path / name)
        assert torch.equal(exported["norm.mean"], torch.full((2, 3), mean))
        assert exported["bias"].numpy().tobytes() == parameters[: 5 * 4]


def test_without_outer_steps_they_are_those_of_the_site_that_gives_the_model(patient, tmp_path):
    run = RunByHand(patient, steps=1, begin=False)
    begin_with_buffers(run)
    run.round(1, "west")
    first, second = run.sites
    digest = hashlib.sha256(run.parameters.tobytes()).hexdigest()
    assert first.report_final(digest).upload, "the parameters are stored, but not the buffers"
    second.report_final(digest)
    assert run.view.status is RunStatus.RUNNING
    report = FinalReport(seq=first.position().seq, digest=digest, buffers=first.ranks.put_blob(buffers_of(5)))
    first.ranks.report_final(run.id, first.name, report)
    assert run.view.status is RunStatus.SUCCEEDED
    export_model(run.admin, run.id, tmp_path / "model")
    assert load_file(tmp_path / "model")["norm.batches"].item() == 5


def test_copies_of_another_model_are_left_out(patient):
    run = RunByHand(patient, ("west", "east"), steps=2, outer=OuterSpec(every=1), begin=False)
    begin_with_buffers(run)
    for region in ("west", "east"):
        run.round(1, region)
    announce(run, 1, 0, [run.parameters.tobytes()] * 2)
    announce(run, 1, 1, [buffers_of(4), b"rubbish"])
    wait_until(lambda: run.view.outer_rounds == 1, "the outer round")
    anchor = run.admin.log(run.id, "west", 0).items[-1]["digest"]
    assert load(run.admin.get_blob(anchor))["norm.mean"].unique().tolist() == [4.0]


TOO_LARGE = (256 << 20) + 1


def large_blob(live, data=b""):
    """A stored blob that begins with these bytes and takes no room, under a name that is not its digest."""
    digest = secrets.token_hex(32)
    path = live.directory / "blobs" / digest[:2] / digest
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    os.truncate(path, len(data) + TOO_LARGE)
    return digest


def test_too_many_are_refused_when_a_site_joins(patient):
    run = RunByHand(patient, ("west",), begin=False, outer=OuterSpec(every=1))
    (site,) = run.sites
    words = rf"buffers of the model at site {site.name} take {TOO_LARGE} bytes, .* {256 << 20} .* persistent=False"
    with pytest.raises(InvalidError, match=words):
        site.join(buffer_bytes=TOO_LARGE)
    assert run.view.status is RunStatus.STARTING
    site.join(buffer_bytes=TOO_LARGE - 1)
    start = StartUpload(parameters=site.ranks.put_blob(run.parameters.tobytes()), buffers=large_blob(patient))
    with pytest.raises(InvalidError, match=f"buffers of site {site.name} take {TOO_LARGE} bytes"):
        site.ranks.upload_start(run.id, site.name, start)


def test_too_many_in_a_file_are_refused_when_the_model_is_known(patient):
    parameters = [(tensor.name, "F32", tensor.shape) for tensor in LAYOUT.tensors]
    header = file_header([*parameters, ("ema", "U8", (TOO_LARGE,))], {})
    file = large_blob(patient, header + bytes(4 * LAYOUT.parameter_count))
    run = RunByHand(patient, ("west",), origin=BeginSpec(file=file), begin=False)
    words = f"buffers of the file in blob {file} take {TOO_LARGE} bytes"
    with pytest.raises(InvalidError, match=words):
        run.sites[0].join()
    assert run.view.status is RunStatus.FAILED
    assert words in run.view.reason
