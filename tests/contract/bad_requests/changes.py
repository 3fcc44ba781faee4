"""Changes of settings that cannot be made."""

from tests.contract.bad_requests.case import Case, Http
from tests.contract.bad_requests.states import RUNNING, Starting, State, Stopped

__all__ = ["CASES"]


def _change(
    what: str, change: dict[str, object], status: int, code: str, detail: str, state: type[State] = RUNNING
) -> Case:
    return Case(what, Http("POST", "/v1/runs/RUN/changes", json=change), status, code, detail, state)


CASES = [
    _change("nothing is changed", {"from_step": 9}, 422, "nothing_to_change", "names at least one of lr, k and every"),
    _change("what is so anyway", {"from_step": 9, "k": 64}, 422, "nothing_to_change", "from step 9 on k is 64 anyway"),
    _change("no step", {"k": 8}, 422, "invalid_request", "body.from_step: Field required"),
    _change("from step 0", {"from_step": 0, "k": 8}, 422, "invalid_request", "body.from_step: Input should be greater"),
    _change("an open step", {"from_step": 1, "k": 8}, 409, "step_open", "is open or done: from_step must be at least"),
    _change(
        "a step that the run does not have",
        {"from_step": 10**6, "k": 8},
        422,
        "no_such_step",
        "from_step = 1000000: the run has 100000 steps",
    ),
    _change("k = 0", {"from_step": 9, "k": 0}, 422, "invalid_request", "body.k: Input should be greater than"),
    _change("k beyond a chunk", {"from_step": 9, "k": 1025}, 422, "bad_change", "k must be 1 to 1024"),
    _change(
        "a rate of 0", {"from_step": 9, "lr": 0}, 422, "invalid_request", "body.lr: Input should be greater than 0"
    ),
    _change(
        "a setting that is fixed", {"from_step": 9, "beta": 0.5}, 422, "invalid_request", "body.beta: Extra inputs"
    ),
    _change("H without outer steps", {"from_step": 9, "every": 3}, 422, "no_outer_steps", "has no `outer`"),
    _change(
        "before the run has begun", {"from_step": 9, "k": 8}, 409, "wrong_status", "to change its settings", Starting
    ),
    _change(
        "of a run that has ended",
        {"from_step": 9, "k": 8},
        410,
        "run_ended",
        "run RUN is stopped: stopped by request",
        Stopped,
    ),
]
