"""The operator's allow-list: the only commands that a coordinator can make a site run."""

import shlex
import sys
from dataclasses import dataclass

from pydantic import TypeAdapter

from api.schemas import Name

__all__ = ["Task", "parse_task"]

_NAME = TypeAdapter(Name)


@dataclass(frozen=True)
class Task:
    name: str
    command: tuple[str, ...]


def parse_task(text: str) -> Task:
    """`NAME=COMMAND`, split as a shell would; a leading `python` is the agent's own interpreter.

    Raises:
        ValueError: no name, no command, or a name that is none.
    """
    name, separator, command = text.partition("=")
    words = shlex.split(command)
    if not separator or not words:
        raise ValueError(f"task {text!r} must read NAME=COMMAND, such as tiny_lm='python train.py'")
    _NAME.validate_python(name)
    if words[0] in ("python", "python3"):
        words[0] = sys.executable
    return Task(name, tuple(words))
