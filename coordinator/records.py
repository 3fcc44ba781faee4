"""What a run's state is made of: plain frozen records, stored as one JSON value."""

from datetime import datetime

from pydantic import BaseModel, ConfigDict, Field

from algorithms.settings import STATEFUL_BASE_UPDATES
from api.schemas import Condition, Position, Resume, RunStatus
from api.specs import Change, RunSpec

__all__ = [
    "Arrival",
    "Contents",
    "FragmentRound",
    "Layout",
    "Member",
    "Missed",
    "Origin",
    "OuterRound",
    "Record",
    "Region",
    "Round",
    "RunState",
    "Sent",
    "Share",
    "Snapshot",
    "Start",
    "Wanted",
]


class Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Sent(Record):
    """A contribution that is in the store: its digest and those of its parts, the tokens behind it, its L2 norm."""

    digest: str
    parts: tuple[str, ...]
    tokens: int
    norm: float


class Round(Record):
    """The exchange for one inner step of one region; `frozen` once its contributors can no longer change (A4).

    `refusals`: why the contribution of a site was refused; it has answered, unless it sends a better one.
    """

    step: int
    contributions: dict[str, Sent] = Field(default_factory=dict)
    abstentions: dict[str, str] = Field(default_factory=dict)
    refusals: dict[str, str] = Field(default_factory=dict)
    first_answer: datetime | None = None
    frozen: bool = False

    @property
    def answered(self) -> set[str]:
        return {*self.contributions, *self.abstentions, *self.refusals}


class Region(Record):
    """Sites that share one log.

    Attributes:
        tokens: trained on since the last copy (A12); `ahead`: those of them that belong to the copy after the next one.
        resume: where the log may be entered instead of at entry 0.
        changes: how many of the run's changes the log has.
        unchanged: the newest entry that is no change; a site that has applied no later one does not know the settings.
        apart: it was not in the mean of the last outer round and kept what it has: its parameters are not the anchors.
        came_later: it is none of those that the run began with, and no end of it if all its sites are excluded.
    """

    name: str
    step: int = 0
    head: Position | None = None
    tokens: int = 0
    ahead: int = 0
    round: Round | None = None
    resume: Resume | None = None
    changes: int = 0
    unchanged: int = 0
    apart: bool = False
    came_later: bool = False


class Missed(Record):
    """A round that was closed without a site which is still to answer it, or has answered it too late."""

    step: int
    first_answer: datetime


class Arrival(Record):
    """A site whose region has no rounds has trained up to the step of an outer round, on so many tokens."""

    number: int
    tokens: int


class Member(Record):
    """A site in a run, with one attempt of its ranks at a time.

    Attributes:
        since: when it came into its present condition.
        version: of the task that its ranks run, as its agent says; None without ranks.
        seat: hash of what its ranks are known by; None before they start.
        ready: they have presented their layout.
        caught_up: they hold the head of the region's log, or have since they did.
        gone: they have ended after all that was asked of them; or, in a run that stops, ended at all.
        final: the digest that they ended with.
        failures: of ranks, since they last came to something: a contribution that was accepted, or, without rounds, an
            outer round; `failure` is the last one.
        alike: failures in a row with the same error, whatever the ranks came to in between; 0 after an accident.
        restart_at: the earliest time of the next ranks, if they are delayed.
        delays: seconds from the first answer of a round to its own, the last few, late ones among them.
        missed: rounds in a row that closed without its answer.
        late: the first of those that its ranks may still be busy with.
        listed: the last step whose entry lists its contribution, 0 for none (rule A10).
        arrived: where it is, if its region has no rounds.
        benched_until: the earliest time of its release.
        away, excluded: the reasons, while this holds.
    """

    site: str
    region: str
    since: datetime
    attempt: int = 1
    seat: str | None = None
    version: str | None = None
    ready: bool = False
    caught_up: bool = False
    gone: bool = False
    final: str | None = None
    failures: int = 0
    failure: str = ""
    alike: int = 0
    restart_at: datetime | None = None
    delays: tuple[float, ...] = ()
    missed: int = 0
    listed: int = 0
    arrived: Arrival | None = None
    late: Missed | None = None
    benched_until: datetime | None = None
    away: str = ""
    excluded: str = ""

    @property
    def condition(self) -> Condition:
        if self.excluded:
            return Condition.EXCLUDED
        if self.away:
            return Condition.AWAY
        if not self.caught_up:
            return Condition.JOINING
        if self.benched_until is not None:
            return Condition.BENCHED
        return Condition.ACTIVE

    @property
    def live(self) -> bool:
        """Whether it is waited for."""
        return self.condition is Condition.ACTIVE

    @property
    def released_at(self) -> datetime | None:
        """When it will be benched no more; None if it is not, or is still busy with a round that is closed."""
        return self.benched_until if self.late is None else None

    @property
    def present(self) -> bool:
        """Whether its agent is there and wanted, whatever its ranks do."""
        return not self.excluded and not self.away


