"""Every request that must be refused, in one list; `python -m tests.contract.bad_requests` writes the page of them."""

from tests.contract.bad_requests import (
    access,
    changes,
    contributions,
    endings,
    joining,
    json_bodies,
    rounds,
    stored,
    transport,
)
from tests.contract.bad_requests.case import Case

__all__ = ["SUBJECTS"]

SUBJECTS: dict[str, list[Case]] = {
    "HTTP": transport.CASES,
    "Tokens": access.CASES,
    "Names and numbers in URLs": access.PLACES,
    "JSON": json_bodies.CASES,
    "Contributions: bytes": contributions.BYTES,
    "Contributions: headers": contributions.HEADERS,
    "Contributions: arrays": contributions.ARRAYS,
    "Rounds: wrong place or time": rounds.CASES,
    "Changes of settings": changes.CASES,
    "Outer rounds and the end": endings.CASES,
    "Joining, seats and entry 0": joining.CASES,
    "Blobs and metrics": stored.CASES,
}
