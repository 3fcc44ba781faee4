"""Outer rounds by turns, late and in fewer bits, over real HTTP and a real coordinator; sites encode as ranks do."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from algorithms.schedule import OuterSchedule
from api.errors import InvalidError, NotFoundError
from api.payload import encode_message
from api.schemas import Announcement
from api.specs import OuterSpec
from api.transfers import source_of
from site_agent.encodings import Encodings
from site_agent.fetched import fetched
from site_agent.inner import LocalSteps, inner_optimizer
from site_agent.outer import OuterRounds
from site_agent.replica import Anchor, Replica
from site_agent.settings import Session
from tests.conftest import wait_until
from tests.contract.by_hand import LAYOUT, RunByHand, new_name
from tests.reference_outer import check_outer_rounds

REGIONS = ("west", "west", "east")
FRAGMENTS = LAYOUT.fragments(2)
CODECS = ("bf16", "int8", "topk")


def outer_of(codec, **outer):
    return OuterSpec(every=1, fragments=2, codec=codec, **({"k": 40} if codec == "topk" else {}), **outer)


def cut(parameters, fragment):
    tensors = FRAGMENTS[fragment]
    first = LAYOUT.offsets[tensors.start]
    return parameters[first : first + LAYOUT.fragment_elements(tensors)]


def named(parameters):
    places = zip(LAYOUT.tensors, LAYOUT.offsets, strict=True)
    return {one.name: parameters[offset : offset + one.elements].reshape(one.shape) for one, offset in places}


class Ranks:
    """What a site keeps of outer rounds."""

    def __init__(self, site, spec, parameters):
        self.site = site
        self.asked = 0
        self.encodings = Encodings(spec, LAYOUT, site.region, site.ranks.get_blob)
        self.anchors = [Anchor(0, cut(parameters, fragment)) for fragment in range(2)]

    def announce(self, number, fragment, copy):
        digest = hashlib.sha256(copy.tobytes()).hexdigest()
        place = (self.site.run, number, fragment, self.site.name)
        reply = self.site.ranks.announce(*place, Announcement(digest=digest), 25.0)
        if reply.upload:
            self.asked += 1
            anchor, copy = self.anchors[fragment], source_of(copy.tobytes())
            upload = self.site.ranks.put_blob(self.encodings.encode(number, fragment, anchor, copy, digest))
            assert not self.site.ranks.announce(*place, Announcement(digest=digest, upload=upload), 25.0).upload

    def settle(self, header, copy):
        fragment, digest = header["fragment"], hashlib.sha256(copy.tobytes()).hexdigest()
        self.encodings.settle(header, self.anchors[fragment], source_of(copy.tobytes()), digest)
        values = np.frombuffer(self.site.ranks.get_blob(header["digest"]), "<f4")
        self.anchors[fragment] = Anchor(header["outer_round"], values)


@pytest.mark.parametrize("codec", CODECS)
def test_one_site_of_each_region_uploads_what_its_copy_is_encoded_as(patient, codec):
    """Three outer rounds, so that what is left of one is said in the next; the last site of west never uploads.

    In the last one both regions have the same copy, but not the same left.
    """
    run = RunByHand(patient, REGIONS, steps=3, outer=outer_of(codec))
    sites = [Ranks(site, run.spec.outer, run.parameters) for site in run.sites]
    random = np.random.default_rng(1)
    copied = {"west": {}, "east": {}}
    for number in (1, 2, 3):
        copies = {}
        for region in copied:
            run.round(number, region)
            moved = (run.parameters + random.standard_normal(run.parameters.size)).astype("<f4")
            copies[region] = copies.get("west", moved) if number == 3 else moved
            copied[region][number] = named(copies[region])
        for fragment in range(2):
            for one in sites:
                one.announce(number, fragment, cut(copies[one.site.region], fragment))
        wait_until(lambda number=number: run.view.outer_rounds == number, "the outer round")
        for header in run.admin.log(run.id, "west", 0).items[-2:]:
            for one in sites:
                one.settle(header, cut(copies[one.site.region], header["fragment"]))
    assert [one.asked for one in sites] == [6, 0, 6]
    left = [one.encodings._left for one in sites]
    for fragment in range(2):
        assert left[0][fragment][1].tobytes() == left[1][fragment][1].tobytes()
        assert np.abs(left[0][fragment][1]).max() > 0
    log = [(header, None) for header in run.admin.log(run.id, "east", 0).items]
    fragments = [(tensors.start, tensors.stop) for tensors in FRAGMENTS]
    spec = {"outer": run.spec.outer.model_dump(), "fragments": fragments, "chunk": LAYOUT.chunk}
    check_outer_rounds(log, named(run.parameters), copied, run.admin.get_blob, **spec)


@pytest.mark.parametrize("codec", CODECS)
def test_a_copy_that_is_not_finite_is_left_out(patient, codec):
    run = RunByHand(patient, ("west", "east"), steps=1, outer=outer_of(codec))
    bad = run.parameters.copy()
    bad[-1] = np.inf
    for region in ("west", "east"):
        run.round(1, region)
    for site, copy in zip(run.sites, (run.parameters, bad), strict=True):
        ranks = Ranks(site, run.spec.outer, run.parameters)
        for fragment in range(2):
            ranks.announce(1, fragment, cut(copy, fragment))
    wait_until(lambda: run.view.outer_rounds == 1, "the outer round")
    (alarm,) = run.view.alarms
    assert f"fragment 1 of {run.sites[1].name} is not finite and was left out" in alarm
    anchors = [header for header in run.admin.log(run.id, "west", 0).items if header["kind"] == "anchor"]
    listed = {header["fragment"]: [line["region"] for line in header["participants"]] for header in anchors}
    assert listed == {0: ["east", "west"], 1: ["west"]}
    for header in anchors:
        values = np.frombuffer(run.admin.get_blob(header["digest"]), "<f4")
        assert values.tobytes() == cut(run.parameters, header["fragment"]).tobytes()


def test_other_uploads_are_refused(patient):
    run = RunByHand(patient, ("west", "east"), steps=1, outer=outer_of("topk"))
    site = run.sites[0]
    for region in ("west", "east"):
        run.round(1, region)
    digest = hashlib.sha256(cut(run.parameters, 0).tobytes()).hexdigest()
    place = (run.id, 1, 0, site.name)
    assert site.ranks.announce(*place, Announcement(digest=digest), 25.0).upload
    with pytest.raises(NotFoundError, match="blob"):
        site.ranks.announce(*place, Announcement(digest=digest, upload="7" * 64), 25.0)
    other_k = encode_message("coefficients", {"k": 41, "finite": True}, {})
    for body in (b"rubbish", bytes(3 << 20), other_k):
        upload = Announcement(digest=digest, upload=site.ranks.put_blob(body))
        with pytest.raises(InvalidError, match=r"upload .* of fragment 0: ") as caught:
            site.ranks.announce(*place, upload, 25.0)
        assert caught.value.code == "bad_upload"
    assert site.ranks.announce(*place, Announcement(digest=digest), 25.0).upload, "the site is still asked"


def test_copies_that_are_uploaded_as_they_are_have_no_encoding(patient):
    run = RunByHand(patient, ("west",), steps=1, outer=outer_of("fp32"))
    run.round(1, "west")
    (site,) = run.sites
    upload = Announcement(digest="7" * 64, upload=site.ranks.put_blob(b"something"))
    with pytest.raises(InvalidError, match="uploaded as they are"):
        site.ranks.announce(run.id, 1, 0, site.name, upload, 25.0)


def test_rounds_go_on_beside_an_outer_round_and_sites_come_in(patient):
    """Fragment 0 is due after steps 2 and 6, fragment 1 after 4; the anchors are applied one step later."""
    outer = OuterSpec(every=4, fragments=2, stagger=True, delay=1)
    run = RunByHand(patient, ("west", "west", "east"), steps=7, outer=outer, prefix=new_name("late"))
    late = run.sites[1]
    late.beat(late.failed())
    run.sites = [run.sites[0], run.sites[2]]
    schedule, number = OuterSchedule(every=4, fragments=2, steps=7, stagger=True, delay=1), 0
    due = {}
    for step in range(1, 8):
        for region in ("west", "east"):
            run.round(step, region)
        for taken in (step - 1, step):
            if schedule.due(taken) and schedule.applied_after(taken) == step:
                number = due.setdefault(taken, len(due) + 1)
                for site in run.sites:
                    for fragment in schedule.due(taken) if number > 1 or site is not late else ():
                        site.announce(number, fragment, cut(run.parameters, fragment).tobytes())
                wait_until(lambda number=number: run.view.outer_rounds == number, "the outer round")
        if step == 2:
            late.start_again()
            assert late.caught_up().active, "no participant of the outer round that is open, but of the steps"
            run.sites.insert(1, late)
    assert [one.step for one in run.admin.outer_rounds(run.id)] == [2, 4, 6, 7]
    for region in ("west", "east"):
        log = run.admin.log(run.id, region, 0).items
        places = [(one["fragment"], one["taken_after"], one["step"]) for one in log if one["kind"] == "anchor"]
        assert places == [(0, 2, 3), (1, 4, 5), (0, 6, 7), (0, 7, 7), (1, 7, 7)]


class OneRank:
    def share(self, data):
        return data

    def gather(self, data):
        return [data]


class Alone:
    """A site that trains by itself, with the outer rounds of real ranks."""

    def __init__(self, run, site, folder):
        torch.manual_seed(0)
        self.region = site.region
        tensors = {tensor.name: nn.Parameter(torch.zeros(tensor.shape)) for tensor in LAYOUT.tensors}
        named = {"decay": ["embedding", "head"], "no_decay": ["bias"]}
        groups = [{"name": name, "params": [(one, tensors[one]) for one in names]} for name, names in named.items()]
        self.optimizer = inner_optimizer(run.spec.optimizer, groups, None)
        self.steps = LocalSteps(run.spec)
        fetch = partial(fetched, site.ranks, lambda data: data, folder)
        outer, schedule = run.spec.outer, run.spec.outer_schedule
        kept = {"schedule": schedule, "mix": outer.mix, "keeps_anchors": True}
        self.replica = Replica(self.optimizer, None, FRAGMENTS, site.name, fetch, lambda *_: b"", **kept)
        self.replica.apply_start(site.ranks.log(run.id, site.region, 0, 1).items[0])
        self.steps.attach(self.replica, self.optimizer)
        session = Session(
            coordinator=site.url, secret="", run=run.id, attempt=1, site=site.name, region=site.region, folder=folder
        )
        self.rounds = OuterRounds(run.spec, session, OneRank(), site.ranks, self.replica, self.optimizer.layout)
        self.copied = {}

    def train(self, steps):
        generator = torch.Generator().manual_seed(ord(self.region[0]))
        for step in range(1, steps + 1):
            for group in self.optimizer.param_groups:
                for value in group["params"]:
                    value.grad = torch.randn(value.shape, generator=generator)
            self.steps.begin()
            self.optimizer.step()
            self.steps.end()
            while self.rounds.due:
                if self.replica.outer.begins(step):
                    self.copied[step] = named(self.optimizer.read_parameters(range(3)))
                assert self.rounds.go_on(tokens=step)
                assert not self.rounds.left_out
        return self.optimizer.parameters_digest()


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_sites_that_train_by_themselves_take_late_anchors(patient, tmp_path, codec):
    outer = OuterSpec(every=4, fragments=2, stagger=True, delay=1, mix=0.5, codec=codec)
    run = RunByHand(patient, ("west", "east"), steps=7, outer=outer, exchange="none")
    sites = [Alone(run, site, tmp_path) for site in run.sites]
    with ThreadPoolExecutor(2) as pool:
        (digest,) = set(pool.map(lambda site: site.train(7), sites))
    log = [(header, None) for header in run.admin.log(run.id, "east", 0).items]
    assert [header["taken_after"] for header, _ in log[1:]] == [2, 4, 6, 7, 7]
    assert [line["weight"] for header, _ in log[1:] for line in header["participants"]] == [2, 2, 4, 4, 6, 6, *[7] * 4]
    anchors = [
        run.admin.get_blob(header["digest"]) for header, _ in sorted(log[-2:], key=lambda one: one[0]["fragment"])
    ]
    assert hashlib.sha256(b"".join(anchors)).hexdigest() == digest
    spec = {"outer": outer.model_dump(), "fragments": [(one.start, one.stop) for one in FRAGMENTS], "chunk": 32}
    copied = {site.region: site.copied for site in sites}
    check_outer_rounds(log, named(run.parameters), copied, run.admin.get_blob, **spec)
