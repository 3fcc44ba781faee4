"""Pure: what a site's metrics, which count from the beginning of a session, add up to over all of its sessions."""

from collections.abc import Sequence

from api.schemas import StoredPoint

__all__ = ["per_step", "total"]


def total(points: Sequence[StoredPoint], name: str) -> float:
    """Of points of one site, in any order; 0 if none tells."""
    return sum(own[-1][1] for own in _known(points, name))


def per_step(points: Sequence[StoredPoint], name: str) -> float:
    """Between the reports of each session: what it costs once before its first one, as entry 0, is in `total` only."""
    spans = [(own[-1][0] - own[0][0], own[-1][1] - own[0][1]) for own in _known(points, name)]
    steps = sum(steps for steps, _ in spans)
    return sum(counted for _, counted in spans) / steps if steps > 0 else 0.0


def _known(points: Sequence[StoredPoint], name: str) -> list[list[tuple[int, float]]]:
    """Steps and values, in the order of time, by session; of sessions that report any."""
    sessions: dict[str, list[tuple[int, float]]] = {}
    for point in sorted(points, key=lambda point: (point.at, point.step)):
        value = point.values.get(name)
        if value is not None:
            sessions.setdefault(point.session, []).append((point.step, value))
    return list(sessions.values())
