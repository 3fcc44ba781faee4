"""Every error that crosses the wire, as RFC 9457 problem+json.

IsthmusError                    anything a user may see; the message names the thing and the remedy
├── UnreachableError            the coordinator, or what it depends on, was away for too long
└── ProblemError                has a stable `code` and an HTTP status
    ├── UnauthorizedError       401  no token, or one that nobody issued
    ├── ForbiddenError          403  a token without the right
    ├── NotFoundError           404
    ├── ConflictError           409  right request, wrong moment, or other bytes than before
    ├── GoneError               410  the round is closed, the run has ended
    ├── TooLargeError           413
    ├── UnsupportedMediaError   415
    ├── RangeError              416  nothing of a blob is there
    ├── InvalidError            422  the request makes no sense; `errors` lists what is wrong
    ├── UpgradeRequiredError    426  protocol versions do not overlap
    ├── TooManyRequestsError    429  not now: `retry_after_s` of the context says when
    ├── UnavailableError        503  Redis or the blob store cannot be reached; try again
    └── StorageFullError        507
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import BaseModel, Field

__all__ = [
    "ConflictError",
    "ForbiddenError",
    "GoneError",
    "InvalidError",
    "IsthmusError",
    "NotFoundError",
    "Problem",
    "ProblemError",
    "RangeError",
    "StorageFullError",
    "TooLargeError",
    "TooManyRequestsError",
    "UnauthorizedError",
    "UnavailableError",
    "UnreachableError",
    "UnsupportedMediaError",
    "UpgradeRequiredError",
    "error_from_problem",
    "faults_of",
]

PROBLEM_MEDIA_TYPE = "application/problem+json"
_LONGEST_DETAIL = 4000
_LONGEST_FAULT = 500
_MOST_FAULTS = 100


class Problem(BaseModel):
    """The body of every error answer."""

    type: str = Field(description="a stable URI reference: `urn:isthmus:problem:<code>`")
    title: str
    status: int
    code: str = Field(description="stable, for programs")
    detail: str = Field(description="names the thing, the value and the remedy, for people")
    errors: list[str] = Field(default_factory=list, description="every fault, where there are several")
    context: dict[str, Any] = Field(default_factory=dict, description="facts for programs, such as the current step")


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


class IsthmusError(Exception):
    """Base of all errors that a user may see."""


class UnreachableError(IsthmusError):
    """The coordinator, or what it depends on, was away for longer than the client's patience.

    Attributes:
        lasts: waiting will hardly help: somebody must change something.
    """

    def __init__(self, message: str, *, lasts: bool = False) -> None:
        super().__init__(message)
        self.lasts = lasts


class ProblemError(IsthmusError):
    """An error with an HTTP status and a stable code."""

    status: ClassVar[int] = 500
    title: ClassVar[str] = "internal error"

    def __init__(
        self, code: str, detail: str, *, errors: Sequence[str] = (), context: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.errors = list(errors)
        self.context = dict(context or {})

    def problem(self) -> Problem:
        """What is answered: it quotes what was asked, but is not as long."""
        return Problem(
            type=f"urn:isthmus:problem:{self.code}",
            title=self.title,
            status=self.status,
            code=self.code,
            detail=_shortened(self.detail, _LONGEST_DETAIL),
            errors=[_shortened(fault, _LONGEST_FAULT) for fault in self.errors[:_MOST_FAULTS]],
            context=self.context,
        )


class UnauthorizedError(ProblemError):
    status, title = 401, "unauthorized"


class ForbiddenError(ProblemError):
    status, title = 403, "forbidden"


class NotFoundError(ProblemError):
    status, title = 404, "not found"


class ConflictError(ProblemError):
    status, title = 409, "conflict"


class GoneError(ProblemError):
    status, title = 410, "gone"


class TooLargeError(ProblemError):
    status, title = 413, "too large"


class UnsupportedMediaError(ProblemError):
    status, title = 415, "unsupported media type"


class RangeError(ProblemError):
    status, title = 416, "range not satisfiable"


class InvalidError(ProblemError):
    status, title = 422, "invalid"


class UpgradeRequiredError(ProblemError):
    status, title = 426, "upgrade required"


class TooManyRequestsError(ProblemError):
    status, title = 429, "too many requests"


class UnavailableError(ProblemError):
    status, title = 503, "unavailable"


class StorageFullError(ProblemError):
    status, title = 507, "storage full"


def faults_of(faults: Sequence[Any]) -> list[str]:
    """One sentence per fault of a pydantic or FastAPI validation error's `errors()`: where, and what is wrong."""
    places = (".".join(str(part) for part in fault["loc"]) for fault in faults)
    messages = map(_message, faults)
    return [f"{place}: {message}" if place else message for place, message in zip(places, messages, strict=True)]


def _message(fault: Any) -> str:
    """FastAPI keeps to itself what it has of a JSON decode error."""
    message = str(fault["msg"]).removeprefix("Value error, ")
    return f"{message}: {fault['ctx']['error']}" if message == "JSON decode error" else message


_BY_STATUS = {kind.status: kind for kind in ProblemError.__subclasses__()}


def error_from_problem(problem: Problem) -> ProblemError:
    """The exception that `problem` was made from; an unknown status gives a plain ProblemError."""
    kind = _BY_STATUS.get(problem.status, ProblemError)
    return kind(problem.code, problem.detail, errors=problem.errors, context=problem.context)
