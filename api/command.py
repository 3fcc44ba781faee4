"""What the commands have in common: which coordinator they talk to, and how errors become exit statuses."""

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

import stamina
from pydantic import ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict
from rich.console import Console

from api.client import CoordinatorClient
from api.errors import IsthmusError, faults_of

__all__ = ["Connection", "obey"]

_DEFAULT_URL = "http://127.0.0.1:8420"


class Connection(BaseSettings):
    """Where the coordinator is, from ISTHMUS_COORDINATOR, ISTHMUS_TOKEN and ISTHMUS_DATA_DIR."""

    model_config = SettingsConfigDict(env_prefix="ISTHMUS_", env_ignore_empty=True, frozen=True)

    coordinator: str | None = None
    token: str | None = None
    data_dir: Path = Path("isthmus-data")

    def client(self, patience: float = 10.0) -> CoordinatorClient:
        """With the token given, or that of the coordinator whose data directory is here, for that one only."""
        token, url = self.data_dir / "admin-token", self.data_dir / "url"
        local = url.read_text().strip() if url.exists() else None
        if self.token is not None:
            return CoordinatorClient(self.coordinator or local or _DEFAULT_URL, self.token, patience=patience)
        if local is None or not token.exists() or self.coordinator not in (None, local):
            raise IsthmusError(
                "no token: set ISTHMUS_TOKEN, or run this where the coordinator's data directory is (ISTHMUS_DATA_DIR, "
                f"now {self.data_dir}) and leave ISTHMUS_COORDINATOR unset"
            )
        return CoordinatorClient(local, token.read_text().strip(), patience=patience)


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
