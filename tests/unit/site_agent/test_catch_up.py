"""What brings a site to the head of the log, and what it owes there: against a log that is written here."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from algorithms.schedule import OuterSchedule
from api.errors import ConflictError, GoneError
from api.schemas import CaughtUpReply, LogPage, Position, Resume
from api.service import Answer
from api.specs import InForce, RoundsSpec
from site_agent.catch_up import CatchUp
from site_agent.exchange import Exchange
from site_agent.outer import OuterRounds
from site_agent.progress import Progress
from site_agent.settings import Session
from site_agent.stop import Stop

SESSION = Session(coordinator="http://nowhere", secret="s", run="run-1", attempt=2, site="a", region="west")
SPEC: Any = SimpleNamespace(steps=9, rounds=RoundsSpec(), outer=None)
HEAD = Position(seq=9, hash="0" * 64)


class OneRank:
    def share(self, data: bytes | None) -> bytes:
        assert data is not None
        return data

    def gather(self, data: bytes) -> list[bytes]:
        return [data]


class Log:
    """A replica and a client in one. `polls`: how many entries there are at each poll; None: the run has ended."""

    def __init__(self, polls: list[int | GoneError | None], active: list[bool | GoneError]) -> None:
        self.polls, self.active = polls, active
        self.applied = 0
        self.waits: list[float] = []
        self.reported: list[int] = []

    @property
    def next_seq(self) -> int:
        return self.applied

    @property
    def position(self) -> Position:
        return Position(seq=self.applied, hash="0" * 64)

    def log(self, run: str, region: str, start: int, stop: int | None = None, wait: float | None = None) -> LogPage:
        count = self.polls.pop(0)
        if isinstance(count, GoneError):
            raise count
        assert wait is not None
        self.waits.append(wait)
        seqs = range(start, start + (count or 0))
        items = [{"kind": "change" if seq % 2 else "anchor", "seq": seq} for seq in seqs]
        return LogPage(items=items, head=HEAD, ended=count is None)

    def resume(self, resume: Resume) -> None:
        self.applied = resume.position.seq

    def caught_up(self, run: str, site: str, report: Any) -> CaughtUpReply:
        self.reported.append(report.position.seq)
        active = self.active.pop(0)
        if isinstance(active, GoneError):
            raise active
        return CaughtUpReply(active=active, head=HEAD)

    def apply_anchor(self, header: dict[str, Any]) -> None:
        assert header["seq"] == self.applied
        self.applied += 1

    apply_change = apply_anchor

    def to_head(self, wait: float = 0.0) -> bool:
        there: Any = self
        ranks: Any = OneRank()
        optimizer: Any = None
        return CatchUp(SESSION, ranks, there, optimizer, there, Stop()).to_head(wait)


def test_entries_that_come_after_the_report_are_applied_before_the_next_batch() -> None:
    log = Log(polls=[5, 2, 1, 0], active=[False, True])
    assert log.to_head()
    assert (log.applied, log.reported) == (8, [5, 7])
    assert log.waits == [0.0] * 4


def test_where_the_log_was_trimmed_it_is_entered_at_a_later_place() -> None:
    position, in_force = Position(seq=50, hash="1" * 64), InForce(lr=1, k=32, every=10)
    resume = Resume(position=position, step=40, outer_round=4, in_force=in_force, anchors=["2" * 64])
    trimmed = GoneError("log_trimmed", "gone", context={"resume": resume.model_dump(mode="json")})
    log = Log(polls=[3, trimmed, 2, 0], active=[False, True])
    assert log.to_head()
    assert (log.applied, log.reported) == (52, [3, 52])
    with pytest.raises(GoneError, match="another"):
        Log(polls=[GoneError("run_ended", "another")], active=[]).to_head()


def test_a_site_that_is_not_wanted_yet_waits_for_entries() -> None:
    log = Log(polls=[0, 1, 0], active=[False, True])
    assert log.to_head(wait=7.0)
    assert (log.applied, log.reported) == (1, [0, 1])
    assert log.waits == [7.0, 25.0, 0.0]


def test_a_run_that_stops_meanwhile_ends_the_catching_up() -> None:
    log = Log(polls=[3, 0, None], active=[GoneError("run_ended", "stopping"), GoneError("run_ended", "stopping")])
    assert not log.to_head()
    assert log.applied == 3
    with pytest.raises(GoneError):
        Log(polls=[3], active=[GoneError("other", "of another kind")]).to_head()


@pytest.mark.parametrize("code", ["closed_without_you", "settings_changed"])
def test_a_site_is_behind_until_it_takes_part_again(code: str) -> None:
    answers: list[Any] = [GoneError(code, "late"), Answer(b"entry")]

    def abstain(*_: object) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, GoneError):
            raise answer
        return answer

    ranks: Any = OneRank()
    client: Any = SimpleNamespace(abstain=abstain)
    replica: Any = SimpleNamespace(step=4, position=HEAD, read_step=lambda message, sent: (message, sent))
    optimizer: Any = SimpleNamespace(param_groups=[{}])
    exchange = Exchange(SPEC, SESSION, ranks, client, Stop())
    exchange.attach(replica)
    entry = exchange(optimizer, None)
    assert (entry.update, entry.listed, exchange.behind) == (None, False, True)
    assert exchange(optimizer, None) == (b"entry", "")
    assert not exchange.behind


def test_what_earlier_ranks_have_answered_stands_and_the_entry_is_taken() -> None:
    """New ranks of a site reach a round to which lost ones have contributed."""
    polled: list[Any] = [None, b"entry"]

    def abstain(*_: object) -> Any:
        raise ConflictError("other_bytes", "answered already")

    ranks: Any = OneRank()
    client: Any = SimpleNamespace(abstain=abstain, update_answer=lambda *_: Answer(polled.pop(0)))
    replica: Any = SimpleNamespace(step=4, position=HEAD, read_step=lambda message, sent: message)
    optimizer: Any = SimpleNamespace(param_groups=[{}])
    exchange = Exchange(SPEC, SESSION, ranks, client, Stop())
    exchange.attach(replica)
    assert exchange(optimizer, None) == b"entry"
    assert (polled, exchange.behind, exchange.ended) == ([], False, False)
    client.abstain = raising(ConflictError("stale_attempt", "replaced"))
    with pytest.raises(ConflictError, match="replaced"):
        exchange(optimizer, None)


def raising(error: Exception) -> Any:
    def fail(*_: object) -> None:
        raise error

    return fail


class Coordinator:
    """Takes parts, and forgets them as often as it is told to."""

    def __init__(self, forgets: int = 0, closes_at: int | None = None) -> None:
        self.forgets, self.closes_at = forgets, closes_at
        self.parts: list[tuple[int, bytes, float]] = []

    def contribute(self, run: str, region: str, step: int, site: str, part: int, body: bytes, wait: float) -> Answer:
        self.parts.append((part, body, wait))
        if part == self.closes_at:
            return Answer(b"closed")
        if part < 2:
            return Answer(None)
        self.forgets -= 1
        return Answer(None, accepted=False) if self.forgets >= 0 else Answer(b"entry")

    def answer(self, folder: Path) -> bytes:
        there: Any = self
        ranks: Any = OneRank()
        exchange = Exchange(SPEC, SESSION.model_copy(update={"folder": folder}), ranks, there, Stop())
        exchange.attach(cast(Any, SimpleNamespace(step=4, position=HEAD)))
        return exchange._answered([b"one", b"two", b"three"])


def test_only_the_last_part_waits_and_all_are_sent_again_if_some_are_missing(tmp_path: Path) -> None:
    parts = [(0, b"one", 0.0), (1, b"two", 0.0), (2, b"three", 25.0)]
    coordinator = Coordinator()
    assert (coordinator.answer(tmp_path), coordinator.parts) == (b"entry", parts)
    coordinator = Coordinator(forgets=1)
    assert (coordinator.answer(tmp_path), coordinator.parts) == (b"entry", parts * 2)
    coordinator = Coordinator(closes_at=1)
    assert (coordinator.answer(tmp_path), coordinator.parts) == (b"closed", parts[:2])


def test_which_fragments_are_announced_and_when_their_anchors_are_awaited() -> None:
    """Copies of fragment 0 after steps 2 and 6, of fragment 1 after 4 and 8; anchors one step later; all after 10."""
    schedule = OuterSchedule(every=4, fragments=2, steps=10, stagger=True, delay=1)
    replica: Any = SimpleNamespace(step=0, outer=Progress(schedule))
    ranks: Any = OneRank()
    rounds = OuterRounds(SPEC, SESSION, ranks, None, replica, cast(Any, None))
    due = []
    for step in range(11):
        replica.step = step
        while rounds.due:
            if replica.outer.begins(step):
                replica.outer.begin(step)
                due.append((step, sorted(replica.outer.missing), "copies"))
            else:
                due.append((step, sorted(replica.outer.missing), "anchors"))
                replica.outer.missing.clear()
    assert due == [
        (2, [0], "copies"), (3, [0], "anchors"), (4, [1], "copies"), (5, [1], "anchors"),
        (6, [0], "copies"), (7, [0], "anchors"), (8, [1], "copies"), (9, [1], "anchors"),
        (10, [0, 1], "copies"), (10, [0, 1], "anchors"),
    ]  # fmt: skip
