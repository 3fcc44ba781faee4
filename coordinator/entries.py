"""Pure: the headers of log entries. Every entry carries the hash of the one before (A2)."""

from typing import Any

import numpy as np

from algorithms.schedule import learning_rate
from algorithms.updates import CODEC_BITS
from api.payload import digest_json
from api.schemas import PROTOCOL_VERSION, Position
from coordinator.events import Norm
from coordinator.records import Region, RunState

__all__ = ["anchor_header", "position_after", "start_header", "step_header"]

Header = dict[str, Any]
_GENESIS = "0" * 64


def _common(kind: str, region: Region) -> Header:
    return {
        "version": PROTOCOL_VERSION,
        "kind": kind,
        "seq": 0 if region.head is None else region.head.seq + 1,
        "step": region.step,
        "previous": _GENESIS if region.head is None else region.head.hash,
    }


def position_after(header: Header) -> Position:
    return Position(seq=header["seq"], hash=digest_json(header))


def start_header(state: RunState, region: Region) -> Header:
    assert state.layout is not None
    assert state.start is not None
    return _common("start", region) | {
        "layout": state.layout.digest,
        "parameters": state.start.parameters,
        "buffers": state.start.buffers,
    }


def step_header(state: RunState, region: Region, parts: tuple[str, ...], norms: dict[str, Norm]) -> Header:
    """The entry that closes the region's round; `parts` is empty if everybody abstained (A7)."""
    assert state.layout is not None
    assert region.round is not None
    round_, optimizer = region.round, state.spec.optimizer
    lr = learning_rate(
        round_.step,
        lr=optimizer.lr,
        steps=state.spec.steps,
        warmup=optimizer.warmup,
        schedule=optimizer.schedule,
    )
    decay = float(np.float32(1.0 - lr * optimizer.weight_decay))
    groups = state.layout.groups
    return _common("step", region) | {
        "step": round_.step,
        "contributors": [
            {
                "site": site,
                "digest": sent.digest,
                "tokens": sent.tokens,
                "norm": norms[site].value,
                "halvings": norms[site].halvings,
            }
            for site, sent in sorted(round_.contributions.items())
        ],
        "abstentions": _reasons(round_.abstentions),
        "refusals": _reasons(round_.refusals),
        "lr": [lr for _ in groups],
        "decay": [1.0 if group == "no_decay" else decay for group in groups],
        "k": optimizer.k,
        "bits": CODEC_BITS[optimizer.codec],
        "codec": optimizer.codec,
        "parts": list(parts),
    }


def _reasons(by_site: dict[str, str]) -> list[dict[str, str]]:
    return [{"site": site, "reason": reason} for site, reason in sorted(by_site.items())]


def anchor_header(
    region: Region, *, number: int, fragment: int, digest: str, participants: list[tuple[str, tuple[str, ...], int]]
) -> Header:
    """`participants`: region, digests of which its copy was made, weight in tokens; in region order.

    The mean of several copies has no digest: then `digest` is null, and `copies` lists theirs.
    """
    return _common("anchor", region) | {
        "outer_round": number,
        "fragment": fragment,
        "generation": number,
        "digest": digest,
        "participants": [
            {"region": name, "digest": copies[0], "weight": weight}
            if len(copies) == 1
            else {"region": name, "digest": None, "copies": list(copies), "weight": weight}
            for name, copies, weight in sorted(participants)
        ],
    }
