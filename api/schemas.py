"""Every message of the REST API. Wire words equal the code's words.

Times are RFC 3339 UTC, durations in seconds, sizes in bytes. Tensors travel apart, as safetensors (payload.py).
"""

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    StringConstraints,
)

from api.message import Count, Digest, Message, Name, RunId, Secret, Step, TaskVersion
from api.specs import Change, InForce, RunSpec

# --- sites ------------------------------------------------------------------------------------------------------------


class SiteStatus(StrEnum):
    ONLINE = "online"
    LOST = "lost"
    LEFT = "left"


class SiteRegistration(Message):
    """The agent made `secret` and keeps it: registering again with the same secret changes nothing else (rule C9)."""

    protocol_version: int
    secret: Secret
    region: Name
    tasks: list[Name] = Field(min_length=1, max_length=256, description="what the site's operator allows")
    ranks: int = Field(default=1, ge=1, le=4096, description="training processes per run")
    versions: dict[Name, TaskVersion] = Field(default_factory=dict, max_length=256, description="of tasks")


class Site(Message):
    name: Name
    region: Name
    tasks: list[Name]
    ranks: int
    versions: dict[Name, TaskVersion] = Field(default_factory=dict, description="of tasks, as they are now")
    status: SiteStatus
    registered_at: datetime
    lease_until: datetime


class Registered(Message):
    site: Site
    lease_s: float
    heartbeat_s: float


class ProcessState(StrEnum):
    RUNNING = "running"
    EXITED = "exited"
    STOPPING = "stopping"
    """No longer wanted, and not yet gone."""


class ProcessReport(Message):
    """The ranks of one run at a site, as its agent sees them."""

    run: RunId
    attempt: int = Field(ge=1)
    state: ProcessState
    exit_code: int | None = None
    rank: int | None = Field(default=None, description="the first rank that failed, when known")
    detail: str = Field(default="", max_length=20_000, description="the last lines of its log")


class Heartbeat(Message):
    processes: list[ProcessReport] = Field(default_factory=list, max_length=64)
    versions: dict[Name, TaskVersion] | None = Field(
        default=None, max_length=256, description="of tasks; null: as they were"
    )


class Assignment(Message):
    run: RunId
    attempt: int
    region: Name
    task: Name


class HeartbeatReply(Message):
    """The complete set of runs that the site should be running."""

    assignments: list[Assignment]
    lease_s: float


class Seat(Message):
    """The agent presents the secret that the ranks of one attempt will use."""

    attempt: int = Field(ge=1)
    secret: Secret
    version: TaskVersion = Field(default="", description="of the task that these ranks will run")


# --- runs -------------------------------------------------------------------------------------------------------------


class RunStatus(StrEnum):
    PENDING = "pending"
    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def terminal(self) -> bool:
        return self in (RunStatus.SUCCEEDED, RunStatus.STOPPED, RunStatus.FAILED)


class Position(Message):
    """An entry of a log: its number and its hash."""

    seq: Count
    hash: Digest


class Condition(StrEnum):
    """Of a member of a run; nobody waits for one that is not active."""

    ACTIVE = "active"
    BENCHED = "benched"
    """It missed several rounds in a row, and is left out until a time."""
    JOINING = "joining"
    """Its ranks have not started, or are replaying the log."""
    AWAY = "away"
    """Its agent has left, or sends no heartbeats."""
    EXCLUDED = "excluded"
    """Its ranks failed too often, or an administrator removed it."""


class MemberView(Message):
    site: Name
    region: Name
    attempt: int
    ready: bool = Field(description="its ranks have presented their layout")
    condition: Condition
    since: datetime = Field(description="when it came into this condition")
    reason: str = Field(description="why it is not active, and what ends that")
    version: str = Field(default="", description="of the task that its ranks run")
    digest: Digest | None = Field(default=None, description="of the parameters after the last entry")


class RegionView(Message):
    name: Name
    step: Step = Field(description="last inner step whose entry is in the log")
    head: Position | None = None
    tokens: int = Field(ge=0, description="tokens trained on since the last anchor")
    came_later: bool = Field(
        default=False, description="to a run that was going on: its step is not in that of the run"
    )


class Run(Message):
    id: str
    spec: RunSpec
    status: RunStatus
    reason: str = Field(description="what the run waits for, or why it ended")
    paused_because: str = Field(default="", description="what has paused the run, if nobody asked for it")
    since: datetime
    created_at: datetime
    started_at: datetime | None = Field(default=None, description="when it was asked to start; null: not yet")
    lasted_s: float = Field(default=0.0, ge=0, description="since then, to its end or until now")
    step: Step = Field(description="the lowest of the regions that it began with")
    outer_rounds: int
    members: list[MemberView]
    regions: list[RegionView]
    alarms: list[str]
    changes: list[Change] = Field(default_factory=list, description="of settings, past and to come, by step")
    in_force: InForce | None = Field(default=None, description="of these settings, at the step to be done next")
    warnings: list[str] = Field(default_factory=list, description="what is as it was asked for, and may not be meant")


class JoinRequest(Message):
    """Rank 0 presents the layout of its model."""

    attempt: int = Field(ge=1)
    layout: dict[str, Any] = Field(description="as ParameterLayout.to_json writes it")
    buffer_bytes: int = Field(default=0, ge=0, description="of all persistent buffers of the model")


class Resume(Message):
    """Where the log may be entered: behind a complete outer round, or at a snapshot."""

    position: Position
    step: Step
    outer_round: Count
    outer_step: Step = Field(default=0, description="the inner step after which that took its copies")
    in_force: InForce
    anchors: list[Digest] = Field(description="blobs that are together all parameters: of the fragments, in order")
    buffers: Digest | None = Field(default=None, description="at this place, as safetensors; null: those of entry 0")


