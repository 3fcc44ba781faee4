"""Pure: what a site's metrics, which count from the beginning of a session, add up to over all of its sessions."""

from collections.abc import Sequence

from api.schemas import StoredPoint

__all__ = ["per_step", "total"]

_NEVER_FALL = (("bytes_up",), ("wait_s", "compute_s"))
"""Sums of these within a session: what it has sent, and how long it has lasted."""


def total(points: Sequence[StoredPoint], name: str) -> float:
    """Of points of one site, in any order; 0 if none tells."""
    return sum(own[-1][1] for own in _known(points, name))


def per_step(points: Sequence[StoredPoint], name: str) -> float:
    """Between the reports of each session: what it costs once before its first one, as entry 0, is in `total` only."""
    spans = [(own[-1][0] - own[0][0], own[-1][1] - own[0][1]) for own in _known(points, name)]
    steps = sum(steps for steps, _ in spans)
    return sum(counted for _, counted in spans) / steps if steps > 0 else 0.0


def _known(points: Sequence[StoredPoint], name: str) -> list[list[tuple[int, float]]]:
    """Steps and values by session; of sessions that report any."""
    told = [
        [(point.step, value) for point in session if (value := point.values.get(name)) is not None]
        for session in _sessions(points)
    ]
    return [own for own in told if own]


def _sessions(points: Sequence[StoredPoint]) -> list[list[StoredPoint]]:
    """In the order of time, since a site that starts again does so at an earlier step."""
    sessions: list[list[StoredPoint]] = []
    before: dict[tuple[str, ...], float] = {}
    for point in sorted(points, key=lambda point: (point.at, point.step)):
        now: dict[tuple[str, ...], float] = {
            names: value for names in _NEVER_FALL if (value := _sum(point, names)) is not None
        }
        if not sessions or any(value < before.get(names, value) for names, value in now.items()):
            sessions.append([])
            before = {}
        before |= now
        sessions[-1].append(point)
    return sessions


def _sum(point: StoredPoint, names: Sequence[str]) -> float | None:
    values = [value for name in names if (value := point.values.get(name)) is not None]
    return sum(values) if len(values) == len(names) else None
