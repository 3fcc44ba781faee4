"""The operator's allow-list: the only commands that a coordinator can make a site run, and versions of their code."""

import hashlib
import shlex
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from api.message import Name, TaskVersion

__all__ = ["Task", "missing", "parse_task", "parse_version", "script_version"]

_NAME = TypeAdapter(Name)
_VERSION = TypeAdapter(TaskVersion)
_DIGITS = 16
"""Of a digest: enough to tell versions apart that differ by accident."""


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


def parse_version(text: str) -> tuple[str, str]:
    """`NAME=TEXT`: the task, and what its version is called.

    Raises:
        ValueError: no name, no text, one that is too long, or a name that is none.
    """
    name, _, version = text.partition("=")
    if not version:
        raise ValueError(f"task version {text!r} must read NAME=TEXT, such as tiny_lm=$(git rev-parse HEAD)")
    return _NAME.validate_python(name), _VERSION.validate_python(version)


def missing(command: Sequence[str]) -> str | None:
    """What a command names and is not there, at least not yet: its program, or the script or module of a Python."""
    program = shutil.which(command[0])
    if program is None:
        return command[0]
    if not Path(program).name.startswith(("python", "torchrun")):
        return None
    for word, after in zip(command[1:], [*command[2:], ""], strict=True):
        if word == "-m":
            ours = Path(program).parent == Path(sys.executable).parent  # what another Python has is not known
            return f"module {after!r}" if ours and not _module(after) else None
        if word == "-c" or word.endswith(".py"):
            return None if word == "-c" or Path(word).is_file() else word
    return None


def script_version(command: Sequence[str]) -> str:
    """Of the script file that a command runs, as it is now; nothing if it cannot be found."""
    script = _script(command)
    with suppress(OSError):
        return f"sha256:{hashlib.sha256(script.read_bytes()).hexdigest()[:_DIGITS]}" if script else ""
    return ""


def _script(command: Sequence[str]) -> Path | None:
    """The first Python file that is named, or module; else the program, unless that is Python itself."""
    for word, after in zip(command, [*command[1:], ""], strict=True):
        if word == "-m":
            return _module(after)
        if word.endswith(".py") and Path(word).is_file():
            return Path(word)
    program = shutil.which(command[0])
    return None if program is None or Path(program).name.startswith("python") else Path(program)


def _module(name: str) -> Path | None:
    """Where Python would find it from here, without importing what contains it."""
    if not name:
        return None
    places = (Path(folder).joinpath(*name.split(".")) for folder in ("", *sys.path))
    files = (file for place in places for file in (place.with_name(f"{place.name}.py"), place / "__main__.py"))
    return next((file for file in files if file.is_file()), None)
