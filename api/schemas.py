"""Every message of the REST API. Wire words equal the code's words.

Times are RFC 3339 UTC, durations in seconds, sizes in bytes. Tensors travel apart, as safetensors (payload.py).
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from datetime import datetime
from difflib import get_close_matches
from enum import StrEnum
from typing import Annotated, Any, Literal, Self, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    StringConstraints,
    model_serializer,
    model_validator,
)

from algorithms.compression import OuterCodec
from algorithms.outer import OuterOptimizer
from algorithms.parts import PART_BYTES
from algorithms.schedule import OuterSchedule
from algorithms.settings import (
    INEXACT_BASE_UPDATES,
    PRESETS,
    Average,
    BaseUpdateName,
    Outliers,
    Settings,
    SettingsDict,
    Subtract,
)
from algorithms.transforms import Transform
from algorithms.updates import Codec, Indices

PROTOCOL_VERSION = 1
SUPPORTED_PROTOCOLS = range(1, 2)

_NAME = re.compile(r"[a-z0-9]([a-z0-9_-]{0,61}[a-z0-9])?")


def _checked_name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ValueError(f"{value[:80]!r} is no name: use lower-case letters, digits, - and _ inside, at most 63")
    return value


Name = Annotated[str, AfterValidator(_checked_name), Field(json_schema_extra={"pattern": f"^{_NAME.pattern}$"})]
"""Of a site, region, run or task: lower case letters, digits, `-` and `_`, at most 63."""
RunId = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_-]{0,79}$")]
"""The run's name and a random end; also a folder's name at sites."""
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
"""SHA-256, in lower-case hexadecimal."""
TaskVersion = Annotated[str, StringConstraints(max_length=100)]
"""What a site says of the code of a task; nothing if it does not know."""
Secret = Annotated[str, StringConstraints(min_length=32, max_length=256)]
_MAX_DEPTH = 32
_DEFAULTS = Settings()
Step = Annotated[int, Field(ge=0, le=2**48)]
Count = Annotated[int, Field(ge=0, le=2**62)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


# --- run specification ------------------------------------------------------------------------------------------------


class Specification(Message):
    """What people write: a field that is nearly one of ours is answered with ours."""

    @model_validator(mode="before")
    @classmethod
    def _are_fields(cls, given: Any) -> Any:
        for name in sorted(map(str, given.keys() - cls.model_fields.keys()))[:100] if isinstance(given, dict) else ():
            if close := get_close_matches(name[:80], cls.model_fields, n=1, cutoff=0.75):
                raise ValueError(f"there is no {name!r}: did you mean {close[0]!r}?")
        return given


Kind = Literal["demo", "adamw", "muon", "sgd", "custom"]
Exchange = Literal["demo", "none"]

_SETTINGS = frozenset(field.name for field in fields(Settings))
_INNER: dict[str, frozenset[str]] = {
    "demo": frozenset({"preset"}) | _SETTINGS,
    "adamw": frozenset({"betas", "eps"}),
    "muon": frozenset({"momentum", "nesterov", "betas", "eps"}),
    "sgd": frozenset({"momentum", "nesterov"}),
    "custom": frozenset(),
}
"""The settings that not every kind of optimizer has, by kind."""
_OUTER: dict[str, frozenset[str]] = {
    "nesterov": frozenset({"lr", "momentum"}),
    "sgd": frozenset({"lr", "momentum"}),
    "average": frozenset(),
}
_CODED: dict[str, frozenset[str]] = {
    "fp32": frozenset(),
    "bf16": frozenset(),
    "int8": frozenset(),
    "topk": frozenset({"k"}),
}


def _foreign(owned: dict[str, frozenset[str]], chosen: Any) -> frozenset[str]:
    """The settings that only others than the chosen one have."""
    return frozenset().union(*owned.values()) - owned[chosen] if chosen in owned else frozenset()


def _refuse_foreign(given: Any, what: str, owned: dict[str, frozenset[str]], default: str) -> None:
    if not isinstance(given, dict) or not isinstance(chosen := given.get(what, default), str):
        return
    if wrong := sorted(_foreign(owned, chosen) & given.keys()):
        raise ValueError(f"{what} = {chosen} has no setting {', '.join(wrong)}: leave it out")


class OptimizerSpec(Specification):
    """What moves the parameters at every inner step; `algorithms.Settings` says more of each setting of DeMo.

    Settings that a kind does not have are refused, and are not written either.
    """

    kind: Kind = Field(
        default="demo", description="others than demo train without rounds: `exchange` must be `none` then"
    )
    preset: Literal["paper", "reference", "default"] | None = Field(
        default=None, description="settings to begin with, under those that are given themselves"
    )
    lr: float = Field(default=1e-3, gt=0, le=10, description="peak learning rate of the sign update")
    schedule: Literal["constant", "cosine", "linear"] = Field(default="cosine", description="after the warm-up")
    warmup: int = Field(default=0, ge=0, description="steps of linear warm-up")
    weight_decay: float = Field(
        default=0.0, ge=0, lt=1, description="decoupled; applies to every parameter group but `no_decay`"
    )
    transform: Transform = Field(default=_DEFAULTS.transform, description="basis in which coefficients are picked")
    chunk: Literal[32, 64, 128] = Field(default=64, description="side of a chunk")
    k: int = Field(
        default=_DEFAULTS.k, ge=1, le=16384, description="coefficients sent per chunk of chunk x chunk elements"
    )
    codec: Codec = Field(default=_DEFAULTS.codec, description="how a sent value is coded")
    indices: Indices = Field(default=_DEFAULTS.indices, description="how a sent position is coded")
    beta: float = Field(default=_DEFAULTS.beta, ge=0, lt=1, description="decay of the momentum")
    alpha: float = Field(default=_DEFAULTS.alpha, ge=0, le=1, description="share that leaves the momentum")
    subtract: Subtract = Field(
        default=_DEFAULTS.subtract, description="what leaves the momentum: the site's own values, or the update"
    )
    average: Average = Field(default=_DEFAULTS.average, description="how several sites' values become one")
    largest: int | None = Field(
        default=_DEFAULTS.largest, ge=1, description="coefficients kept of each chunk of the update; null: all"
    )
    outliers: Outliers = Field(
        default=_DEFAULTS.outliers, description="whether a contribution far larger than the others is scaled down"
    )
    base_update: BaseUpdateName = Field(
        default=_DEFAULTS.base_update, description="how the decoded update moves the parameters"
    )
    beta2: float = Field(default=_DEFAULTS.beta2, ge=0, lt=1, description="decay of adam's second moment")
    betas: tuple[Decay, Decay] = Field(
        default=(0.9, 0.999), description="adamw, and muon where that uses AdamW: decays of both moments"
    )
    eps: float = Field(default=1e-8, gt=0, le=1, description="adamw, and muon where that uses AdamW")
    momentum: float = Field(default=0.95, ge=0, lt=1, description="muon and sgd")
    nesterov: bool = Field(default=True, description="muon and sgd: whether the momentum looks ahead")

    @model_validator(mode="before")
    @classmethod
    def _are_of_this_kind(cls, given: Any) -> Any:
        _refuse_foreign(given, "kind", _INNER, "demo")
        return given

    @model_serializer(mode="wrap")
    def _without_foreign(self, handler: SerializerFunctionWrapHandler):  # type: ignore[no-untyped-def]  # noqa: ANN202
        return {name: value for name, value in handler(self).items() if name not in _foreign(_INNER, self.kind)}

    @model_validator(mode="before")
    @classmethod
    def _with_preset(cls, given: Any) -> Any:
        name = given.get("preset") if isinstance(given, dict) else None
        return {**PRESETS[name], **given} if isinstance(name, str) and name in PRESETS else given

    @model_validator(mode="after")
    def _are_settings(self) -> Self:
        Settings(**self.settings())
        return self

    def settings(self) -> SettingsDict:
        """What `DeMo` takes."""
        return cast(SettingsDict, {name: getattr(self, name) for name in _SETTINGS})


class OuterSpec(Specification):
    """A DiLoCo outer step over full parameters, every H steps and after the last one."""

    every: int = Field(ge=1, description="H, in inner steps")
    optimizer: OuterOptimizer = Field(
        default="nesterov", description="sgd: momentum without look-ahead; average: the mean is the anchor"
    )
    lr: float = Field(default=0.7, ge=0, le=10, description="1 with momentum 0 is plain averaging")
    momentum: float = Field(default=0.5, ge=0, lt=1, description="0.9 for long runs")
    state: Literal["keep", "reset"] | None = Field(
        default=None,
        description="what becomes of momentum and inner optimizer state at an outer step; default: reset with "
        "optimizer.kind demo and without stagger, else keep",
    )
    fragments: int = Field(default=1, ge=1, le=4096, description="parts of the parameters that move one by one")
    stagger: bool = Field(
        default=False, description="fragments outer-step at different steps; after the last one, all of them"
    )
    delay: int = Field(
        default=0,
        ge=0,
        description="inner steps from the copy to its anchor, while training goes on: fewer than to the next copy, "
        "which is H steps, or H / fragments with stagger",
    )
    mix: float = Field(
        default=1.0, ge=0, le=1, description="with delay: the share of these steps that is kept on top of the anchor"
    )
    codec: OuterCodec = Field(
        default="fp32",
        description="how a copy is uploaded: fp32: as it is; others: how far it is from the anchor, as bf16, int8, or "
        "the `k` largest DCT coefficients of every chunk (topk); what that leaves out is added the next time",
    )
    k: int = Field(
        default=256, ge=1, le=16384, description="with codec topk: coefficients per chunk of chunk x chunk elements"
    )

    @model_validator(mode="before")
    @classmethod
    def _are_of_this_optimizer(cls, given: Any) -> Any:
        _refuse_foreign(given, "optimizer", _OUTER, "nesterov")
        _refuse_foreign(given, "codec", _CODED, "fp32")
        return given

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        self.schedule(steps=1)
        if self.mix != 1 and self.delay == 0:
            raise ValueError(f"mix = {self.mix:g} without delay: no steps are taken before the anchor; leave it out")
        if self.stagger and self.state == "reset":
            raise ValueError(
                "state = reset with stagger: fragments outer-step at different steps, and momentum is one; leave it out"
            )
        return self

    @model_serializer(mode="wrap")
    def _without_foreign(self, handler: SerializerFunctionWrapHandler):  # type: ignore[no-untyped-def]  # noqa: ANN202
        foreign = _foreign(_OUTER, self.optimizer) | _foreign(_CODED, self.codec)
        return {name: value for name, value in handler(self).items() if name not in foreign}

    @property
    def together(self) -> bool:
        """Whether all fragments outer-step at the same places, at which the anchors are all parameters."""
        return self.delay == 0 and (not self.stagger or self.fragments == 1)

    def schedule(self, steps: int) -> OuterSchedule:
        """Of a run of so many inner steps. Raises ValueError if the delay is too long."""
        return OuterSchedule(
            every=self.every, fragments=self.fragments, steps=steps, stagger=self.stagger, delay=self.delay
        )


class RoundsSpec(Specification):
    """When a round closes without a site, and what becomes of sites that do not answer."""

    min_sites: int = Field(default=1, ge=1, le=4096, description="live sites that a region needs to go on")
    deadline_s: float | None = Field(
        default=None,
        gt=0,
        le=86_400,
        description="from a round's first answer to its end without the others; default: by the delays seen so far",
    )
    late_rounds: int = Field(default=3, ge=1, le=10**6, description="rounds missed in a row that bench a site")
    bench_s: float = Field(default=60.0, gt=0, le=86_400, description="for how long nobody waits for a benched site")
    restarts: int = Field(
        default=3,
        ge=0,
        le=10**6,
        description="failures of a site's ranks before it is excluded; before its first step, the same error twice is "
        "enough",
    )
    overlap: bool = Field(
        default=False,
        description="a round goes on while the next gradients are computed: each update is applied one step late",
    )


class GuardsSpec(Specification):
    """What pauses a run for a person to look at it (rule A21). Metrics named `loss` are looked at."""

    nonfinite: bool = Field(default=True, description="a site's loss is NaN or infinite")
    spike: float | None = Field(
        default=None, gt=1, le=10**6, description="a site's loss exceeds so many times the median of its last 50"
    )


class SnapshotsSpec(Specification):
    """Snapshots: all that the sites share, at one place of every log. With outer steps, right behind an outer round."""

    every: int | None = Field(
        default=None, ge=1, le=10**9, description="steps between snapshots; null: only those that are asked for"
    )
    keep: int = Field(default=3, ge=1, le=1000, description="the newest are kept")


class BeginSpec(Specification):
    """What a run begins with, if not with the model as the lowest-named site makes it (rule A3)."""

    run: RunId | None = Field(default=None, description="of whose snapshots one is taken")
    snapshot: int | None = Field(default=None, ge=1, description="its number")
    file: Digest | None = Field(default=None, description="a stored blob: a safetensors file with the model's tensors")
    called: str | None = Field(
        default=None, max_length=1000, description="the file, by those who have it; for messages"
    )

    @model_validator(mode="after")
    def _is_one_place(self) -> Self:
        if (self.run is None) != (self.snapshot is None) or (self.run is None) == (self.file is None):
            raise ValueError("begin takes run and snapshot, or file")
        return self

    @property
    def described(self) -> str:
        if self.file is None:
            return f"snapshot {self.snapshot} of run {self.run}"
        return f"file {self.called}" if self.called else f"the file in blob {self.file}"


def _plain_json(value: Any, depth: int = 0) -> Any:
    """JSON that every reader takes and gives back unchanged."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"nested deeper than {_MAX_DEPTH}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("numbers must be finite")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise ValueError("integers must fit 64 bits")
    if isinstance(value, str) and not value.isascii():
        value.encode()  # half of a surrogate pair is a ValueError
    for inner in (*value, *value.values()) if isinstance(value, dict) else value if isinstance(value, list) else ():
        _plain_json(inner, depth + 1)
    return value


