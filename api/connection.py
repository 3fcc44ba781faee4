"""Where the `isthmus` command finds its coordinator and its token; nothing else of it reads the environment."""

import sys
from pathlib import Path

from pydantic_settings import BaseSettings, SettingsConfigDict
from rich.console import Console

from api.client import CoordinatorClient
from api.errors import IsthmusError, UnreachableError
from api.tls import CoordinatorUrl, warning_about

__all__ = ["Connection"]

err = Console(stderr=True)

_DEFAULT_URL = "http://127.0.0.1:8420"


class Connection(BaseSettings):
    """Where the coordinator is, from ISTHMUS_COORDINATOR, ISTHMUS_TOKEN, ISTHMUS_CA_FILE and ISTHMUS_DATA_DIR."""

    model_config = SettingsConfigDict(env_prefix="ISTHMUS_", env_ignore_empty=True, frozen=True)

    coordinator: CoordinatorUrl | None = None
    token: str | None = None
    ca_file: Path | None = None
    data_dir: Path = Path("isthmus-data")

    def client(self, patience: float = 10.0) -> CoordinatorClient:
        """With the token given, or that of the coordinator whose data directory is here, for that one only."""
        token, url = self.data_dir / "admin-token", self.data_dir / "url"
        local = url.read_text().strip() if url.exists() else None
        if self.token is not None:
            return self._to(self.coordinator or local or _DEFAULT_URL, self.token, patience)
        if local is None or not token.exists() or self.coordinator not in (None, local):
            raise IsthmusError(
                "no token: set ISTHMUS_TOKEN, or run this where the coordinator's data directory is (ISTHMUS_DATA_DIR, "
                f"now {self.data_dir}) and leave ISTHMUS_COORDINATOR unset"
            )
        return self._to(local, token.read_text().strip(), patience)

    def _to(self, url: str, token: str, patience: float) -> CoordinatorClient:
        warning = warning_about(url)
        if warning is not None:
            err.print(f"isthmus: {warning}", style="yellow", markup=False, soft_wrap=True)

        def waiting(error: UnreachableError) -> None:
            if error.lasts:
                raise error
            sys.stderr.write(f"isthmus: no answer from {url} yet, trying for {patience:g} s\n")

        return CoordinatorClient(url, token, ca_file=self.ca_file, patience=patience, waiting=waiting)
