"""Settings of the agent: flags of `python -m site_agent` and `ISTHMUS_` variables. And what it hands to its ranks."""

from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from api.errors import IsthmusError, faults_of
from api.message import Name
from api.tls import CoordinatorUrl
from site_agent.tasks import Task, parse_task, parse_version, script_version

__all__ = ["Session", "Settings", "faults_of_settings", "load_session"]


class Settings(BaseSettings):
    """Runs the agent of one site. Each option may be set by an environment variable ISTHMUS_NAME, too."""

    model_config = SettingsConfigDict(
        env_prefix="ISTHMUS_",
        env_ignore_empty=True,
        frozen=True,
        cli_prog_name="isthmus agent",
        cli_kebab_case=True,
        cli_hide_none_type=True,
    )

    name: Name = Field(description="of the site; unique among the coordinator's sites")
    region: Name = Field(description="sites of one region share one log and exchange at every step")
    coordinator: CoordinatorUrl = Field(default="http://127.0.0.1:8420", description="URL of the coordinator")
    join_token: str | None = Field(default=None, description="what the coordinator's operator gave you")
    join_token_file: Path | None = Field(default=None, description="a file that holds the join token")
    ca_file: Path | None = Field(
        default=None, description="PEM file of a private authority that signed its certificate"
    )
    site_dir: Path | None = Field(default=None, description="the site's secret and logs; default: isthmus-site-NAME")
    ranks: int = Field(default=1, ge=1, le=4096, description="training processes per run, one per GPU")
    task: list[str] = Field(
        min_length=1, description="NAME=COMMAND: what this site is willing to run; may be given several times"
    )
    task_version: list[str] = Field(
        default=[],
        description="NAME=TEXT: the version of a task's code, to be compared between sites, such as a commit; default: "
        "a digest of its script file",
    )
    finish_s: float = Field(default=300.0, ge=0, description="for what a training script does after a run succeeded")
    grace_s: float = Field(default=10.0, ge=0, description="from SIGTERM to SIGKILL of training processes")

    @field_validator("task")
    @classmethod
    def _tasks_parse(cls, value: list[str]) -> list[str]:
        for text in value:
            parse_task(text)
        return value

    @model_validator(mode="after")
    def _versions_are_of_tasks(self) -> Self:
        for name in (parse_version(text)[0] for text in self.task_version):
            if name not in self.tasks:
                raise ValueError(f"task_version names {name!r}, which is no task: {', '.join(self.tasks)}")
        return self

    @property
    def tasks(self) -> dict[str, Task]:
        return {task.name: task for task in map(parse_task, self.task)}

    def versions(self) -> dict[str, str]:
        """Of tasks, by name, as they are now."""
        given = dict(map(parse_version, self.task_version))
        return {name: given.get(name) or script_version(task.command) for name, task in self.tasks.items()}

    @property
    def directory(self) -> Path:
        return (self.site_dir or Path(f"isthmus-site-{self.name}")).absolute()

    def read_join_token(self) -> str:
        if self.join_token is not None:
            return self.join_token
        if self.join_token_file is None:
            raise IsthmusError(
                "no join token: give --join-token-file (the coordinator keeps one in its DATA_DIR/join-token) or set "
                "ISTHMUS_JOIN_TOKEN"
            )
        try:
            return self.join_token_file.read_text().strip()
        except OSError as error:
            raise IsthmusError(f"cannot read the join token in {self.join_token_file}: {error.strerror}") from None


def faults_of_settings(error: ValidationError) -> list[str]:
    """One sentence per fault of what an operator has given, or has left out."""
    faults = error.errors()
    missing = [str(fault["loc"][0]) for fault in faults if fault["type"] == "missing"]
    return [
        *(f"--{name.replace('_', '-')} is missing: give it, or set ISTHMUS_{name.upper()}" for name in missing),
        *faults_of([fault for fault in faults if fault["type"] != "missing"]),
    ]


class Session(BaseModel):
    """What the ranks of one attempt are told, in a file that only the site's user can read."""

    model_config = ConfigDict(frozen=True)

    coordinator: str
    ca_file: Path | None = None
    secret: str
    run: str
    attempt: int
    site: str
    region: str
    folder: Path = Field(default=Path(), exclude=True, description="of this file: what the ranks write goes there, too")


class _RankSettings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="ISTHMUS_", frozen=True)

    session_file: Path | None = None


class RankPlace(BaseSettings):
    """Where torchrun put this process."""

    rank: int
    local_rank: int
    world_size: int
    master_addr: str
    master_port: int


def load_session() -> tuple[Session, RankPlace]:
    """The session of this process.

    Raises:
        IsthmusError: it was not started by an agent.
    """
    path = _RankSettings().session_file
    if path is None:
        raise IsthmusError(
            "join() works in a process that a site's agent has started: allow this script as a task "
            "(`isthmus agent --task NAME=COMMAND`) and start a run of it, or try `isthmus simulate`"
        )
    session = Session.model_validate_json(path.read_text()).model_copy(update={"folder": path.parent})
    return session, RankPlace()  # type: ignore[call-arg]  # from the environment
