"""Slow and obvious: that the anchors of a log follow from the copies and uploads that it lists, by numpy alone."""

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import safetensors.numpy

from tests import reference

Parameters = dict[str, np.ndarray]


def check_outer_rounds(
    log: list[tuple[dict, Any]],
    start: Parameters,
    copied: dict[str, dict[int, Parameters]],
    blobs: Callable[[str], bytes],
    *,
    outer: dict[str, Any],
    fragments: list[tuple[int, int]],
    chunk: int,
) -> None:
    """Every upload says the copy, relative to the anchor, and what was left before; every anchor is made of uploads.

    `log` is any region's; `copied` has the parameters of each region after every step; `outer` is that of the spec.
    Nothing is left of the earlier copies of a region that was not in the mean.
    What coefficients are picked is up to the site; what `bf16` and `int8` say, is not.
    """
    names = [name for name, _ in reference.tensors_of(start)]
    anchors = [flat(start, names[begin:end]) for begin, end in fragments]
    momenta = [np.zeros_like(anchor) for anchor in anchors]
    left: dict[tuple[str, int], np.ndarray] = {}
    for header, _ in log:
        if header["kind"] != "anchor" or header["fragment"] == len(fragments):
            continue
        fragment = header["fragment"]
        begin, end = fragments[fragment]
        there = {line["region"] for line in header["participants"]}
        left = {place: values for place, values in left.items() if place[0] in there or place[1] != fragment}
        anchor, copies, weights = anchors[fragment], [], []
        for line in header["participants"]:
            place = line["region"], fragment
            copy = flat(copied[line["region"]][header["taken_after"]], names[begin:end])
            assert hashlib.sha256(copy.tobytes()).hexdigest() == line["digest"], "it is of another copy"
            weights.append(line["weight"])
            if outer["codec"] == "fp32":
                copies.append(copy)
                continue
            (upload,) = line["uploads"]
            wanted = (anchor - copy) + left.get(place, np.zeros_like(copy))
            tensors = [(name, start[name].shape) for name in names[begin:end]]
            said = read_upload(blobs(upload), wanted, tensors, outer, chunk)
            left[place] = wanted - said
            copies.append(anchor.astype(np.float64) - said)
        rates = outer["lr"], outer["momentum"], outer["optimizer"]
        anchors[fragment], momenta[fragment] = reference.outer_step(
            anchor, momenta[fragment], copies, weights, rates[0], rates[1], rates[2]
        )
        assert hashlib.sha256(anchors[fragment].tobytes()).hexdigest() == header["digest"], "it is another anchor"


def flat(parameters: Parameters, names: list[str]) -> np.ndarray:
    return np.concatenate([parameters[name].ravel() for name in names]).astype("<f4")


def read_upload(
    body: bytes, wanted: np.ndarray, tensors: reference.Tensors, outer: dict[str, Any], chunk: int
) -> np.ndarray:
    if outer["codec"] == "topk":
        arrays = safetensors.numpy.load(body)
        sent = reference.unpack_contribution(arrays, tensors, chunk, "int8", outer["k"], [], "compact")
        return reference.contribution_values(sent, tensors, chunk)
    write, read = {
        "bf16": (reference.upload_bf16, reference.read_bf16),
        "int8": (reference.upload_int8, reference.read_int8),
    }[outer["codec"]]
    assert body == write(wanted), "it says something else"
    return read(body)
