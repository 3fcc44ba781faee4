"""What a run is asked to do, and what may be changed of it: the messages that people write."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Annotated, Any, Literal, Self, cast

from pydantic import (
    AfterValidator,
    Field,
    SerializerFunctionWrapHandler,
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
from api.message import Decay, Digest, Message, Name, RunId

_MAX_DEPTH = 32
_DEFAULTS = Settings()


class Specification(Message):
    """What people write: a field that is nearly one of ours is answered with ours."""

    @model_validator(mode="before")
    @classmethod
    def _are_fields(cls, given: Any) -> Any:
        for name in sorted(map(str, given.keys() - cls.model_fields.keys()))[:100] if isinstance(given, dict) else ():
            close = get_close_matches(name[:80], cls.model_fields, n=1, cutoff=0.75)
            if close := close or [field for field in cls.model_fields if field in (name[1:], name[:-1])]:
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
    deadline_s: float | None = Field(
        default=None,
        gt=0,
        le=86_400,
        description="seconds for which regions that have come to an outer round wait for others; and then, from the "
        "first announcement on, for their copies; default: until the leases of their sites end",
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
        description="failures of a site's ranks, without a contribution in between, before it is excluded; before its "
        "first step, the same error twice is enough",
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
    keep: int = Field(default=3, ge=1, le=1000, description="the newest are kept, those asked for by hand among them")


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
