"""Errors survive the wire: the exception that a client raises is the one that the coordinator raised."""

import re

import pytest

from api import errors
from api.errors import Problem, ProblemError, error_from_problem
from api.middleware import BodyTimeoutError, LengthRequiredError, problem_response

KINDS = sorted(ProblemError.__subclasses__(), key=lambda kind: kind.status)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_round_trip(kind):
    error = kind("some_code", "the thing x is 5: set it to 6", errors=["a", "b"], context={"step": 3})
    response = problem_response(error)
    assert response.status_code == kind.status
    assert response.media_type == "application/problem+json"
    back = error_from_problem(Problem.model_validate_json(bytes(response.body)))
    assert type(back) is kind
    assert (back.code, str(back), back.detail) == ("some_code", error.detail, error.detail)
    assert (back.errors, back.context) == (["a", "b"], {"step": 3})
    assert back.problem() == error.problem()


def test_each_kind_has_a_status_of_its_own():
    """A status that a derived error has besides, such as 411, stays with the plain kind."""
    assert len({kind.status for kind in KINDS}) == len(KINDS)
    assert {LengthRequiredError.status, BodyTimeoutError.status}.isdisjoint(kind.status for kind in KINDS)


def test_an_unknown_status_gives_a_plain_error():
    problem = Problem(type="about:blank", title="teapot", status=418, code="teapot", detail="short and stout")
    error = error_from_problem(problem)
    assert type(error) is ProblemError
    assert (error.code, str(error)) == ("teapot", "short and stout")


def test_headers_that_go_with_a_status():
    assert problem_response(errors.UnauthorizedError("x", "y")).headers["www-authenticate"] == "Bearer"
    assert problem_response(errors.UnavailableError("x", "y")).headers["retry-after"] == "1"
    assert problem_response(errors.StorageFullError("x", "y")).headers["retry-after"] == "10"
    assert problem_response(errors.TooManyRequestsError("x", "y")).headers["retry-after"] == "1"
    patient = errors.TooManyRequestsError("x", "y", context={"retry_after_s": 2.1})
    assert problem_response(patient).headers["retry-after"] == "3"
    assert "retry-after" not in problem_response(errors.ConflictError("x", "y")).headers


def test_the_docstring_lists_every_error():
    listed = re.findall(r"── (\w+Error) +(\d+)", errors.__doc__)
    assert listed == [(kind.__name__, str(kind.status)) for kind in KINDS]


def test_an_error_may_quote_what_cannot_be_encoded():
    problem = Problem.model_validate_json(bytes(problem_response(errors.InvalidError("x", "name is \ud800")).body))
    assert problem.detail == "name is ?"
