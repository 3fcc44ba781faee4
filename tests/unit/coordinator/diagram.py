"""Draws docs/transitions.md from the code: explores a small run, and notes what `transition` makes of every event.

`python -m tests.unit.coordinator.diagram` (`make docs`) writes the page.
"""

import inspect
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from api.errors import ProblemError
from api.schemas import RunStatus
from api.specs import Change
from coordinator import events
from coordinator.records import Origin
from coordinator.state import TRANSITIONS, AggregateRound, MakeStart, WriteManifest, due_at, pending, transition
from tests.unit.coordinator.runs import NOW, START, Driver, digest_of

PAGE = Path(__file__).parents[3] / "docs" / "transitions.md"
SITES = {"a": "west", "b": "west"}
ALONE = {"a": "west"}
_HEAD = """# What happens to a run

Generated from `coordinator.state.TRANSITIONS` by `make docs`: runs of two sites, and of one without rounds, were driven
through every kind of event wherever they could get, and this is what came of it.
"""


@dataclass
class Seen:
    """Edges by the events that make them; statuses in which an event of a kind has changed something."""

    statuses: dict[tuple[str, str], set[str]] = field(default_factory=lambda: defaultdict(set))
    conditions: dict[tuple[str, str], set[str]] = field(default_factory=lambda: defaultdict(set))
    taken: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    def note(self, event, before, after):
        name = type(event).__name__
        self.taken[name].add(before.status)
        if before.status is not after.status:
            self.statuses[before.status, after.status].add(name)
        for site, member in after.members.items():
            old = before.members[site].condition if site in before.members else "new"
            if old != member.condition:
                self.conditions[old, member.condition].add(name)


def _shape(state):
    """States of one shape are explored once; sites may change places."""
    members = sorted(
        (
            member.condition,
            member.ready,
            member.released_at is not None,
            member.seat is not None,
            member.final is not None,
            member.gone,
            any(region.round is not None and member.site in region.round.answered for region in state.regions.values()),
            state.outer is not None and member.site in state.outer.fragments[0].copies,
            member.arrived,
        )
        for member in state.members.values()
    )
    rounds = [(region.step, region.round and region.round.frozen) for region in state.regions.values()]
    return repr((state.status, members, rounds, state.outer is None, state.outer_rounds, state.start is None))


def _site_events(driver, site):
    attempt, region = driver.attempt(site), driver.state.regions["west"]
    yield events.SiteAdded(site, "west")
    yield events.SiteRemoved(site, "removed")
    yield events.SeatTaken(site, attempt, digest_of("seat", site, attempt))
    yield events.ProcessesGone(site, attempt, 1)
    yield events.ProcessesGone(site, attempt, 0)
    yield events.SiteLost(site, "no heartbeat")
    yield events.SiteBack(site)
    yield events.SiteBack(site, ranks=False)
    yield driver.layout(site)
    yield events.StartUploaded(site, attempt, START)
    yield driver.caught_up(site)
    yield driver.contribution(site)
    yield driver.abstention(site)
    yield driver.refusal(site)
    yield events.AnsweredLate(site, attempt, region.step)
    yield driver.arrival(site)
    yield driver.announcement(site, 0)
    yield events.SnapshotAsked(site, attempt)
    if region.head is not None:
        yield driver.final(site)
        yield driver.snapshot(site)


def _events(driver):
    yield events.StartRequested(driver.sites)
    yield events.StopRequested()
    yield events.PauseRequested()
    yield events.ResumeRequested()
    yield events.ChangeRequested(Change(from_step=2, k=16))
    yield events.SnapshotRequested()
    yield events.WorkFailed("aggregating failed")
    yield events.GuardTripped(2, "the loss is not finite")
    yield events.StorageFull("the disk is full")
    yield events.HeldBack("Redis is to drain first")
    yield events.WorkFailed("a contribution is lost", final=True)
    for site in sorted(driver.state.members):
        yield from _site_events(driver, site)
    for job in pending(driver.state):
        if isinstance(job, AggregateRound):
            yield events.Aggregated(job.region, job.step, (digest_of("parts"),), _Ones())
        elif isinstance(job, MakeStart):
            yield events.StartMade(START)
        elif isinstance(job, WriteManifest):
            yield events.SnapshotRegistered(job.number, digest_of("manifest"))
        else:
            yield driver.average(job.number, job.fragment)


class _Ones(dict):
    def __missing__(self, site):
        return events.Norm(1.0)


def explore(sites=SITES, every=None, exchange="demo"):
    """What is seen from every shape of state that can be reached; the same at every call.

    With outer steps, which are after every step then, the run begins with a file.
    """
    also = {"deadline_s": 5, "late_rounds": 1, "restarts": 1, "bench_s": 3}
    driver = Driver(sites, steps=2, every=every, exchange=exchange, snapshots=1, **also)
    if every:
        driver.state = driver.state.model_copy(update={"origin": Origin(file=digest_of("file"))})
    seen, known, queue = Seen(), set(), [(driver.state, NOW)]
    while queue:
        driver.state, now = queue.pop()
        state = driver.state
        due = due_at(state)
        occasions = [(event, now) for event in _events(driver)]
        occasions += [(events.Ticked(), due)] if due is not None else []
        for event, at in occasions:
            try:
                after = transition(state, event, at).state
            except ProblemError:
                continue
            if after == state:
                continue
            seen.note(event, state, after)
            if (shape := _shape(after)) not in known:
                known.add(shape)
                queue.append((after, at))
    return seen


def _mermaid(edges, first):
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {first}" if first else ""]
    for (before, after), names in sorted(edges.items()):
        start = "[*]" if before == "new" else before
        lines.append(f"    {start} --> {after}: {', '.join(sorted(names))}")
    return "\n".join([*(line for line in lines if line), "```"])


def page():
    seen = Seen()
    for found in (explore(), explore(every=1), explore(ALONE, every=1, exchange="none")):
        for mine, theirs in zip(vars(seen).values(), vars(found).values(), strict=True):
            for key, values in theirs.items():
                mine[key] |= values
    rows = ["| event | what it does | changes something in a run that is |", "|---|---|---|"]
    for kind, handler in TRANSITIONS.items():
        said = inspect.getdoc(handler) or inspect.getdoc(kind) or ""
        first = said.partition("\n")[0] if not said.startswith(f"{kind.__name__}(") else ""
        statuses = [status for status in RunStatus if status in seen.taken[kind.__name__]]
        rows.append(f"| `{kind.__name__}` | {first} | {', '.join(statuses)} |")
    parts = [
        _HEAD,
        "## The run\n",
        _mermaid(seen.statuses, RunStatus.PENDING) + "\n",
        "## A member\n",
        _mermaid(seen.conditions, "") + "\n",
        "## The events\n",
        "\n".join(rows),
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
