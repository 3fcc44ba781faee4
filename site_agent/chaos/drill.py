"""One seed: a run, everything that its plan does to it, and what must be true of it afterwards."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from algorithms.parts import PART_BYTES
from api.errors import IsthmusError
from api.schemas import Condition, Run, RunStatus, SiteStatus
from api.specs import OptimizerSpec, OuterSpec, RoundsSpec, RunSpec
from site_agent.chaos.checks import differing, lost, repeated, unchained
from site_agent.chaos.evidence import applied, journal, read_log, replay
from site_agent.chaos.schedule import Plan
from site_agent.chaos.stage import LEASE_S, TASK, Stage, wait_until

__all__ = ["Outcome", "drill"]

_PACE_S = 0.1
_STRIKE_S = 10.0
"""For which a fault waits for a request of a step, before it takes any."""
_SETTLED_S = LEASE_S + 1.0
_SMALL, _LARGE = (24, 16), (320, 256)
"""Of the layer."""
_PART_BYTES = 1024
"""Contributions of the large layer have two parts then."""

Tell = Callable[[str], None]


@dataclass
class Outcome:
    """What became of one seed. All is well if `wrong` is empty, and only then."""

    seed: int
    faults: int = 0
    succeeded: bool = False
    digests_equal: bool = False
    replay_equal: bool = False
    lost_contributions: int = 0
    wrong: list[str] = field(default_factory=list)
    """Everything that is not as it must be, in words."""


def drill(plan: Plan, folder: Path, tell: Tell) -> Outcome:
    """Runs it in `folder`, which keeps logs and data; nothing else is left."""
    outcome = Outcome(plan.seed)
    try:
        with Stage(plan, folder) as stage:
            _Drill(plan, folder, stage, outcome, tell).run()
    except IsthmusError as error:
        outcome.wrong.append(str(error))
    return outcome


class _Drill:
    def __init__(self, plan: Plan, folder: Path, stage: Stage, outcome: Outcome, tell: Tell) -> None:
        self._plan = plan
        self._stage = stage
        self._client = stage.client
        self._outcome = outcome
        self._tell = tell
        self._go = folder / "go"

    def run(self) -> None:
        wait_until(self._all_online, "all sites to register")
        self._id = self._client.start_run(self._client.create_run(self._spec()).id).id
        struck = 0
        try:
            for fault in self._plan.faults:
                self._until(lambda run, fault=fault: run.step >= fault.step, f"step {fault.step}")  # type: ignore[misc]
                self._tell(f"step {self._client.run(self._id).step}: {fault}")
                self._stage.strike(fault)
                struck += fault.number not in self._armed
            self._all_struck()
            self._all_back()
        finally:
            self._outcome.faults = struck + len(self._stage.links.struck)
        self._go.touch()
        self._tell("no more faults")
        run = self._until(lambda run: run.status.terminal, "the end of the run")
        self._tell(f"run {run.status}; checking")
        self._judge(run)

    def _spec(self) -> RunSpec:
        plan = self._plan
        return RunSpec(
            name=f"chaos-{plan.seed}",
            task=TASK,
            params={
                "pace_s": _PACE_S,
                "hold_at": plan.hold_at,
                "go": str(self._go),
                "size": _LARGE if plan.parts else _SMALL,
            },
            steps=plan.steps,
            sites=list(plan.regions),
            optimizer=OptimizerSpec(lr=1e-3, k=32),
            outer=OuterSpec(every=plan.outer_every, fragments=2) if plan.outer_every else None,
            rounds=RoundsSpec(deadline_s=2.0, bench_s=3.0, restarts=100, overlap=plan.overlap),
            part_bytes=_PART_BYTES if plan.parts else PART_BYTES,
            seed=plan.seed,
        )

    # --- waiting ------------------------------------------------------------------------------------------------------

    def _all_online(self) -> bool:
        online = {site.name for site in self._client.sites() if site.status is SiteStatus.ONLINE}
        return online >= self._plan.regions.keys()

    def _until(self, condition: Callable[[Run], bool], what: str) -> Run:
        """Raises IsthmusError if the run ends before, or nothing happens."""

        def there() -> Run | None:
            run = self._client.run(self._id)
            if condition(run):
                return run
            if run.status.terminal:
                raise IsthmusError(f"run {run.id} {run.status} before {what}: {run.reason}")
            return None

        try:
            return wait_until(there, what)
        except IsthmusError as error:
            raise IsthmusError(f"{error}; {_described(self._client.run(self._id))}") from None

    @property
    def _armed(self) -> set[int]:
        """Faults that happen on links."""
        return {fault.number for fault in self._plan.faults if fault.on_link}

    def _all_struck(self) -> None:
        deadline = time.monotonic() + _STRIKE_S
        while self._armed - self._stage.links.struck and time.monotonic() < deadline:
            time.sleep(0.05)
        self._stage.links.relax()
        wait_until(lambda: not self._armed - self._stage.links.struck, "requests for the last faults")

    def _all_back(self) -> None:
        """All sites are active, and stay so for longer than it takes to notice that one is not there."""
        since = time.monotonic()

        def settled(run: Run) -> bool:
            nonlocal since
            if any(member.condition is not Condition.ACTIVE for member in run.members):
                since = time.monotonic()
            return time.monotonic() - since > _SETTLED_S

        self._until(settled, "all sites to be active again")

    # --- the end ------------------------------------------------------------------------------------------------------

    def _judge(self, run: Run) -> None:
        outcome, plan, stage = self._outcome, self._plan, self._stage
        outcome.succeeded = run.status is RunStatus.SUCCEEDED
        if not outcome.succeeded:
            outcome.wrong.append(f"run {run.id} {run.status}: {run.reason}")
        logs = {region: read_log(self._client, run.id, region) for region in set(plan.regions.values())}
        said = [one for site, region in plan.regions.items() for one in applied(stage.site(site), run, site, region)]
        ended = {member.site: member.digest for member in run.members}
        apart = differing(said)
        if len(set(ended.values())) > 1 or None in ended.values():
            apart.append(f"the sites ended with different parameters, or not all of them: {ended}")
        outcome.digests_equal = not apart
        journals = {site: journal(stage.site(site), run) for site in plan.regions}
        silent = [f"site {site} has written no journal" for site, lines in journals.items() if not lines]
        losses = lost(journals, logs, plan.regions)
        outcome.lost_contributions = len(losses)
        unequal = replay(stage.url, stage.token, run.id)
        outcome.replay_equal = not unequal
        outcome.wrong += [*apart, *silent, *losses, *unchained(logs), *repeated(logs, said)]
        outcome.wrong += [unequal] if unequal else []


def _described(run: Run) -> str:
    members = ", ".join(f"{member.site} {member.condition} (attempt {member.attempt})" for member in run.members)
    return f"run {run.id} is {run.status} at step {run.step}, {members}; {run.reason}"