class Share(Record):
    """A region's part in a mean: its copies, the blobs that were uploaded of them, and its weight in tokens."""

    region: str
    copies: tuple[str, ...]
    uploads: tuple[str, ...]
    weight: int


class FragmentRound(Record):
    """The copies of one fragment, by site, in order of announcement.

    Attributes:
        stored: those that are blobs.
        encoded: the blobs that others were encoded as, by region and copy.
        anchor, shares: what came of them.
        before, kept: the anchor before; and the regions that were not in the mean, and move with it (A12).
        logged: the regions in whose logs the anchor is.
        buffers: it is not one of the parameters, but all buffers of the model.
    """

    copies: dict[str, str] = Field(default_factory=dict)
    stored: frozenset[str] = frozenset()
    encoded: dict[str, dict[str, str]] = Field(default_factory=dict)
    anchor: str | None = None
    shares: tuple[Share, ...] = ()
    before: str | None = None
    kept: frozenset[str] = frozenset()
    logged: frozenset[str] = frozenset()
    buffers: bool = False

    def upload(self, region: str, copy: str) -> str | None:
        """The blob of a region's copy, if it is there."""
        return copy if copy in self.stored else self.encoded.get(region, {}).get(copy)

    @property
    def averaged(self) -> set[str]:
        """The regions that were in the mean."""
        return {share.region for share in self.shares}

    @property
    def distinct(self) -> int:
        """How many copies the anchor was made of."""
        return len({copy for share in self.shares for copy in share.copies})


class OuterRound(Record):
    """An outer step in progress, of the fragments that are due, by number.

    `step` is the inner step after which the copies were taken, `ends` the one after which the anchors are applied;
    `every` is H at `step`.
    `weights`, tokens by region, are those of `step` (A12), of regions that had a live member at the opening. Only
    `participants` are averaged: who was live then, and has kept its ranks since. `following`: regions that were away
    and take the anchors as they are. `late`: sites that were waited for until the deadline, which counts from the first
    announcement, `announced_at`.
    """

    number: int
    step: int
    ends: int
    every: int
    weights: dict[str, int]
    participants: frozenset[str]
    following: frozenset[str] = frozenset()
    late: frozenset[str] = frozenset()
    announced_at: datetime | None = None
    fragments: dict[int, FragmentRound]

    def held_in(self, region: str) -> bool:
        """Whether the region's log has all anchors."""
        return all(region in fragment.logged for fragment in self.fragments.values())


class Start(Record):
    """Entry 0: the digests of its blobs."""

    parameters: str
    buffers: str | None = None


class Layout(Record):
    """Digest of the layout; the blob that holds it as JSON; names of its parameter groups."""

    digest: str
    blob: str
    groups: tuple[str, ...]


class Contents(Record):
    """All that the sites of a run share (A14), at one place of every log: digests of blobs.

    `parameters`: in layout order. `rounds`, `momenta`: of a run with outer steps, whose anchors the parameters are.
    """

    step: int
    positions: dict[str, Position]
    parameters: tuple[str, ...]
    buffers: str | None
    rounds: int | None = None
    momenta: tuple[str | None, ...] = ()


class Wanted(Record):
    """A snapshot that is to be made; of its `contents` only the manifest is missing.

    `site`, `seat`: whose ranks were asked for the contents.
    """

    number: int
    site: str = ""
    seat: str | None = None
    contents: Contents | None = None


class Snapshot(Record):
    """A snapshot whose manifest is stored."""

    number: int
    manifest: str
    contents: Contents


class Origin(Record):
    """What entry 0 is to be made of: blobs of a snapshot, whose layout is in a blob, too; or a safetensors file."""

    file: str | None = None
    layout: str | None = None
    parameters: tuple[str, ...] = ()
    buffers: str | None = None
    momenta: tuple[str | None, ...] = ()


