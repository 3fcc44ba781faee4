"""What is late or early for an outer round, and for the end of a run."""

from tests.contract.bad_requests.case import Case, Http
from tests.contract.bad_requests.contributions import PART
from tests.contract.bad_requests.rounds import put
from tests.contract.bad_requests.states import Absent, Done, Outer, Stopped

__all__ = ["CASES"]

_COPY = "/v1/runs/RUN/outer-rounds/{}/fragments/{}/sites/SITE"
_DIGEST = '{"digest": "ZERO"}'
_FINAL = "/v1/runs/RUN/sites/SITE/final"
CASES = [
    put(
        "a copy for an outer round that is not open",
        _COPY.format(999, 0),
        _DIGEST,
        409,
        "outer_round_not_open",
        "outer round 999 is not open yet: it opens when every region has reached its step",
        Outer,
    ),
    put(
        "a copy for outer round 1 of a run without any",
        _COPY.format(1, 0),
        _DIGEST,
        409,
        "outer_round_not_open",
        "run RUN has no outer rounds",
    ),
    put(
        "a copy for outer round 2^64 - 1",
        _COPY.format(2**64 - 1, 0),
        _DIGEST,
        422,
        "invalid_request",
        "path.number: Input should be less than or equal to",
        Outer,
    ),
    put(
        "a copy of a fragment that is not there",
        _COPY.format("OUTER", 2),
        _DIGEST,
        409,
        "no_such_fragment",
        "fragment 2 is not in outer round OUTER, which is of 0, 1",
        Outer,
    ),
    put(
        "a copy of fragment 2^48",
        _COPY.format("OUTER", 2**48),
        _DIGEST,
        409,
        "no_such_fragment",
        f"fragment {2**48} is not in outer round OUTER, which is of 0, 1",
        Outer,
    ),
    put(
        "another copy than before",
        _COPY.format("OUTER", 0),
        _DIGEST,
        409,
        "other_bytes",
        "site SITE has already announced another copy of the fragment",
        Outer,
    ),
    put(
        "a copy from ranks that came later",
        _COPY.format("OUTER", 0),
        _DIGEST,
        409,
        "not_a_participant",
        "outer round OUTER goes on without SITE, which was not there when it opened, was late or has lost its ranks "
        "since",
        Absent,
    ),
    put(
        "a digest that is none",
        _COPY.format("OUTER", 1),
        '{"digest": "../../etc"}',
        422,
        "invalid_request",
        "body.digest: String should match pattern",
        Outer,
    ),
    put(
        "a final digest while steps are left",
        _FINAL,
        '{"seq": SEQ, "digest": "ZERO"}',
        409,
        "not_at_the_end",
        "site SITE reports its end at entry SEQ, but the log of west goes on",
    ),
    put(
        "a final digest at another entry than the last",
        _FINAL,
        '{"seq": 0, "digest": "ZERO"}',
        409,
        "not_at_the_end",
        "site SITE reports its end at entry 0, but",
        Done,
    ),
    put(
        "a final digest at entry 2^63",
        _FINAL,
        f'{{"seq": {2**63}, "digest": "ZERO"}}',
        422,
        "invalid_request",
        "body.seq: Input should be less than or equal to",
        Done,
    ),
    Case(
        "a run that has ended is started",
        Http("POST", "/v1/runs/RUN/start"),
        410,
        "run_ended",
        "run RUN is stopped: stopped by request",
        Stopped,
    ),
    Case(
        "a run that has ended is paused",
        Http("POST", "/v1/runs/RUN/pause"),
        410,
        "run_ended",
        "run RUN is stopped: stopped by request",
        Stopped,
    ),
    put(
        "a seat in a run that has ended",
        "/v1/runs/RUN/sites/SITE/seat",
        f'{{"attempt": 2, "secret": "{"s" * 32}"}}',
        410,
        "run_ended",
        "run RUN is stopped",
        Stopped,
        "site",
    ),
    Case(
        "the update of a step that was not reached",
        Http("GET", PART.split("/contributions")[0] + "/update/parts/0"),
        410,
        "run_ended",
        "run RUN is stopped: stopped by request",
        Stopped,
    ),
]
