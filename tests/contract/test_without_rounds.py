"""Regions without rounds, over real HTTP against a real coordinator and Redis, their sites by hand."""

import numpy as np
import pytest

from api.errors import ConflictError
from api.schemas import Condition, RunStatus
from api.specs import OuterSpec
from tests.contract.by_hand import LAYOUT, RunByHand

MEAN = OuterSpec(every=2, optimizer="average")


def copies(*seeds):
    return [np.random.default_rng(seed).standard_normal(LAYOUT.parameter_count).astype("<f4") for seed in seeds]


def refused(call, code):
    with pytest.raises(ConflictError) as caught:
        call()
    assert caught.value.code == code
    return caught.value


def test_sites_bring_their_tokens_and_get_the_weighted_mean(patient):
    run = RunByHand(patient, ("east", "west"), steps=3, outer=MEAN, exchange="none")
    first, second = run.sites
    mine, theirs = copies(1, 2)
    assert run.view.reason == f"outer round 1, after step 2: 2 of 2 sites on their way: {first.name}, {second.name}"
    refused(lambda: first.contribute(1), "no_rounds")
    refused(lambda: first.announce(1, 0, mine.tobytes(), wait=0, tokens=30), "outer_round_not_open")
    assert f"1 of 2 sites on their way: {second.name}" in run.view.reason
    assert second.announce(1, 0, theirs.tobytes(), tokens=10)
    assert first.announce(1, 0, mine.tobytes(), tokens=31)  # what it said first counts
    page = first.ranks.log(run.id, "east", 1, wait=25)
    (anchor,) = page.items
    assert (anchor["step"], [line["weight"] for line in anchor["participants"]]) == (2, [30, 10])
    mean = (30 * mine.astype(np.float64) + 10 * theirs.astype(np.float64)) / 40
    assert first.ranks.get_blob(anchor["digest"]) == mean.astype("<f4").tobytes()
    assert {region.step for region in run.view.regions} == {2}
    refused(lambda: first.announce(2, 0, mine.tobytes(), wait=0, tokens=1), "outer_round_not_open")
    assert not second.announce(2, 0, mine.tobytes(), tokens=1)
    assert not first.announce(2, 0, mine.tobytes(), tokens=1)
    (anchor,) = first.ranks.log(run.id, "east", 2, wait=25).items
    assert first.ranks.get_blob(anchor["digest"]) == mine.tobytes()
    for site in run.sites:
        site.report_final("f" * 64)
    assert run.view.status is RunStatus.SUCCEEDED


def test_ranks_that_come_back_enter_at_the_anchors(patient):
    run = RunByHand(patient, ("east", "west"), steps=6, outer=MEAN, exchange="none")
    first, second = run.sites
    (mine,) = copies(1)
    second.beat(second.failed())
    first.announce(1, 0, mine.tobytes(), tokens=5)
    first.ranks.log(run.id, "east", 1, wait=25)
    resume = second.start_again().resume
    assert (resume.step, resume.anchors) == (2, [first.ranks.log(run.id, "east", 1).items[0]["digest"]])
    assert second.caught_up(resume.position).active
    refused(lambda: first.announce(2, 0, mine.tobytes(), wait=0, tokens=5), "outer_round_not_open")
    assert f"1 of 2 sites on their way: {second.name}" in run.view.reason
    second.beat(second.failed())
    first.announce(2, 0, mine.tobytes(), tokens=5)
    assert first.ranks.log(run.id, "east", 2, wait=25).items[0]["step"] == 4
    assert run.member(second).condition is Condition.JOINING


def test_a_region_without_rounds_is_one_site(patient):
    run = RunByHand(patient, ("west", "west"), outer=MEAN, exchange="none", start=False)
    names = [site.name for site in run.sites]
    error = refused(lambda: run.admin.start_run(run.id), "sites_not_ready")
    assert f"region west has sites {', '.join(names)}" in str(error)
    assert "`regions`" in str(error)
    regions = {"north": names[:1], "south": names[1:]}
    spec = run.spec.model_copy(update={"sites": None, "regions": regions})
    started = run.admin.start_run(run.admin.create_run(spec).id)
    assert {member.site: member.region for member in started.members} == dict(
        zip(names, ("north", "south"), strict=True)
    )
    assert started.warnings == []


def test_a_region_of_one_site_with_rounds_is_told_what_that_means(patient):
    run = RunByHand(patient, ("east", "west", "west"), outer=OuterSpec(every=1))
    (warning,) = run.view.warnings
    assert warning.startswith("region east has one site: it exchanges with nobody")
    assert "exchange: none" in warning
