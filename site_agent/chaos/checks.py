"""Pure: what the sites have written down about themselves, held against the log. Each check returns what is wrong."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from api.payload import digest_json
from site_agent.journal import Line

__all__ = ["Applied", "differing", "lost", "repeated", "unchained"]

Header = Mapping[str, Any]
Logs = Mapping[str, Sequence[Header]]
"""All entry headers, by region."""


@dataclass(frozen=True)
class Applied:
    """What one process said of its parameters after each of its steps."""

    site: str
    region: str
    steps: Sequence[tuple[int, str]]


def lost(journals: Mapping[str, Iterable[Line]], logs: Logs, regions: Mapping[str, str]) -> list[str]:
    """Contributions that were accepted, and are neither listed nor refused."""
    found = []
    for site, lines in journals.items():
        entries = {header["step"]: header for header in logs[regions[site]] if header["kind"] == "step"}
        for line in lines:
            if line.answer == "accepted" and not _accounted_for(site, line, entries.get(line.step)):
                found.append(f"site {site}, step {line.step}: {line.digest[:12]} was accepted and is not listed")
    return found


def _accounted_for(site: str, line: Line, entry: Header | None) -> bool:
    if entry is None:
        return False
    listed = {(sent["site"], sent["digest"]) for sent in entry["contributors"]}
    return (site, line.digest) in listed or any(refusal["site"] == site for refusal in entry["refusals"])


def unchained(logs: Logs) -> list[str]:
    """Entries that do not follow the one before."""
    found = []
    for region, headers in logs.items():
        previous = "0" * 64
        for seq, header in enumerate(headers):
            if (header["seq"], header["previous"]) != (seq, previous):
                found.append(f"region {region}: entry {header['seq']} does not follow the one before it")
            previous = digest_json(header)
    return found


def repeated(logs: Logs, applied: Iterable[Applied]) -> list[str]:
    """Steps that a log has twice, contributions that are listed twice, steps that a process has applied twice."""
    found = []
    for region, headers in logs.items():
        steps = [header for header in headers if header["kind"] == "step"]
        found += [f"region {region}: step {step} again" for step in _again([header["step"] for header in steps])]
        sent = [line["digest"] for header in steps for line in header["contributors"]]
        if len(set(sent)) < len(sent):
            found.append(f"region {region}: a contribution is listed twice")
    for process in applied:
        again = _again([step for step, _ in process.steps])
        found += [f"site {process.site}: a process has applied step {step} again" for step in again]
    return found


def _again(steps: Sequence[int]) -> list[int]:
    return [step for before, step in pairwise(steps) if step <= before]


def differing(applied: Iterable[Applied]) -> list[str]:
    """Steps after which two processes of a region held different parameters."""
    held: dict[tuple[str, int], dict[str, str]] = {}
    for process in applied:
        for step, digest in process.steps:
            held.setdefault((process.region, step), {}).setdefault(digest, process.site)
    return [
        f"region {region}, step {step}: parameters differ between {', '.join(digests.values())}"
        for (region, step), digests in sorted(held.items())
        if len(digests) > 1
    ]
