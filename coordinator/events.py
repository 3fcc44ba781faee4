"""What can happen to a run. Whatever ranks do carries the number of their attempt."""

from dataclasses import dataclass

from api.schemas import Position, SnapshotUpload
from api.specs import Change
from coordinator.records import Layout, Sent, Start

# --- what people ask for ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StartRequested:
    sites: dict[str, str]
    """Region by site."""


@dataclass(frozen=True)
class StopRequested:
    pass


@dataclass(frozen=True)
class PauseRequested:
    pass


@dataclass(frozen=True)
class ResumeRequested:
    pass


@dataclass(frozen=True)
class ChangeRequested:
    change: Change


@dataclass(frozen=True)
class SiteAdded:
    site: str
    region: str


@dataclass(frozen=True)
class SiteRemoved:
    site: str
    because: str


@dataclass(frozen=True)
class SnapshotRequested:
    pass


# --- what agents do ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SeatTaken:
    """The site's agent is about to start ranks, which will be known by this hash."""

    site: str
    attempt: int
    seat: str
    version: str = ""
    """Of the task that they will run."""


@dataclass(frozen=True)
class ProcessesGone:
    """The site's agent runs no process of this attempt any more; `exit_code` is None if it never saw one end."""

    site: str
    attempt: int
    exit_code: int | None = None
    rank: int | None = None
    detail: str = ""


@dataclass(frozen=True)
class SiteLost:
    """The site's lease is over, or its agent has left."""

    site: str
    because: str


@dataclass(frozen=True)
class SiteBack:
    """The site's agent was heard again, or was started again within its lease. `ranks`: it still has those of this
    attempt, or says how they ended.
    """

    site: str
    ranks: bool = True


# --- what ranks do ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayoutPresented:
    site: str
    attempt: int
    layout: Layout


@dataclass(frozen=True)
class StartUploaded:
    site: str
    attempt: int
    start: Start


@dataclass(frozen=True)
class CaughtUp:
    """The ranks hold the parameters after this entry."""

    site: str
    attempt: int
    position: Position


@dataclass(frozen=True)
class PartSent:
    """One part of a contribution, of which only the whole is an event."""

    site: str
    attempt: int
    region: str
    step: int
    position: Position
    part: int
    digest: str


@dataclass(frozen=True)
class Contributed:
    site: str
    attempt: int
    region: str
    step: int
    position: Position
    sent: Sent


@dataclass(frozen=True)
class Abstained:
    site: str
    attempt: int
    region: str
    step: int
    position: Position
    reason: str


@dataclass(frozen=True)
class Refused:
    """A contribution was read and is no good."""

    site: str
    attempt: int
    region: str
    step: int
    position: Position
    reason: str


@dataclass(frozen=True)
class AnsweredLate:
    """The site has answered a round that was closed without it."""

    site: str
    attempt: int
    step: int


@dataclass(frozen=True)
class Arrived:
    """A site whose region has no rounds has trained up to an outer round, on so many tokens since the last copies."""

    site: str
    attempt: int
    number: int
    tokens: int


@dataclass(frozen=True)
class Announced:
    site: str
    attempt: int
    number: int
    fragment: int
    digest: str
    stored: bool
    upload: str | None = None
    """The blob that the copy was encoded as, if it is not stored itself."""


@dataclass(frozen=True)
class FinalReported:
    site: str
    attempt: int
    seq: int
    digest: str
    stored: bool
    buffers: str | None = None


@dataclass(frozen=True)
class SnapshotTaken:
    """The ranks of one attempt have stored the contents of the snapshot that they were asked for."""

    site: str
    attempt: int
    number: int
    upload: SnapshotUpload


# --- what the coordinator itself does ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Norm:
    """The L2 norm of a contribution, and how often it was halved as an outlier (C6)."""

    value: float
    halvings: int = 0


@dataclass(frozen=True)
class Aggregated:
    """A frozen round was aggregated: digests of the update's arrays, and the norms of its contributions by site."""

    region: str
    step: int
    parts: tuple[str, ...]
    norms: dict[str, Norm]


@dataclass(frozen=True)
class Averaged:
    """The outer step of one fragment was computed: blobs of its new anchor and of its outer momentum.

    `copies`: by region, the digests of which its copy was made. Those uploaded as `rejected` were left out: not finite.
    """

    number: int
    fragment: int
    copies: dict[str, tuple[str, ...]]
    anchor: str
    momentum: str | None
    rejected: frozenset[str] = frozenset()


@dataclass(frozen=True)
class SnapshotAsked:
    """The ranks of this attempt are about to be asked for the contents of the snapshot that is wanted."""

    site: str
    attempt: int


@dataclass(frozen=True)
class StartMade:
    """Entry 0 was made of what the run begins with."""

    start: Start


@dataclass(frozen=True)
class SnapshotRegistered:
    """The manifest is stored."""

    number: int
    manifest: str


@dataclass(frozen=True)
class WorkFailed:
    """Aggregating or averaging failed; `final` if trying again is no use."""

    because: str
    final: bool = False


@dataclass(frozen=True)
class GuardTripped:
    """A site has reported something, at this step, at which a person should look before the run goes on (A21)."""

    step: int
    because: str


@dataclass(frozen=True)
class StorageFull:
    """What the run has to store finds no room."""

    because: str


@dataclass(frozen=True)
class HeldBack:
    """A site is to send its contribution again later, when the storage has drained."""

    because: str


@dataclass(frozen=True)
class Ticked:
    """Time has passed. Of that, nobody was there to serve anybody for `outage_s`: deadlines shift by it (A6)."""

    outage_s: float = 0.0


Answer = Contributed | Abstained | Refused
Event = (
    StartRequested
    | StopRequested
    | PauseRequested
    | ResumeRequested
    | ChangeRequested
    | SnapshotRequested
    | SiteAdded
    | SiteRemoved
    | SeatTaken
    | ProcessesGone
    | SiteLost
    | SiteBack
    | LayoutPresented
    | StartUploaded
    | CaughtUp
    | Answer
    | AnsweredLate
    | Arrived
    | Announced
    | FinalReported
    | SnapshotTaken
    | SnapshotAsked
    | SnapshotRegistered
    | StartMade
    | Aggregated
    | Averaged
    | WorkFailed
    | GuardTripped
    | StorageFull
    | HeldBack
    | Ticked
)
