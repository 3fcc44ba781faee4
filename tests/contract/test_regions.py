"""Regions that come to a run that goes on, over real HTTP against a real coordinator and Redis, sites by hand."""

import hashlib
from contextlib import suppress

import numpy as np
import pytest

from api.errors import ConflictError
from api.schemas import Announcement, Condition, RunStatus
from api.specs import OuterSpec
from site_agent.rebuild import rebuild
from tests.conftest import wait_until
from tests.contract.by_hand import LAYOUT, RunByHand, SiteByHand, new_name

FRAGMENTS = LAYOUT.fragments(2)


def comes(live, region="north"):
    """A site of a region that the run does not have is registered."""
    site = SiteByHand(new_name(), region, live.url)
    site.register(live.token("join"))
    return site


def digest_at(run, region):
    """Of the parameters to which the log of the region leads."""
    return rebuild(run.admin, run.view, region, None, lambda *_: None).digest


def parts(parameters):
    """The copies of all fragments."""
    for tensors in FRAGMENTS:
        first = LAYOUT.offsets[tensors.start]
        yield parameters[first : first + LAYOUT.fragment_elements(tensors)].tobytes()


def copy_of(site, number):
    return np.random.default_rng([number, *site.name.encode()]).standard_normal(LAYOUT.parameter_count).astype("<f4")


def arrive(site, number):
    """The site has trained up to an outer round, and does not wait until that is open."""
    digest = hashlib.sha256(next(parts(copy_of(site, number)))).hexdigest()
    announcement = Announcement(digest=digest, tokens=5)
    with suppress(ConflictError):
        site.ranks.announce(site.run, number, 0, site.name, announcement, 0)


def outer_round(run, number, sites):
    """Each site announces a copy of its own; the fragments of the anchor."""
    for site in sites:
        for fragment, copy in enumerate(parts(copy_of(site, number))):
            site.announce(number, fragment, copy)
    wait_until(lambda: run.view.outer_rounds == number, f"outer round {number}", 30)
    return run.admin.outer_rounds(run.id)[-1].fragments


def test_its_log_begins_at_the_anchors_and_leads_where_those_of_the_others_do(patient):
    run = RunByHand(patient, ("west", "east"), steps=6, outer=OuterSpec(every=2, fragments=2))
    for step in (1, 2):
        for site in run.sites:
            run.round(step, site.region)
    anchors = outer_round(run, 1, run.sites)
    run.round(3, "west")
    third = comes(patient)
    view = run.admin.add_site(run.id, third.name)
    assert [(region.name, region.step) for region in view.regions] == [("east", 2), ("north", 2), ("west", 3)]
    assert [member.condition for member in view.members if member.site == third.name] == [Condition.JOINING]
    resume = third.start_again().resume
    start, *begins = third.ranks.log(run.id, "north", 0).items
    assert start == run.sites[0].ranks.log(run.id, "west", 0, 1).items[0]
    assert [(line["digest"], line["participants"], line["before"]) for line in begins] == [
        (anchor, [], None) for anchor in anchors
    ]
    assert (resume.anchors, resume.step, resume.position) == (anchors, 2, third.position())
    assert digest_at(run, "north") == hashlib.sha256(b"".join(map(run.admin.get_blob, anchors))).hexdigest()

    assert third.caught_up(resume.position).active
    run.sites.append(third)
    for step, region in ((4, "west"), (3, "east"), (4, "east"), (3, "north")):
        run.round(step, region)
    assert f"region north: step 4, waiting for 1 of 1 sites: {third.name}" in run.view.reason
    run.round(4, "north")
    wait_until(lambda: "outer round 2" in run.view.reason, "outer round 2", 30)
    outer_round(run, 2, run.sites)
    assert run.admin.outer_rounds(run.id)[-1].weights == {"east": 20, "north": 20, "west": 20}
    assert len({digest_at(run, region) for region in ("east", "north", "west")}) == 1


def test_without_rounds_it_is_waited_for_from_the_next_outer_round_on(patient):
    outer = OuterSpec(every=2, fragments=2, optimizer="average")
    run = RunByHand(patient, ("west", "east"), steps=6, outer=outer, exchange="none")
    third = comes(patient)
    for site in run.sites:
        arrive(site, 1)
    run.admin.add_site(run.id, third.name)
    assert third.start_again().resume is None
    assert third.position().seq == 0
    assert not third.caught_up().active
    anchors = outer_round(run, 1, run.sites)
    lines = third.ranks.log(run.id, "north", 1).items
    assert [(line["digest"], line["step"], line["before"]) for line in lines] == [(one, 2, None) for one in anchors]
    assert third.caught_up().active
    arrive(run.sites[0], 2)
    arrive(run.sites[1], 2)
    assert f"1 of 3 sites on their way: {third.name}" in run.view.reason
    arrive(third, 2)
    outer_round(run, 2, [*run.sites, third])
    assert run.admin.outer_rounds(run.id)[-1].weights == {"east": 5, "north": 5, "west": 5}
    assert len({digest_at(run, region) for region in ("east", "north", "west")}) == 1
    run.admin.exclude_site(run.id, third.name)
    assert run.view.status is RunStatus.RUNNING


def test_where_regions_never_meet_none_can_come(patient):
    run = RunByHand(patient)
    third = comes(patient)
    with pytest.raises(ConflictError, match="has west only, which would never meet another one") as caught:
        run.admin.add_site(run.id, third.name)
    assert caught.value.code == "no_such_region"
    assert f"isthmus run start SPEC --from {run.id}/N" in str(caught.value)
