"""What a run's state is made of: plain frozen records, stored as one JSON value. And what can happen to it: events."""

from dataclasses import dataclass
from datetime import datetime

from pydantic import BaseModel, ConfigDict, Field

from api.schemas import Position, RunSpec, RunStatus


class Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Sent(Record):
    """A contribution that is in the store: the digest of its bytes, and the tokens behind it."""

    digest: str
    tokens: int


class Round(Record):
    """The exchange for one inner step of one region; `frozen` once its contributors can no longer change (A4)."""

    step: int
    contributions: dict[str, Sent] = Field(default_factory=dict)
    abstentions: dict[str, str] = Field(default_factory=dict)
    frozen: bool = False

    @property
    def answered(self) -> set[str]:
        return {*self.contributions, *self.abstentions}


class Region(Record):
    """Sites that share one log. `tokens`: trained on since the last anchor (A12)."""

    name: str
    step: int = 0
    head: Position | None = None
    tokens: int = 0
    round: Round | None = None


class Member(Record):
    """A site in a run. `seat` is the hash of what its ranks were given to be known by."""

    site: str
    region: str
    attempt: int = 1
    seat: str | None = None
    ready: bool = False
    gone: bool = False
    final: str | None = None


class FragmentRound(Record):
    """The copies of one fragment, by site, in order of announcement; `stored` names those that are blobs."""

    copies: dict[str, str] = Field(default_factory=dict)
    stored: frozenset[str] = frozenset()
    anchor: str | None = None
    distinct: int = 0


class OuterRound(Record):
    """An outer step in progress; `weights` (tokens by region) are fixed at its opening (A12)."""

    number: int
    step: int
    weights: dict[str, int]
    fragments: tuple[FragmentRound, ...]


class Start(Record):
    """Entry 0: the digests of its blobs."""

    parameters: str
    buffers: str | None = None


class Layout(Record):
    """Digest of the layout; the blob that holds it as JSON; names of its parameter groups."""

    digest: str
    blob: str
    groups: tuple[str, ...]


class RunState(Record):
    id: str
    spec: RunSpec
    created_at: datetime
    since: datetime
    status: RunStatus = RunStatus.PENDING
    ended_because: str = ""
    members: dict[str, Member] = Field(default_factory=dict)
    regions: dict[str, Region] = Field(default_factory=dict)
    layout: Layout | None = None
    start: Start | None = None
    outer: OuterRound | None = None
    outer_rounds: int = 0
    anchors: tuple[str | None, ...] = ()
    momenta: tuple[str | None, ...] = ()
    final_stored: bool = False
    alarms: tuple[str, ...] = ()

    @property
    def donor(self) -> str:
        """The lowest-named member: it uploads entry 0 (A3) and evaluates (C10)."""
        return min(self.members)

    def region_members(self, region: str) -> list[str]:
        return sorted(member.site for member in self.members.values() if member.region == region)

    @property
    def step(self) -> int:
        return min((region.step for region in self.regions.values()), default=0)


# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StartRequested:
    sites: dict[str, str]
    """Region by site."""


@dataclass(frozen=True)
class StopRequested:
    pass


@dataclass(frozen=True)
class SeatTaken:
    """The site's agent is about to start ranks, which will be known by this hash."""

    site: str
    attempt: int
    seat: str


@dataclass(frozen=True)
class LayoutPresented:
    site: str
    attempt: int
    layout: Layout


@dataclass(frozen=True)
class StartUploaded:
    site: str
    start: Start


@dataclass(frozen=True)
class Contributed:
    site: str
    region: str
    step: int
    position: Position
    sent: Sent


@dataclass(frozen=True)
class Abstained:
    site: str
    region: str
    step: int
    position: Position
    reason: str


@dataclass(frozen=True)
class Aggregated:
    """A frozen round was aggregated: digests of the update's arrays, and the halvings of outliers by site."""

    region: str
    step: int
    parts: tuple[str, ...]
    halvings: dict[str, int]


@dataclass(frozen=True)
class Announced:
    site: str
    number: int
    fragment: int
    digest: str
    stored: bool


@dataclass(frozen=True)
class Averaged:
    """The outer step of one fragment was computed: blobs of its new anchor and of its outer momentum."""

    number: int
    fragment: int
    anchor: str
    momentum: str | None


@dataclass(frozen=True)
class FinalReported:
    site: str
    seq: int
    digest: str
    stored: bool


@dataclass(frozen=True)
class ProcessesGone:
    """The site's agent no longer runs any process of this run; `exit_code` is None if it never saw one end."""

    site: str
    exit_code: int | None = None
    rank: int | None = None
    detail: str = ""


@dataclass(frozen=True)
class WorkFailed:
    """Aggregating or averaging failed; `final` if trying again is no use."""

    because: str
    final: bool = False


@dataclass(frozen=True)
class SiteLost:
    site: str
    because: str


Event = (
    StartRequested
    | StopRequested
    | SeatTaken
    | LayoutPresented
    | StartUploaded
    | Contributed
    | Abstained
    | Aggregated
    | Announced
    | Averaged
    | FinalReported
    | ProcessesGone
    | SiteLost
    | WorkFailed
)
