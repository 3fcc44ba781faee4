"""Runs three sites through real agents, torchrun, HTTP, Redis and blobs, and rebuilds their parameters from the log."""

import hashlib
from typing import Any

import numpy as np
import pytest

from algorithms.layout import ParameterLayout
from api.export import export_model, file_digest
from api.payload import decode_message
from api.report import build_report
from tests import reference
from tests.conftest import ROOT


def read_headers(client: Any, run: str, region: str) -> list[dict[str, Any]]:
    headers: list[dict[str, Any]] = []
    while page := client.log(run, region, len(headers)).items:
        headers += page
    return headers


def read_log(client: Any, run: str, region: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    headers = read_headers(client, run, region)
    return [(header, decode_message("entry", client.entry(run, region, header["seq"]))[1]) for header in headers]


def tensors_of(layout: ParameterLayout, data: bytes) -> dict[str, np.ndarray]:
    flat, tensors, start = np.frombuffer(data, "<f4"), {}, 0
    for tensor in layout.tensors:
        tensors[tensor.name] = flat[start : start + tensor.elements].reshape(tensor.shape).copy()
        start += tensor.elements
    assert start == flat.size
    return tensors


def test_run_succeeds_with_equal_digests(finished_run):
    assert finished_run.run.status == "succeeded", finished_run.run.reason
    assert finished_run.run.alarms == []
    digests = {member.digest for member in finished_run.run.members}
    assert len(digests) == 1
    assert None not in digests
    assert {region.name: region.step for region in finished_run.run.regions} == {"west": 12, "east": 12}
    assert [outer.step for outer in finished_run.client().outer_rounds(finished_run.run_id)] == [5, 10, 12]


@pytest.mark.slow
def test_reference_rebuilds_the_live_parameters_from_the_log(finished_run):
    client, run = finished_run.client(), finished_run.run
    layout = ParameterLayout.from_json(client.model(run.id).layout)
    live = run.members[0].digest
    groups = [tensor.group for tensor in layout.tensors]
    fragments = [(tensors.start, tensors.stop) for tensors in layout.fragments(3)]
    for region in ("west", "east"):
        log = read_log(client, run.id, region)
        kinds = [header["kind"] for header, _ in log]
        assert kinds == ["start"] + (["step"] * 5 + ["anchor"] * 3) * 2 + ["step"] * 2 + ["anchor"] * 3
        start = tensors_of(layout, client.get_blob(log[0][0]["parameters"]))
        rebuilt = reference.replay(log, start, client.get_blob, chunk=layout.chunk, fragments=fragments, groups=groups)
        assert reference.parameters_digest([rebuilt[tensor.name] for tensor in layout.tensors]) == live


def test_steps_list_their_contributors(finished_run):
    client = finished_run.client()
    for region, sites in {"west": ["a", "b"], "east": ["c"]}.items():
        steps = [header for header, _ in read_log(client, finished_run.run_id, region) if header["kind"] == "step"]
        assert [header["step"] for header in steps] == list(range(1, 13))
        for header in steps:
            assert [contributor["site"] for contributor in header["contributors"]] == sites
            assert all(contributor["tokens"] > 0 for contributor in header["contributors"])


def test_export_holds_the_live_parameters(finished_run, tmp_path):
    path = tmp_path / "model.safetensors"
    digest = export_model(finished_run.client(), finished_run.run_id, path)
    assert digest == file_digest(path) == finished_run.run.members[0].digest


def test_report_adds_up(finished_run):
    report = build_report(finished_run.client(), finished_run.run)
    assert report["digests_equal"]
    assert report["steps"] == 12
    run = finished_run.run
    assert run.created_at < run.started_at < run.since  # it waits for its sites in between
    assert report["wall_s"] == round((run.since - run.started_at).total_seconds(), 3)
    assert report["outer_rounds"] == 3
    assert report["heldout_loss_end"] < report["heldout_loss_start"]
    assert report["bigram_loss"] < report["unigram_loss"]
    script = (ROOT / "examples" / "tiny_lm" / "train.py").read_bytes()
    version = f"sha256:{hashlib.sha256(script).hexdigest()[:16]}"
    assert [member.version for member in run.members] == [version] * 3
    for site in report["sites"]:
        assert 0 < site["round_bytes_up"] < site["bytes_up"]
        assert site["compute_s"] > 0
        # every step's contribution is far smaller than what DDP would send
        assert site["round_bytes_up"] / 12 < report["ddp_bytes_per_step"] / 50


def test_a_region_uploads_each_fragment_once(finished_run):
    """One holder of each distinct copy uploads it (rule A13): per outer round one copy per region, not per site."""
    client, run = finished_run.client(), finished_run.run
    parameters = 4 * ParameterLayout.from_json(client.model(run.id).layout).parameter_count
    report = build_report(client, run)
    assert report["parameter_bytes"] == parameters
    assert [region["name"] for region in report["regions"]] == ["east", "west"]
    for region in report["regions"]:
        assert 3 * parameters <= region["outer_bytes_up"] < 3.06 * parameters
