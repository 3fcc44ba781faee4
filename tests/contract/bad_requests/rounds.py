"""Requests that are right in themselves, but late, early, or about something else than what the run is at."""

from collections.abc import Callable

from tests.contract.bad_requests.case import Case, Http
from tests.contract.bad_requests.contributions import PART, contribution
from tests.contract.bad_requests.states import (
    RUNNING,
    Abstained,
    Answered,
    Joining,
    Outer,
    Paused,
    Starting,
    State,
    Stopped,
)

__all__ = ["CASES", "HEAD", "put"]

HEAD = '{"seq": SEQ, "hash": "HASH"}'
_ABSTAIN = "/v1/runs/RUN/regions/west/steps/STEP/abstentions/SITE"


def _at(step: int, seed: int = 0, **position: object) -> Callable[[State], bytes]:
    """A contribution to the step that comes so many after the open one, or that far away."""

    def made(state: State) -> bytes:
        wanted = state.step + step
        where = state.site.position().model_dump() | position
        return state.site.message(wanted, {"position": where}, seed=seed)

    return made


def _sent(
    what: str,
    status: int,
    code: str,
    detail: str,
    body: Callable[[State], bytes],
    state: type[State] = RUNNING,
    path: str = PART,
) -> Case:
    return Case(what, contribution(body, path), status, code, detail, state)


def _to(step: str) -> str:
    return PART.replace("STEP", step)


def put(
    what: str,
    path: str,
    body: str,
    status: int,
    code: str,
    detail: str,
    state: type[State] = RUNNING,
    token: str = "ranks",
) -> Case:
    return Case(what, Http("PUT", path, token, body), status, code, detail, state)


_CLOSED = "the round of step LAST is closed and does not list what SITE sent: take its entry SEQ instead"
CASES = [
    _sent(
        "a contribution to step 0",
        422,
        "invalid_request",
        "path.step: Input should be greater than or equal to 1",
        _at(0),
        path=_to("0"),
    ),
    _sent(
        "a contribution to a step of 2^64 - 1",
        422,
        "invalid_request",
        "path.step: Input should be less than",
        _at(0),
        path=_to(str(2**64 - 1)),
    ),
    _sent("another step in the URL than in the header", 422, "other_place", "'step': NEXT", _at(1)),
    _sent(
        "other bytes to a step that is closed", 410, "closed_without_you", _CLOSED, _at(-1, seed=9), path=_to("LAST")
    ),
    put(
        "an abstention from a step that is closed",
        _ABSTAIN.replace("STEP", "LAST"),
        f'{{"position": {HEAD}, "reason": "no data"}}',
        410,
        "closed_without_you",
        _CLOSED,
    ),
    _sent(
        "a contribution to the step after the open one",
        409,
        "round_not_open",
        "step NEXT of region west is not open; step STEP is",
        _at(1),
        path=_to("NEXT"),
    ),
    _sent(
        "a contribution to a step far away",
        409,
        "round_not_open",
        "step FAR of region west is not open; step STEP is",
        _at(2**40),
        path=_to("FAR"),
    ),
    _sent(
        "a contribution at another entry's hash",
        409,
        "off_chain",
        "site SITE is at entry SEQ (111111111111), region west at another; load the log again from entry 0",
        _at(0, hash="1" * 64),
    ),
    _sent(
        "a contribution at an entry that is to come",
        409,
        "off_chain",
        "site SITE is at entry 999999 (SHORT), region w",
        _at(0, seq=999_999),
    ),
    _sent(
        "a contribution at entry 2^62", 409, "off_chain", f"site SITE is at entry {2**62} (SHORT)", _at(0, seq=2**62)
    ),
    _sent(
        "a contribution to a region that is not there",
        404,
        "region_not_found",
        "run RUN has no region 'north'; its regions: west",
        _at(0),
        path=PART.replace("west", "north"),
    ),
    _sent("the same contribution again", 202, "", "OTHER", _at(0), Answered),
    _sent(
        "other bytes than before",
        409,
        "other_bytes",
        "site SITE has already answered step STEP with something else",
        _at(0, seed=9),
        Answered,
    ),
    _sent(
        "a contribution after an abstention",
        409,
        "other_bytes",
        "site SITE has already answered step STEP",
        _at(0),
        Abstained,
    ),
    put(
        "an abstention after a contribution",
        _ABSTAIN,
        f'{{"position": {HEAD}, "reason": "no data"}}',
        409,
        "other_bytes",
        "site SITE has already contributed to step STEP",
        Answered,
    ),
    put(
        "an abstention at another entry",
        _ABSTAIN,
        '{"position": {"seq": SEQ, "hash": "ZERO"}, "reason": "no data"}',
        409,
        "off_chain",
        "site SITE is at entry SEQ (000000000000)",
    ),
    put(
        "an abstention without a reason",
        _ABSTAIN,
        f'{{"position": {HEAD}, "reason": ""}}',
        422,
        "invalid_request",
        "body.reason: String should have at least 1 character",
    ),
    put(
        "an abstention whose reason is no text",
        _ABSTAIN,
        f'{{"position": {HEAD}, "reason": "\\ud800"}}',
        422,
        "invalid_request",
        "body.reason",
    ),
    _sent(
        "a contribution to the region of others",
        403,
        "wrong_region",
        "site SITE is in region west, not in east",
        lambda state: state.site.message(state.step, {"region": "east"}),
        Outer,
        PART.replace("west", "east"),
    ),
    _sent(
        "a contribution before anybody has joined",
        409,
        "no_layout",
        "no site has presented the layout of run RUN yet",
        _at(0),
        Starting,
    ),
    _sent(
        "a contribution before all have joined",
        409,
        "wrong_status",
        "run RUN is starting; to contribute it must be running or paused",
        _at(0),
        Joining,
    ),
    _sent("a contribution while nothing opens: it is to be sent again", 202, "", "paused", _at(0), Paused),
    _sent("a contribution after the end", 410, "run_ended", "run RUN is stopped: stopped by request", _at(0), Stopped),
]
