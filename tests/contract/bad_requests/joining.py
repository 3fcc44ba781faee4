"""Layouts, seats and parameters with which a site cannot join, and reports of its place in the log."""

from algorithms.layout import ParameterLayout, TensorSpec
from tests.contract.bad_requests.case import Case, Http
from tests.contract.bad_requests.rounds import HEAD, put
from tests.contract.bad_requests.states import Pending, Starting
from tests.contract.by_hand import LAYOUT

__all__ = ["CASES"]

_SEAT = "/v1/runs/RUN/sites/SITE/seat"
_LAYOUT = "/v1/runs/RUN/sites/SITE/layout"
_START = "/v1/runs/RUN/sites/SITE/start"
_CAUGHT_UP = "/v1/runs/RUN/sites/SITE/caught-up"
_OTHER_LAYOUT = ParameterLayout([TensorSpec("bias", (6,), 1)], chunk=32).to_json()


def _layout(what: str, code: str, detail: str, status: int = 422, attempt: int = 2, **changes: object) -> Case:
    body = {"attempt": attempt, "layout": LAYOUT.to_json() | changes}
    return Case(what, Http("PUT", _LAYOUT, "ranks", json=body), status, code, detail)


_WITH_BUFFERS = {"attempt": 2, "layout": LAYOUT.to_json(), "buffer_bytes": 1 << 30}


def _caught_up(what: str, body: str, status: int, code: str, detail: str) -> Case:
    return Case(what, Http("POST", _CAUGHT_UP, "ranks", body), status, code, detail)


CASES = [
    put(
        "a seat for an attempt that is over",
        _SEAT,
        f'{{"attempt": 1, "secret": "{"s" * 32}"}}',
        409,
        "stale_attempt",
        "attempt 1 of site SITE is over; now it is 2",
        token="site",
    ),
    put(
        "a seat for an attempt that is to come",
        _SEAT,
        f'{{"attempt": 3, "secret": "{"s" * 32}"}}',
        409,
        "stale_attempt",
        "attempt 3 of site SITE is not due; now it is 2",
        token="site",
    ),
    put(
        "a seat with a short secret",
        _SEAT,
        '{"attempt": 2, "secret": "short"}',
        422,
        "invalid_request",
        "body.secret: String should have at least 32 characters",
        token="site",
    ),
    put(
        "a seat in a run that is not started",
        _SEAT,
        f'{{"attempt": 1, "secret": "{"s" * 32}"}}',
        403,
        "not_a_member",
        "site 'SITE' is not a member of run RUN",
        Pending,
        "site",
    ),
    Case(
        "the layout of a model with a GiB of buffers",
        Http("PUT", _LAYOUT, "ranks", json=_WITH_BUFFERS),
        422,
        "buffers_too_large",
        "the buffers of the model at site SITE take 1073741824 bytes, and at most 268435456 are taken",
    ),
    _layout(
        "a layout of an attempt that is over", "stale_attempt", "attempt 1 of site SITE is over; now it is 2", 409, 1
    ),
    _layout(
        "the layout of another model",
        "layout_differs",
        "the model at site SITE has other parameters than the run's, 3 differ (bias: [6] here, [5] in the run",
        409,
        **_OTHER_LAYOUT,
    ),
    _layout("a layout with another chunk", "bad_layout", "layout: ", chunk=64),
    _layout("a layout with a group too few", "bad_layout", "tensor 'bias': group 1 of 1 groups", groups=["decay"]),
    _layout("a tensor of 2^88 elements", "bad_layout", "tensor 'w': ", tensors=[["w", [2**44, 2**44], 0]]),
    _layout("a tensor of -1 elements", "bad_layout", "tensor 'w': bad shape [-1]", tensors=[["w", [-1], 0]]),
    _layout(
        "a tensor twice",
        "bad_layout",
        "two tensors have the canonical name 'w'",
        tensors=[["w", [2, 2], 0], ["module.w", [2, 2], 0]],
    ),
    _layout("a tensor whose name is no text", "bad_layout", "layout: ", tensors=[["\ud800", [2], 0]]),
    _layout("a group whose name is no text", "bad_layout", "layout: ", groups=["\ud800", "no_decay"]),
    _layout("a layout of another basis", "bad_layout", "made with other integer bases", basis=""),
    Case(
        "a layout of nothing",
        Http("PUT", _LAYOUT, "ranks", json={"attempt": 2, "layout": {}}),
        422,
        "bad_layout",
        "layout: a layout has basis, chunk, groups, tensors, transform, version, got ",
    ),
    _layout("a layout with a field that nobody knows", "bad_layout", "surprise", surprise=1),
    put(
        "entry 0 of parameters that are not stored",
        _START,
        '{"parameters": "ZERO"}',
        404,
        "blob_not_found",
        "blob ZERO is not stored here; upload it first",
    ),
    put(
        "entry 0 of a blob of another size",
        _START,
        '{"parameters": "EMPTY"}',
        422,
        "wrong_size",
        f"the parameters have 0 bytes; the layout's {LAYOUT.parameter_count} float32 elements take",
    ),
    put(
        "entry 0 before the layout",
        _START,
        '{"parameters": "ZERO"}',
        409,
        "no_layout",
        "no site has presented the layout of run RUN yet",
        Starting,
    ),
    _caught_up(
        "caught up by an attempt that is over",
        f'{{"attempt": 1, "position": {HEAD}}}',
        409,
        "stale_attempt",
        "attempt 1 of site SITE is over; now it is 2",
    ),
    _caught_up(
        "caught up at another hash than the log's",
        '{"attempt": 2, "position": {"seq": SEQ, "hash": "ZERO"}}',
        409,
        "off_chain",
        "entry SEQ of site SITE is not in the log of west",
    ),
    _caught_up(
        "caught up at an entry that is to come",
        '{"attempt": 2, "position": {"seq": 999999, "hash": "HASH"}}',
        409,
        "off_chain",
        "entry 999999 of site SITE is not in the log of west",
    ),
]
