"""Finds processes by a directory that only they know: in their arguments, or as the place of their session file."""

from contextlib import suppress
from pathlib import Path

import psutil

__all__ = ["processes_of"]


def processes_of(directory: Path) -> list[psutil.Process]:
    """All live processes that know a path below `directory`; zombies know none."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            words = [*(process.info["cmdline"] or ()), process.environ().get("ISTHMUS_SESSION_FILE", "")]
            if any(word.startswith(str(directory)) or f"={directory}" in word for word in words):
                found.append(process)
    return found
