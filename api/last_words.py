"""What a process that failed has said last."""

import re

__all__ = ["last_words"]

_TORCH_SAYS = re.compile(r"(\[rank\d+\]:)?\[[IWEF]\d{4} ")
"""How torch's own log lines begin, with which ranks may end after they have said why."""


def last_words(log: str) -> str:
    """The last line of a log, unless torch has written it and another one is there; nothing of an empty log."""
    lines = log.strip().splitlines()
    return next((line for line in reversed(lines) if not _TORCH_SAYS.match(line)), lines[-1] if lines else "")
