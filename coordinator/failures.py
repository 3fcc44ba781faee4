"""Pure: why the ranks of a site have failed, whether the next ones will fail alike, and what is done about it then."""

import re
from datetime import datetime, timedelta

from api.last_words import last_words
from coordinator.events import ProcessesGone
from coordinator.records import Member, RunState
from coordinator.transitions import with_, with_member

__all__ = ["failed", "slowed"]

ALIKE = 3
"""Failures in a row with the same error that are an alarm, and from which on the next attempt is delayed."""

_DELAY_S, _MOST_DELAY_S = 10.0, 300.0
_MOST_ERROR = 300
"""Characters of an error in an alarm."""

_ENDED = "its training script ended before the run did"
_RANK = re.compile(r"^rank \d+: |\[rank\d+\]: ")


def failed(member: Member, event: ProcessesGone, state: RunState) -> Member:
    """With one more failure. Ranks that were killed, or say nothing, are like no others."""
    failure = _failure(event, state)
    again = member.alike > 0 and _error(failure) == _error(member.failure)
    alike = 0 if _is_accident(event) else member.alike + 1 if again else 1
    return member.model_copy(update={"failures": member.failures + 1, "failure": failure, "alike": alike})


def slowed(state: RunState, site: str, now: datetime) -> RunState:
    """If its ranks fail alike again and again, whatever they come to in between: an alarm, which counts them, and a
    delay before the next ones, which doubles.
    """
    member = state.members[site]
    if member.alike < ALIKE:
        return state
    delay = min(_DELAY_S * 2 ** min(member.alike - ALIKE, 10), _MOST_DELAY_S)
    start = f"site {site} fails again and again"
    alarm = (
        f"{start}, {member.alike} times in a row now with the same error, {_error(member.failure)[:_MOST_ERROR]}; mend "
        f"its training script or its data there, or take it out (`isthmus run remove-site {state.id} {site}`): it is "
        f"started again after {delay:g} s"
    )
    others = [other for other in state.alarms if not other.startswith(start)]
    state = with_member(state, site, restart_at=now + timedelta(seconds=delay))
    return with_(state, alarms=(*others, alarm))


def _is_accident(event: ProcessesGone) -> bool:
    """Whether the next ranks need not end like this: these were killed, or do not say what is wrong."""
    return event.exit_code != 0 and not (0 < (event.exit_code or 0) < 128 and event.detail.strip())


def _error(failure: str) -> str:
    """What went wrong, at whatever rank and step of the run."""
    error = _RANK.sub("", failure.partition("\n")[0])
    return _ENDED if error.startswith(_ENDED) else error


def _failure(event: ProcessesGone, state: RunState) -> str:
    """Why the ranks ended, and the end of their log after it."""
    who = "" if event.rank is None else f"rank {event.rank}: "
    if event.exit_code == 0:
        how = f"{_ENDED}, at step {state.step} of {state.spec.steps}"
    elif event.exit_code in (-9, 137):
        how = "killed (out of memory?)"
    else:
        how = f"exit code {event.exit_code}"
    log = event.detail.strip()
    return f"{who}{how}: {last_words(log)}\n{log}" if log else f"{who}{how}"
