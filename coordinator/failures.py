"""Pure: why the ranks of a site have failed, whether the next ones will fail alike, and what is done about it then."""

import re
from datetime import datetime, timedelta

from api.last_words import last_words
from coordinator.events import ProcessesGone
from coordinator.records import Member, RunState
from coordinator.transitions import with_, with_member

__all__ = ["failed", "repeated", "slowed"]

ALIKE = 3
"""Failures in a row with the same error that are an alarm, and from which on the next attempt is delayed."""

_DELAY_S, _MOST_DELAY_S = 10.0, 300.0
_MOST_ERROR = 300
"""Characters of an error in an alarm."""

_ENDED = "its training script ended before the run did"
_RANK = re.compile(r"^rank \d+: |\[rank\d+\]: ")
_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")


def failed(member: Member, event: ProcessesGone, state: RunState) -> Member:
    """With one more failure. Ranks that were killed, or say nothing, are like no others."""
    failure = _failure(event, state)
    again = member.alike > 0 and _kind(failure) == _kind(member.failure)
    alike = 0 if _is_accident(event) else member.alike + 1 if again else 1
    return member.model_copy(update={"failures": member.failures + 1, "failure": failure, "alike": alike})


def repeated(before: Member, after: Member) -> bool:
    """Whether this failure is the last one once more, to the letter."""
    return after.alike > 1 and _error(before.failure) == _error(after.failure)


def slowed(state: RunState, site: str, now: datetime) -> RunState:
    """If its ranks fail alike again and again, whatever they come to in between: an alarm, which counts them and stays,
    and a delay before the next ones, which doubles.
    """
    member = state.members[site]
    if member.alike < ALIKE:
        return state
    delay = min(_DELAY_S * 2 ** min(member.alike - ALIKE, 10), _MOST_DELAY_S)
    start = f"site {site} has failed again and again"
    alarm = (
        f"{start}, {member.alike} times in a row with the same error, the last time on {now:%Y-%m-%d at %H:%M:%S} UTC, "
        f"step {state.step}: {_error(member.failure)[:_MOST_ERROR]}; mend its training script or its data there, or "
        f"take it out (`isthmus run remove-site {state.id} {site}`)"
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


def _kind(failure: str) -> str:
    """Of an error, whatever numbers and addresses its words name."""
    how, colon, words = _error(failure).partition(": ")
    return how + colon + _NUMBER.sub("N", words)


def _failure(event: ProcessesGone, state: RunState) -> str:
    """Why the ranks ended, and the end of their log after it."""
    who = "" if event.rank is None else f"rank {event.rank}: "
    if event.exit_code == 0:
        how = f"{_ENDED}, at step {state.steps_done} of {state.spec.steps}"
    elif event.exit_code in (-9, 137):
        how = "killed (out of memory?)"
    else:
        how = f"exit code {event.exit_code}"
    log = event.detail.strip()
    return f"{who}{how}: {last_words(log)}\n{log}" if log else f"{who}{how}"
