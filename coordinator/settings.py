"""The coordinator's settings: flags of `python -m coordinator`, `ISTHMUS_` variables; nothing else reads them."""

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

__all__ = ["Settings"]


class Settings(BaseSettings):
    """Runs a coordinator. Each option may be set by an environment variable ISTHMUS_NAME, too."""

    model_config = SettingsConfigDict(
        env_prefix="ISTHMUS_",
        env_ignore_empty=True,
        frozen=True,
        cli_prog_name="isthmus coordinator",
        cli_kebab_case=True,
        cli_hide_none_type=True,
    )

    host: str = Field(default="127.0.0.1", description="address to listen on; loopback unless told otherwise")
    port: int = Field(default=8420, ge=0, le=65535, description="0 takes a free one and writes it to DATA_DIR/url")
    data_dir: Path = Field(default=Path("isthmus-data"), description="blobs, tokens and the embedded Redis's data")
    redis_url: str | None = Field(default=None, description="default: a Redis of its own in DATA_DIR")
    admin_token: str | None = Field(default=None, min_length=16, description="default: made at first start")
    join_token: str | None = Field(default=None, min_length=16, description="what agents register with")
    observer_token: str | None = Field(default=None, min_length=16, description="may read everything, change nothing")
    lease_s: float = Field(default=15.0, gt=0, description="a site is lost after this long without a heartbeat")
    heartbeat_s: float = Field(default=5.0, gt=0, description="how often agents are asked to send one")
    tick_s: float = Field(default=1.0, gt=0, description="how often leases and unfinished work are looked at")
    redis_budget_mb: int = Field(
        default=2048, ge=1, description="while Redis holds more MiB than this, sites wait with their contributions"
    )
