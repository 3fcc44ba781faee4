"""Pure: the versions of a task that the sites of a run have, compared (rule A21)."""

from collections.abc import Mapping

from api.errors import ConflictError
from coordinator.records import RunState
from coordinator.transitions import with_, with_member

__all__ = ["differing", "other_version", "with_version"]


def differing(versions: Mapping[str, str], task: str) -> str:
    """A sentence that names sites and versions, if these differ; a version that is not known differs from others."""
    if len(set(versions.values())) < 2:
        return ""
    listed = ", ".join(f"{site} {version or 'unknown'}" for site, version in sorted(versions.items()))
    return f"the sites have different versions of task {task}: {listed}"


def other_version(state: RunState, site: str, version: str) -> str:
    """A sentence, if that is not the version of the ranks of the lowest-named other site."""
    there = (member for member in state.members.values() if member.present and member.site != site)
    others = {member.site: member.version for member in there if member.version is not None}
    if not others:
        return ""
    return differing({min(others): others[min(others)], site: version}, state.spec.task)


def with_version(state: RunState, site: str, version: str) -> RunState:
    """The site's ranks are about to be started with this one. Another one than that of others is an alarm, once.

    Raises:
        ConflictError: it is another one, and the spec asks for the same everywhere.
    """
    because = other_version(state, site, version)
    if because and state.spec.same_version:
        raise ConflictError("other_version", f"{because}; run {state.id} asks for the same at all sites (same_version)")
    state = with_member(state, site, version=version)
    return with_(state, alarms=(*state.alarms, because)) if because and because not in state.alarms else state
