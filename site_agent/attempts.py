"""Attempts of runs at this site, from the start of their ranks to the end, and what the agent's log says of that."""

from dataclasses import dataclass
from pathlib import Path

import structlog

from api.last_words import last_words
from api.schemas import Assignment, Condition, Run, RunStatus
from site_agent.supervisor import Exit, RankGroup

__all__ = ["Attempt", "Ending", "Refusal", "how_to_move", "why_not_wanted"]

log = structlog.get_logger()


@dataclass(frozen=True)
class Refusal:
    """Stands for ranks that were never started."""

    because: str

    def poll(self) -> Exit:
        return Exit(1, detail=self.because)

    def terminate(self) -> None:
        """There is nothing to end."""

    def kill(self) -> None:
        """There is nothing to kill."""

    def stop(self, grace_s: float) -> None:
        """There is nothing to stop."""


@dataclass
class Attempt:
    """Its ranks, and the folder of their logs: none if they were never started."""

    assignment: Assignment
    group: RankGroup | Refusal
    logs: Path | None = None
    told: bool = False

    def ended(self) -> Exit | None:
        """How its ranks have ended by themselves, if they have; a failure goes to our log, too, once."""
        end = self.group.poll()
        if end is not None and end.code != 0 and not self.told:
            self.told = True
            log.error(
                "the ranks of a run have failed",
                run=self.assignment.run,
                attempt=self.assignment.attempt,
                rank=end.rank,
                exit_code=end.code,
                error=last_words(end.detail),
                logs=self.logs and str(self.logs),
            )
        return end


@dataclass
class Ending:
    """Ranks that are no longer wanted, seen to between heartbeats: told to end at `stop_at`, killed at `kill_at`.

    Those of a run that succeeded are first left alone: what a training script does after its loop takes time.
    """

    attempt: Attempt
    stop_at: float
    kill_at: float
    told: bool = False

    def is_over(self, now: float) -> bool:
        group = self.attempt.group
        if (group.poll() if self.told else self.attempt.ended()) is not None or now >= self.kill_at:
            group.kill()
            return True
        if now >= self.stop_at and not self.told:
            group.terminate()
            self.told = True
        return False


def why_not_wanted(run: Run, of: Assignment, site: str) -> tuple[str, str]:
    """What has happened to the ranks of an assignment of this site, and the reason: the run's, or the site's own."""
    if run.status.terminal:
        return "run ended", run.reason
    if run.status is RunStatus.STOPPING:
        return "run is being stopped, ending its ranks", run.reason
    member = next((one for one in run.members if one.site == site), None)
    if member is not None and member.attempt > of.attempt:
        return "another attempt takes over, ending these ranks", member.reason
    if member is not None and member.condition is not Condition.EXCLUDED:
        return "the ranks have done all that was asked of them", member.reason
    return "run goes on without this site", member.reason if member else "it is no member any more"


def how_to_move(run: Run, site: str, region: str) -> str:
    """What an operator may do about a site that is in this region of a run and was to be in another.

    A run that began with a region does not let its last site go.
    """
    there = {one.site for one in run.members if one.region == region and one.condition is not Condition.EXCLUDED}
    if there <= {site}:
        return f"start the agent with --region {region}: it is the last site there, which may have to stay"
    return f"`isthmus run remove-site {run.id} {site}`, then `isthmus run add-site {run.id} {site}`, moves it"