class RunState(Record):
    """Everything about a run.

    Attributes:
        outer_step: the step that the last outer round that is complete followed.
        met_at: when the first region came to the next one, if that has not opened and the spec has a deadline for it.
        changes: of settings, by the step from which on they hold.
        paused_because: why the run was paused, if nobody has asked for that.
        storage_full: pending work is left alone until the run is resumed.
        held_back: why contributions wait, until one is taken in.
        unguarded_to: a loss up to this step pauses the run no more.
        buffers: after the last outer round; without outer steps, of the trained model.
        origin: what the run begins with, until it has begun; None: what the lowest-named site uploads.
        snapshots: oldest first; the number of the last one that was wanted, and the step at which the last one was due.
    """

    id: str
    spec: RunSpec
    created_at: datetime
    started_at: datetime | None = None
    since: datetime
    status: RunStatus = RunStatus.PENDING
    ended_because: str = ""
    members: dict[str, Member] = Field(default_factory=dict)
    regions: dict[str, Region] = Field(default_factory=dict)
    layout: Layout | None = None
    start: Start | None = None
    outer: OuterRound | None = None
    outer_rounds: int = 0
    outer_step: int = 0
    met_at: datetime | None = None
    anchors: tuple[str | None, ...] = ()
    momenta: tuple[str | None, ...] = ()
    final_stored: bool = False
    alarms: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    paused_because: str = ""
    storage_full: bool = False
    held_back: str = ""
    unguarded_to: int = 0
    buffers: str | None = None
    origin: Origin | None = None
    snapshots: tuple[Snapshot, ...] = ()
    wanted: Wanted | None = None
    last_snapshot: int = 0
    last_snapshot_step: int = 0

    @property
    def going_on(self) -> bool:
        """Entry 0 is in the logs, and the run has not been told to stop."""
        return self.status in (RunStatus.RUNNING, RunStatus.PAUSED)

    @property
    def has_rounds(self) -> bool:
        """Whether regions exchange at every step; else each is one site, which trains up to the next outer round."""
        return self.spec.exchange != "none"

    def open_to(self, region: str) -> bool:
        """Whether sites of a region may come in as no participants of an outer round: while its rounds go on beside."""
        outer = self.outer
        return outer is None or (self.has_rounds and outer.step < outer.ends and region in outer.weights)

    @property
    def needed_regions(self) -> list[str]:
        """Those that must have their sites before the run begins: without rounds it does without excluded ones."""
        left = {member.region for member in self.members.values() if not member.excluded}
        return [name for name in self.regions if self.has_rounds or name in left]

    def entrance(self, region: str) -> Resume | None:
        """Where the region's log may be entered; None: at entry 0 only, as with base updates that keep state."""
        stateful = self.has_rounds and self.spec.optimizer.base_update in STATEFUL_BASE_UPDATES
        return None if stateful else self.regions[region].resume

    @property
    def step(self) -> int:
        """Up to which every region is done."""
        return min((region.step for region in self.regions.values()), default=0)

    @property
    def steps_done(self) -> int:
        """What is told of a run: by the regions that it began with, so that it does not fall when another one comes."""
        return min((region.step for region in self.regions.values() if not region.came_later), default=0)

    def live(self, region: str | None = None) -> list[str]:
        """Active members, of one region or of all."""
        return sorted(
            member.site for member in self.members.values() if member.live and region in (None, member.region)
        )

    def present(self, region: str | None = None) -> list[str]:
        return sorted(
            member.site for member in self.members.values() if member.present and region in (None, member.region)
        )

    @property
    def first_site(self) -> str | None:
        """The lowest-named of those that are there: it uploads entry 0 (A3), or evaluates (C10)."""
        return min(self.live() if self.going_on else self.present(), default=None)

    @property
    def model_site(self) -> str | None:
        """Who gives the trained parameters, if they are not the anchors: the lowest-named live site with ranks."""
        return min((site for site in self.live() if not self.members[site].gone), default=None)

    @property
    def assigned(self) -> dict[str, int]:
        """Which attempt each site should be running."""
        if self.status is not RunStatus.STARTING and not self.going_on:
            return {}
        wanted = (member for member in self.members.values() if not member.excluded and not member.gone)
        return {member.site: member.attempt for member in wanted if member.restart_at is None}
