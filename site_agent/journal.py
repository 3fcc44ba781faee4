"""What a site has sent and what it was answered, in a file of its own: evidence to hold against the log."""

from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from api.errors import ProblemError
from api.service import Answer

__all__ = ["Journal", "Line", "read_journal"]

NAME = "sent.jsonl"


class Line(BaseModel):
    """A contribution that was answered.

    The answer is `accepted` for 200 and 202, `closed` if its round was closed without it, or the code of a refusal.
    """

    model_config = ConfigDict(frozen=True)

    step: int
    digest: str
    answer: str


class Journal:
    """Appends to `sent.jsonl` in a folder; a line is with the operating system before anything else happens."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME

    def noted(self, step: int, digest: str, send: Callable[[], Answer]) -> Answer:
        """What `send` returns or raises. What was not kept, or not answered at all, is sent again: it is not noted."""
        try:
            answer = send()
        except ProblemError as error:
            self._note(step, digest, "closed" if error.code == "closed_without_you" else error.code)
            raise
        if answer.accepted:
            self._note(step, digest, "accepted")
        return answer

    def _note(self, step: int, digest: str, answer: str) -> None:
        with self._path.open("a") as file:
            file.write(Line(step=step, digest=digest, answer=answer).model_dump_json() + "\n")


def read_journal(path: Path) -> list[Line]:
    """All complete lines; the last one of a killed process may not be."""
    lines = path.read_text().splitlines(keepends=True)
    return [Line.model_validate_json(line) for line in lines if line.endswith("\n")]
