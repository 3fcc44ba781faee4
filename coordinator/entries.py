"""Pure: the headers of log entries. Every entry carries the hash of the one before (A2)."""

from typing import Any

import numpy as np

from algorithms.schedule import learning_rate
from algorithms.updates import CODEC_BITS
from api.message import PROTOCOL_VERSION
from api.payload import digest_json
from api.schemas import Position
from api.specs import InForce
from coordinator.events import Norm
from coordinator.in_force import optimizer_at, outer_schedule
from coordinator.records import OuterRound, Region, RunState, Share

__all__ = ["anchor_header", "anchor_taken_header", "change_header", "position_after", "start_header", "step_header"]

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
    round_ = region.round
    optimizer = optimizer_at(state, region.name, round_.step)
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


def anchor_header(region: Region, outer: OuterRound, number: int) -> Header:
    """Of fragment `number`, whose anchor is there. It is applied where it is in the log, after the copies were taken.

    H at that step, `every`, tells a region that was taken along of which fragments the outer round is.
    The mean of several copies has no digest: then `digest` of the region is null, and `copies` lists theirs. `uploads`
    are the blobs that they were encoded as, in the same order, if they were. `before` is in the log of a region that
    was not in the mean: the anchor before this one, if its parameters move by the difference; null, if they become it.
    """
    fragment = outer.fragments[number]
    takes_the_mean = fragment.buffers or region.name in fragment.averaged
    moves = {} if takes_the_mean else {"before": fragment.before if region.name in fragment.kept else None}
    return _common("anchor", region) | {
        "outer_round": outer.number,
        "taken_after": outer.step,
        "every": outer.every,
        "fragment": number,
        "generation": outer.number,
        "digest": fragment.anchor,
        "participants": [_participant(share) for share in fragment.shares],
        **moves,
    }


def anchor_taken_header(state: RunState, region: Region, number: int, anchor: str) -> Header:
    """Of a fragment that is there when the region comes: it begins with that, behind the last complete outer round."""
    schedule = outer_schedule(state)
    assert schedule is not None
    moves = {} if number == schedule.fragments else {"before": None}
    return _common("anchor", region) | {
        "outer_round": state.outer_rounds,
        "taken_after": state.outer_step,
        "every": schedule.every_at(state.outer_step),
        "fragment": number,
        "generation": state.outer_rounds,
        "digest": anchor,
        "participants": [],
        **moves,
    }


def _participant(share: Share) -> Header:
    alone = len(share.copies) == 1
    copies = {} if alone else {"copies": list(share.copies)}
    uploads = {} if share.uploads == share.copies else {"uploads": list(share.uploads)}
    digest = share.copies[0] if alone else None
    return {"region": share.region, "digest": digest, "weight": share.weight, **copies, **uploads}


def change_header(region: Region, from_step: int, settings: InForce) -> Header:
    """All settings that could have changed, as they are from now on."""
    return _common("change", region) | {"from_step": from_step, **settings.model_dump()}