class RunSpec(Specification):
    """What to train, where and how."""

    name: Name = Field(description="for people; need not be unique")
    task: Name = Field(description="a task that the operators of all sites allow")
    params: Annotated[dict[str, Any], AfterValidator(_plain_json)] = Field(
        default_factory=dict, description="passed to the task as they are"
    )
    steps: int = Field(ge=1, le=10**9, description="inner steps")
    sites: list[Name] | None = Field(default=None, min_length=1, description="default: all that are online at start")
    regions: dict[Name, Annotated[list[Name], Field(min_length=1)]] | None = Field(
        default=None,
        min_length=1,
        description="sites by region, instead of `sites` and of the regions that they registered with",
    )
    exchange: Exchange = Field(
        default="demo",
        description="what the sites of a region do at every step; none: a region is one site, which trains by itself "
        "from one outer round to the next",
    )
    optimizer: OptimizerSpec = OptimizerSpec()
    outer: OuterSpec | None = None
    rounds: RoundsSpec = RoundsSpec()
    guards: GuardsSpec = GuardsSpec()
    same_version: bool = Field(
        default=False, description="only sites with the same version of the task take part; else others are an alarm"
    )
    part_bytes: int = Field(
        default=PART_BYTES,
        ge=1024,
        le=PART_BYTES,
        description="largest part of a contribution; smaller ones suit links that break within a few MiB",
    )
    evaluate_every: int | None = Field(default=None, ge=1, description="steps between held-out evaluations")
    seed: int = Field(default=0, ge=0, lt=2**63)
    snapshots: SnapshotsSpec = SnapshotsSpec()
    begin: BeginSpec | None = None

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        self._require_fitting_outer()
        if self.optimizer.warmup > self.steps:
            raise ValueError(f"optimizer.warmup = {self.optimizer.warmup} is more than steps = {self.steps}")
        if self.optimizer.base_update in INEXACT_BASE_UPDATES and self.outer is None:
            raise ValueError(
                f"optimizer.base_update = {self.optimizer.base_update} is not exact: the sites drift apart unless "
                "`outer` brings them together again"
            )
        if self.optimizer.lr * self.optimizer.weight_decay >= 1:
            raise ValueError(
                f"optimizer.lr * optimizer.weight_decay = {self.optimizer.lr * self.optimizer.weight_decay:g} must be "
                "below 1: parameters would change their sign"
            )
        self._require_fitting_sites()
        self._require_fitting_exchange()
        return self

    def _require_fitting_outer(self) -> None:
        if self.outer is None:
            return
        if self.outer.every > self.steps:
            raise ValueError(
                f"outer.every = {self.outer.every} is more than steps = {self.steps}: no outer step before the last; "
                "lower outer.every, or leave outer out"
            )
        most = self.optimizer.chunk**2
        if self.outer.codec == "topk" and self.outer.k > most:
            raise ValueError(
                f"outer.k = {self.outer.k} is more than a chunk has: at most {most} of optimizer.chunk = "
                f"{self.optimizer.chunk}"
            )
        if self.snapshots.every is not None and self.exchange != "none" and not self.outer.together:
            raise ValueError(
                "snapshots.every with outer.stagger or outer.delay: there is no place in the logs at which the anchors "
                "are all parameters, but for the end, where a snapshot is made if one was asked for; leave it out"
            )

    def _require_fitting_sites(self) -> None:
        if self.sites and self.regions:
            raise ValueError("give `regions`, which names the sites, or `sites`, not both")
        if twice := sorted(name for name, count in Counter(self.named_sites).items() if count > 1):
            what = "regions" if self.regions else "sites"
            raise ValueError(f"{what} names {', '.join(twice)} more than once")
        least = self.rounds.min_sites
        if self.sites and len(self.sites) < least:
            raise ValueError(f"rounds.min_sites = {least}, and `sites` names {len(self.sites)}: lower it, or add sites")
        if self.regions and (faults := faults_of_regions(self.regions, self)):
            raise ValueError("; ".join(faults))

    def _require_fitting_exchange(self) -> None:
        if self.exchange == "demo":
            if self.optimizer.kind != "demo":
                raise ValueError(
                    f'optimizer.kind = {self.optimizer.kind} trains without rounds: add "exchange": "none", and `outer`'
                )
            return
        if self.outer is None:
            raise ValueError("exchange = none without `outer`: the sites would never meet; add `outer`")
        if self.rounds.overlap:
            raise ValueError("rounds.overlap with exchange = none: there are no rounds to overlap; leave it out")
        if self.rounds.min_sites > 1:
            raise ValueError(
                f"rounds.min_sites = {self.rounds.min_sites} with exchange = none: a region is one site; leave it out"
            )

    @property
    def forgets(self) -> bool:
        """Whether momentum and inner optimizer state are reset at outer steps."""
        if self.outer is None or self.outer.stagger:
            return False
        return self.outer.state == "reset" or (self.outer.state is None and self.optimizer.kind == "demo")

    @property
    def outer_schedule(self) -> OuterSchedule | None:
        """When which fragments outer-step, if nobody changes that; None if they do not."""
        return None if self.outer is None else self.outer.schedule(self.steps)

    @property
    def named_sites(self) -> list[str] | None:
        """Whom the spec asks for; None: all that are online."""
        return [site for sites in self.regions.values() for site in sites] if self.regions else self.sites


