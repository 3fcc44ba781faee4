"""How the errors of a command become exit statuses."""

import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

import stamina
from pydantic import ValidationError
from rich.console import Console

from api.errors import IsthmusError, faults_of

__all__ = ["obey"]


def obey(command: Callable[[], object]) -> None:
    """Exit status: 0 done, 1 failed with a message, 2 wrong usage, 130 interrupted."""
    for number in (signal.SIGTERM, signal.SIGINT):  # which a script's background command finds ignored
        signal.signal(number, _interrupt)
    stamina.instrumentation.set_on_retry_hooks([])  # which would write into our output
    try:
        command()
    except IsthmusError as error:
        _complain(str(error))
    except ValidationError as error:
        _complain(*faults_of(error.errors()))
    except KeyboardInterrupt:
        sys.exit(130)


def _complain(*faults: str) -> NoReturn:
    console = Console(stderr=True)
    for fault in faults:
        console.print(f"isthmus: {fault}", style="red", markup=False, soft_wrap=True)
    sys.exit(1)


def _interrupt(_: int, __: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
