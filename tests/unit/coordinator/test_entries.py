"""Headers of entries: the chain, the learning rate, and the bytes that sites hash."""

import json
import struct

import pytest

from api.specs import OptimizerSpec, RunSpec
from coordinator.entries import position_after, start_header, step_header
from coordinator.events import Norm
from tests.unit.coordinator.runs import LAYOUT, START, Driver, digest_of, entry_hash

TWO = {"b": "west", "a": "west"}


def test_the_hash_of_a_known_header():
    """By sha256sum of the canonical JSON of docs/decisions/0001-first-slice.md, section 4."""
    header = {"seq": 4, "version": 1, "kind": "step", "lr": [0.0010000000474974513], "reason": "ä"}
    text = b'{"kind":"step","lr":[0.0010000000474974513],"reason":"\\u00e4","seq":4,"version":1}'
    assert json.loads(text) == header
    position = position_after(header)
    assert position.seq == 4
    assert position.hash == entry_hash(header) == "a5605d335f873112883355c083abccf77aa8460e0c2123cf735c4fa8f078e28d"


def test_start():
    driver = Driver(TWO).begin()
    (header,) = driver.logs["west"]
    assert header == {
        "version": 1,
        "kind": "start",
        "seq": 0,
        "step": 0,
        "previous": "0" * 64,
        "layout": LAYOUT.digest,
        "parameters": START.parameters,
        "buffers": None,
    }
    assert start_header(driver.state, driver.state.regions["west"])["seq"] == 1


def test_step():
    driver = Driver(TWO).begin()
    driver.send(driver.contribution("b", tokens=3))
    driver.send(driver.abstention("a", reason="no data"))
    region = driver.state.regions["west"]
    header = step_header(driver.state, region, (digest_of("part"),), {"b": Norm(1.5, 2)})
    lr = header["lr"][0]
    assert header == {
        "version": 1,
        "kind": "step",
        "seq": 1,
        "step": 1,
        "previous": entry_hash(driver.logs["west"][0]),
        "contributors": [{"site": "b", "digest": digest_of("b", 1, 3, ""), "tokens": 3, "norm": 1.5, "halvings": 2}],
        "abstentions": [{"site": "a", "reason": "no data"}],
        "refusals": [],
        "lr": [lr, lr],
        "decay": [1.0, 1.0],
        "k": driver.spec.optimizer.k,
        "bits": 1,
        "codec": "sign",
        "parts": [digest_of("part")],
    }


def test_decay_is_a_float32_and_spares_no_decay():
    driver = Driver({"a": "west"})
    optimizer = OptimizerSpec(lr=0.1, schedule="constant", weight_decay=0.3, codec="int8")
    driver.spec = RunSpec(name="drill", task="drill", steps=3, optimizer=optimizer)
    driver.state = driver.state.model_copy(update={"spec": driver.spec})
    driver.begin()
    driver.send(driver.contribution("a"))
    driver.work()
    header = driver.logs["west"][-1]
    (lr,) = set(header["lr"])
    for value in (lr, header["decay"][0]):
        assert struct.unpack("<f", struct.pack("<f", value)) == (value,)
    assert lr == pytest.approx(0.1)
    assert header["decay"] == [pytest.approx(0.97), 1.0]
    assert header["bits"] == 8


def test_anchors():
    places = {"a": "west", "b": "east"}
    driver = Driver(places, steps=1, every=1).begin().until_outer()
    for site in places:
        driver.send(driver.announcement(site, 0, digest=digest_of(site)))
    driver.work()
    for region in ("east", "west"):
        header = driver.logs[region][-1]
        assert header == {
            "version": 1,
            "kind": "anchor",
            "seq": 2,
            "step": 1,
            "previous": entry_hash(driver.logs[region][1]),
            "outer_round": 1,
            "taken_after": 1,
            "every": 1,
            "fragment": 0,
            "generation": 1,
            "digest": digest_of("anchor", 1, 0),
            "participants": [
                {"region": "east", "digest": digest_of("b"), "weight": 7},
                {"region": "west", "digest": digest_of("a"), "weight": 7},
            ],
        }