class JoinReply(Message):
    layout: Digest
    upload_start: bool = Field(description="this site is to upload entry 0 (rule A3); ask again while there is none")
    evaluate: bool = Field(description="this site runs the held-out evaluation (rule C10)")
    listed: Step = Field(description="last step whose entry lists this site; 0: none (rule A10)")
    resume: Resume | None = Field(default=None, description="load that and apply what follows; null: begin at entry 0")


class CaughtUp(Message):
    """The ranks of an attempt have applied every entry up to this one."""

    attempt: int = Field(ge=1)
    position: Position


class CaughtUpReply(Message):
    active: bool = Field(
        description="the site takes part from now on; else wait for entries after its position, apply them, ask again"
    )
    head: Position


class StartUpload(Message):
    """Digests of blobs that are already stored: fp32 parameters in layout order; buffers as safetensors."""

    parameters: Digest
    buffers: Digest | None = None


class LogPage(Message):
    items: list[dict[str, Any]] = Field(description="entry headers")
    head: Position | None
    ended: bool = Field(description="nothing will be appended any more")


class ContributionHeader(Message):
    """Travels with the arrays of each part of a contribution, the same in all but `part`."""

    version: int
    run: str
    region: Name
    site: Name
    step: Step
    position: Position
    layout: Digest
    codec: str
    indices: str
    k: int
    tokens: int = Field(ge=0, le=2**40, description="behind this contribution")
    part: int
    parts: int
    absent: list[str] = Field(description="tensors that had no gradient so far")


class Abstention(Message):
    position: Position
    reason: str = Field(min_length=1, max_length=500)


class Announcement(Message):
    """A site's copy of one fragment after the inner step that the outer round follows."""

    digest: Digest
    upload: Digest | None = Field(
        default=None, description="of the blob that the copy was encoded as, once it is stored; null with codec fp32"
    )
    tokens: Count = Field(
        default=0, description="trained on since the last copy; counts where no log tells, with exchange `none`"
    )


class AnnouncementReply(Message):
    upload: bool = Field(description="this site is asked for the blob; announce again once it is stored")
    evaluate: bool = Field(description="this site runs the held-out evaluation (rule C10)")


class FinalReport(Message):
    seq: Count
    digest: Digest = Field(description="of the live parameters")
    buffers: Digest | None = Field(default=None, description="of a site that was asked, once they are stored")


class FinalReply(Message):
    upload: bool = Field(description="this site is asked for the parameters; report again once they are stored")


class RunLayout(Message):
    digest: Digest
    layout: dict[str, Any] = Field(description="as ParameterLayout.to_json writes it")


class Model(Message):
    """The trained parameters: the blobs, concatenated, are the float32 tensors in layout order."""

    run: str
    step: Step
    digest: Digest
    layout: dict[str, Any]
    blobs: list[Digest]
    buffers: Digest | None = Field(default=None, description="as safetensors")


class OuterRound(Message):
    number: int
    step: Step
    fragments: list[Digest | None] = Field(
        description="the anchor of each fragment after it; null if there is none yet: a fragment was not due"
    )
    weights: dict[str, int] = Field(description="tokens by region")
    distinct: int = Field(description="distinct copies that were averaged, over all fragments")
    late: list[Name] = Field(default=[], description="sites that were there, but not in time (outer.deadline_s)")


# --- snapshots --------------------------------------------------------------------------------------------------------


class SnapshotUpload(Message):
    """What a site that was asked for a snapshot has stored: its parameters and buffers after an entry."""

    position: Position
    step: Step
    parameters: Digest
    buffers: Digest | None = None


class Snapshot(Message):
    number: int
    step: Step
    manifest: Digest = Field(description="a blob of JSON that names all others")
    positions: dict[Name, Position] = Field(
        description="the place in the logs that lead to these parameters, by region"
    )


class SnapshotPage(Message):
    items: list[Snapshot] = Field(description="oldest first")
    wanted: int | None = Field(default=None, description="the number of the one that is being made")


class Manifest(Message):
    """The blob of a snapshot, written last."""

    version: int
    run: str
    number: int
    step: Step
    layout: dict[str, Digest] = Field(description="`digest` of the layout, `blob` that holds it as JSON")
    positions: dict[Name, Position]
    parameters: list[Digest] = Field(description="blobs: concatenated, the float32 tensors in layout order")
    buffers: Digest | None
    outer: "OuterManifest | None"
    spec: RunSpec


class OuterManifest(Message):
    rounds: int
    anchors: list[Digest]
    momenta: list[Digest | None]


# --- metrics ----------------------------------------------------------------------------------------------------------


class MetricPoint(Message):
    """Totals are since the session began. A value that is not finite is stored as null."""

    step: Step
    values: dict[Annotated[str, StringConstraints(max_length=64)], float | None] = Field(max_length=64)


SessionId = Annotated[
    str, Field(max_length=32, pattern="^[0-9a-f]*$", description="of ranks, from their start to their end; any name")
]


class MetricReport(Message):
    site: Name
    session: SessionId = ""
    points: list[MetricPoint] = Field(max_length=1000)


class StoredPoint(Message):
    site: Name
    session: SessionId = ""
    step: Step
    at: datetime
    values: dict[str, float | None]


class MetricPage(Message):
    items: list[StoredPoint]


class SitePage(Message):
    items: list[Site]
    next_cursor: str | None = None


class RunPage(Message):
    items: list[Run]
    next_cursor: str | None = None


class OuterRoundPage(Message):
    items: list[OuterRound]
    next_cursor: str | None = None


class Version(Message):
    version: str
    protocols: list[int]


class Health(Message):
    status: Literal["ok", "unavailable"]
    detail: dict[str, str] = Field(default_factory=dict)
