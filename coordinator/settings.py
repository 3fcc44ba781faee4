"""The coordinator's settings: flags of `python -m coordinator`, `ISTHMUS_` variables; nothing else reads them."""

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator
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
    data_dir: Path = Field(default=Path("isthmus-data"), description="tokens, the embedded Redis's data and blobs")
    blobs: str | None = Field(
        default=None,
        description="where blobs are: a directory (default: in DATA_DIR), or s3://BUCKET/PREFIX, whose key and address "
        "are told by AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and AWS_ENDPOINT_URL",
    )
    blob_quota_gb: float | None = Field(default=None, gt=0, description="gigabytes of all blobs at most")
    workers: int = Field(default=1, ge=1, le=64, description="processes that serve; they share the port and Redis")
    redis_url: str | None = Field(default=None, description="default: a Redis of its own in DATA_DIR")
    tls_cert: Path | None = Field(
        default=None, description="PEM file: serves HTTPS with this certificate and its chain"
    )
    tls_key: Path | None = Field(default=None, description="PEM file with the key of that certificate")
    admin_token: str | None = Field(default=None, min_length=16, description="default: made at first start")
    join_token: str | None = Field(default=None, min_length=16, description="what agents register with")
    observer_token: str | None = Field(default=None, min_length=16, description="may read everything, change nothing")
    rate_limit: int = Field(default=60_000, ge=1, description="requests a minute with one token")
    failure_limit: int = Field(
        default=60, ge=1, description="requests a minute from one address whose token is missing or not good"
    )
    lease_s: float = Field(default=15.0, gt=0, description="a site is lost after this long without a heartbeat")
    heartbeat_s: float = Field(default=5.0, gt=0, description="how often agents are asked to send one")
    log_recent: int = Field(
        default=200, ge=1, description="newest entries of a log that Redis keeps at least; older ones go to blobs"
    )
    log_recent_mb: float = Field(default=64, gt=0, description="megabytes of entries that Redis keeps per log at most")
    log_keep: int | None = Field(
        default=None,
        ge=1,
        description="newest entries of a log that are kept, and all since the last outer step; default: every entry",
    )
    tick_s: float = Field(default=1.0, gt=0, description="how often leases and unfinished work are looked at")
    redis_budget_mb: int = Field(
        default=2048, ge=1, description="while Redis holds more MiB than this, sites wait with their contributions"
    )

    @model_validator(mode="after")
    def _both_or_neither(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key go together: give both, or neither behind a proxy that does TLS")
        return self