def faults_of_regions(regions: Mapping[str, Sequence[str]], spec: RunSpec) -> list[str]:
    """Why a run cannot have these sites by region."""
    faults = []
    if len(regions) > 1 and spec.outer is None:
        faults.append(
            f"the sites are in regions {', '.join(sorted(regions))}, which would never meet: add `outer` to the spec, "
            "or name sites of one region"
        )
    for region, sites in sorted(regions.items()):
        if len(sites) < spec.rounds.min_sites:
            faults.append(f"region {region} has {len(sites)} sites, rounds.min_sites asks for {spec.rounds.min_sites}")
        if len(sites) > 1 and spec.exchange == "none":
            faults.append(
                f"region {region} has sites {', '.join(sorted(sites))}, and with exchange = none a region is one site: "
                "give each a region of its own by `regions` in the spec, or let them exchange (exchange = demo)"
            )
    return faults


class Change(Message):
    """What an operator changes in a run that goes on (rule A21), from a step on that is not open yet in any region."""

    from_step: int = Field(ge=1, le=2**48, description="the first step with the new settings")
    lr: float | None = Field(default=None, gt=0, le=10, description="peak learning rate; the schedule goes on with it")
    k: int | None = Field(default=None, ge=1, le=16384, description="coefficients sent per chunk")
    every: int | None = Field(default=None, ge=1, description="H: outer steps follow the steps that it divides")

    def settings(self) -> dict[str, Any]:
        """Those that change."""
        return self.model_dump(exclude={"from_step"}, exclude_none=True)


class InForce(Message):
    """The settings that a change may change, as they are from some step on."""

    lr: float
    k: int
    every: int | None


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


class Run(Message):
    id: str
    spec: RunSpec
    status: RunStatus
    reason: str = Field(description="what the run waits for, or why it ended")
    paused_because: str = Field(default="", description="what has paused the run, if nobody asked for it")
    since: datetime
    created_at: datetime
    started_at: datetime | None = Field(default=None, description="when it was asked to start; null: not yet")
    step: Step
    outer_rounds: int
    members: list[MemberView]
    regions: list[RegionView]
    alarms: list[str]
    changes: list[Change] = Field(default_factory=list, description="of settings, past and to come, by step")
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
    positions: dict[Name, Position] = Field(description="the place in each region's log")


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


class MetricReport(Message):
    site: Name
    points: list[MetricPoint] = Field(max_length=1000)


class StoredPoint(Message):
    site: Name
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
