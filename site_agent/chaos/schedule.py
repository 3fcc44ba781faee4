"""Pure: what is broken, when and how, for a seed. Times are steps of the run, so that they mean the same anywhere."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["ANSWER_KINDS", "REQUEST_KINDS", "SITES", "Fault", "Kind", "Plan", "plan"]

SITES = ("a", "b", "c")
_FIRST = 3
_GAP = range(3, 12)
"""Steps between faults: less than what was lost needs to come back, so that faults overlap."""
_TAIL = 12
"""Steps after the last fault has passed, with everybody."""
_DOWN_S = (0.2, 2.0)
_CUT_S = (0.5, 6.0)
"""Some are longer than a lease."""
_SLOW_S = (2.0, 4.0)


class Kind(StrEnum):
    KILL_COORDINATOR = "kill_coordinator"
    KILL_REDIS = "kill_redis"
    KILL_AGENT = "kill_agent"
    KILL_RANK = "kill_rank"
    CUT = "cut"
    """All connections of a site break, and no new ones come about for a while."""
    SLOW = "slow"
    """Everything takes longer on a site's link for a while."""
    LOSE = "lose"
    """A request arrives, its answer does not."""
    DUPLICATE = "duplicate"
    """A request arrives twice, at the same time."""
    REORDER = "reorder"
    """A request arrives after the one that the site sent next, once its connection had broken."""
    TRUNCATE_REQUEST = "truncate_request"
    TRUNCATE_ANSWER = "truncate_answer"
    CORRUPT_REQUEST = "corrupt_request"
    """One bit of a body changes."""
    CORRUPT_ANSWER = "corrupt_answer"


REQUEST_KINDS = frozenset({Kind.LOSE, Kind.DUPLICATE, Kind.REORDER, Kind.TRUNCATE_REQUEST, Kind.CORRUPT_REQUEST})
ANSWER_KINDS = frozenset({Kind.TRUNCATE_ANSWER, Kind.CORRUPT_ANSWER})


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        step: of the run, from which on it happens.
        site: whose agent, rank or link; the coordinator and Redis serve all of them.
        seconds: for how long something is down, cut or slow.
        place: from 0 to 1: which rank, which byte of a body, how slow.
        in_round: of requests and answers, whether only one that belongs to a step will do.
    """

    number: int
    kind: Kind
    step: int
    site: str
    seconds: float
    place: float
    in_round: bool

    @property
    def on_link(self) -> bool:
        """Whether it happens to what passes between a site and the coordinator."""
        return self.kind in REQUEST_KINDS | ANSWER_KINDS | {Kind.CUT, Kind.SLOW}

    def __str__(self) -> str:
        what = str(self.kind).replace("_", " ")
        if self.kind in (Kind.KILL_COORDINATOR, Kind.KILL_REDIS):
            return what
        lasting = f" for {self.seconds:.1f} s" if self.kind in (Kind.CUT, Kind.SLOW) else ""
        return f"{what} of {self.site}{lasting}"


@dataclass(frozen=True)
class Plan:
    """A run and what happens to it; equal seeds and numbers of faults have equal plans.

    Attributes:
        workers: processes of the coordinator.
        parts: whether contributions have several parts.
        overlap: whether updates are applied one step late.
    """

    seed: int
    regions: dict[str, str]
    ranks: dict[str, int]
    outer_every: int | None
    workers: int
    parts: bool
    overlap: bool
    faults: tuple[Fault, ...]

    @property
    def hold_at(self) -> int:
        """The step at which the run waits until all faults have happened and all sites are back."""
        return self.faults[-1].step + _GAP.start

    @property
    def steps(self) -> int:
        return self.hold_at + _TAIL


def plan(seed: int, faults: int) -> Plan:
    """Seeds take turns: one region, or two with outer rounds; one rank per site, or two at one of them; and so on."""
    chance = random.Random(seed)
    alone = seed % 2 == 0
    return Plan(
        seed=seed,
        regions={site: "west" if alone or site != "c" else "east" for site in SITES},
        ranks={site: 2 if seed % 3 == 0 and site == "b" else 1 for site in SITES},
        outer_every=None if alone else chance.randint(6, 14),
        workers=2 if seed % 4 == 1 else 1,
        parts=seed % 5 in (2, 3),
        overlap=seed % 7 in (2, 4, 5),
        faults=tuple(_faults(chance, faults)),
    )


def _faults(chance: random.Random, number: int) -> Iterator[Fault]:
    """Every kind once before any comes again."""
    step = _FIRST
    kinds: list[Kind] = []
    for index in range(number):
        if not kinds:
            kinds = list(Kind)
            chance.shuffle(kinds)
        kind = kinds.pop()
        low, high = {Kind.CUT: _CUT_S, Kind.SLOW: _SLOW_S}.get(kind, _DOWN_S)
        yield Fault(
            number=index,
            kind=kind,
            step=step,
            site=chance.choice(SITES),
            seconds=round(chance.uniform(low, high), 2),
            place=round(chance.random(), 6),
            in_round=chance.random() < 0.6,
        )
        step += chance.choice(_GAP)
