"""Rebuilds the parameters of one region from its log, over the REST API, one entry in memory at a time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from algorithms import DeMo
from algorithms.layout import ParameterLayout
from algorithms.settings import STATEFUL_BASE_UPDATES, SettingsDict
from api.client import CoordinatorClient, UnreachableError
from api.errors import GoneError, IsthmusError
from api.payload import digest_json
from api.schemas import Manifest, Position, Resume, Run
from api.specs import InForce
from site_agent.fetched import fetched
from site_agent.replica import Replica

__all__ = ["Rebuilt", "empty_parameters", "rebuild"]

Header = dict[str, Any]
Progress = Callable[[int, int], None]
"""Is told the number of the entry just applied, and that of the last one to come."""


@dataclass(frozen=True)
class Rebuilt:
    """The parameters after an entry.

    Attributes:
        first: the entry at which the log was entered.
        seq, step: of the last entry applied.
        digest: of the parameters after it.
        whole: whether that was the last of the log when the replay began.
        copies: how many copies of fragments that the region's sites had announced were compared.
        differing: anchor entries before which the sites held another copy than this.
    """

    region: str
    first: int
    seq: int
    step: int
    digest: str
    whole: bool
    copies: int
    differing: tuple[int, ...]


def empty_parameters(layout: ParameterLayout, settings: SettingsDict) -> DeMo:
    """A DeMo without a model: zeros of the layout's names, shapes and groups, which never have a momentum."""
    groups: list[dict[str, Any]] = [{"name": name, "params": []} for name in layout.groups]
    for tensor in layout.tensors:
        parameter = nn.Parameter(torch.zeros(tensor.shape), requires_grad=False)
        groups[tensor.group]["params"].append((tensor.name, parameter))
    local: SettingsDict = {**settings, "subtract": "local"}
    optimizer = DeMo(groups, lr=0.0, **local)
    if optimizer.layout.digest != layout.digest:
        raise IsthmusError(f"layout {layout.digest} does not go with the optimizer settings of the run")
    return optimizer


def rebuild(
    client: CoordinatorClient,
    run: Run,
    region: str,
    to: int | None,
    progress: Progress,
    snapshot: Manifest | None = None,
) -> Rebuilt:
    """The parameters after step `to`, or after the whole log; from a snapshot of the run on, or from entry 0.

    Raises:
        IsthmusError: an entry that does not fit, by its number; or `to` cannot be reached, or not from the snapshot.
    """
    with TemporaryDirectory(prefix="isthmus-replay-") as folder:
        return _Rebuild(client, run, region, Path(folder), snapshot).run(to, progress)


class _Rebuild:
    def __init__(
        self, client: CoordinatorClient, run: Run, region: str, folder: Path, snapshot: Manifest | None
    ) -> None:
        self._client = client
        self._run = run
        self._region = region
        layout = ParameterLayout.from_json(client.layout(run.id))
        self._optimizer = empty_parameters(layout, run.spec.optimizer.settings())
        fragments = layout.fragments(run.spec.outer.fragments) if run.spec.outer else ()
        self._fetch = partial(fetched, client, _alone, folder)
        self._replica = Replica(
            self._optimizer,
            None,
            fragments,
            "",
            self._fetch,
            partial(client.entry, run.id, region),
            run.spec.part_bytes,
            indices=run.spec.optimizer.indices,
            schedule=run.spec.outer_schedule,
            mix=run.spec.outer.mix if run.spec.outer else 1.0,
        )
        self._snapshot = snapshot
        self._first = 0
        self._copies = 0
        self._differing: list[int] = []
        self._apply = {"start": self._start, "step": self._step, "anchor": self._anchor}
        self._apply["change"] = self._replica.apply_change

    def run(self, to: int | None, progress: Progress) -> Rebuilt:
        head = self._client.log(self._run.id, self._region, 0, 1).head
        if head is None:
            raise IsthmusError(f"run {self._run.id} is {self._run.status} and has no entry 0 yet: nothing to replay")
        if self._snapshot is not None:
            self._begin(self._snapshot, to)
        for header in self._headers(head, to):
            self._take(header)
            progress(header["seq"], head.seq)
        position = self._replica.position
        assert position is not None
        if position.seq == head.seq and position != head:
            raise IsthmusError(f"{self._where(head.seq)} is another than the coordinator says that the log ends with")
        return Rebuilt(
            region=self._region,
            first=self._first,
            seq=position.seq,
            step=self._replica.step,
            digest=self._optimizer.parameters_digest(),
            whole=position == head,
            copies=self._copies,
            differing=tuple(self._differing),
        )

    def _headers(self, head: Position, to: int | None) -> Iterator[Header]:
        """Each one is expected to be applied before the next is asked for."""
        while self._replica.next_seq <= head.seq:
            try:
                page = self._client.log(self._run.id, self._region, self._replica.next_seq, head.seq + 1)
            except GoneError as error:
                if error.code != "log_trimmed":
                    raise
                self._enter_later(Resume.model_validate(error.context["resume"]), to)
                continue
            for header in page.items:
                if to is not None and header["step"] > to:
                    return
                yield header

    def _begin(self, snapshot: Manifest, to: int | None) -> None:
        """At a snapshot. What settings were in force there does not matter: every entry says with which it was made."""
        which, spec = f"snapshot {snapshot.number} of run {self._run.id}", self._run.spec
        if self._region not in snapshot.positions:
            there = ", ".join(snapshot.positions)
            raise IsthmusError(f"{which} is of region {there}, not of {self._region}: add --region {there}")
        if spec.exchange != "none" and spec.optimizer.base_update in STATEFUL_BASE_UPDATES:
            raise IsthmusError(
                f"{which} lacks the state of base update {spec.optimizer.base_update}, to which only the whole "
                "log leads: leave out --from"
            )
        if to is not None and to < snapshot.step:
            raise IsthmusError(f"{which} is after step {snapshot.step}: it does not lead to step {to} (--to)")
        self._enter(
            Resume(
                position=snapshot.positions[self._region],
                step=snapshot.step,
                outer_round=snapshot.outer.rounds if snapshot.outer else 0,
                outer_step=snapshot.step,
                in_force=InForce(
                    lr=spec.optimizer.lr, k=spec.optimizer.k, every=spec.outer.every if spec.outer else None
                ),
                anchors=snapshot.parameters,
                buffers=snapshot.buffers,
            )
        )

    def _enter_later(self, resume: Resume, to: int | None) -> None:
        """Where the log begins now."""
        if self._snapshot is not None:
            raise IsthmusError(
                f"what follows snapshot {self._snapshot.number} was trimmed from the log of region {self._region}, now "
                f"it begins behind step {resume.step}: name a newer one (`isthmus run snapshots {self._run.id}`)"
            )
        if to is not None and to < resume.step:
            raise IsthmusError(
                f"the log of region {self._region} begins behind step {resume.step}, what was before was trimmed: step "
                f"{to} cannot be rebuilt"
            )
        self._enter(resume)

    def _enter(self, resume: Resume) -> None:
        self._replica.resume(resume)
        self._first = resume.position.seq

    def _take(self, header: Header) -> None:
        """Everything that can be wrong with an entry is an error that names it."""
        try:
            if header["kind"] not in self._apply:
                raise IsthmusError(f"it is of kind {header['kind']!r}, which this version does not know")
            self._apply[header["kind"]](header)
            assert self._replica.position is not None
            if self._replica.position.hash != digest_json(header):
                raise IsthmusError("its message carries another header than the log")
        except UnreachableError:
            raise
        except (IsthmusError, ValueError) as error:
            raise IsthmusError(f"{self._where(header['seq'])}: {error}") from error

    def _where(self, seq: int) -> str:
        return f"run {self._run.id}, region {self._region}, entry {seq}"

    def _start(self, header: Header) -> None:
        self._replica.apply_start(header)
        if header["buffers"] is not None:
            with self._fetch(header["buffers"]):
                pass

    def _step(self, header: Header) -> None:
        message = self._client.entry(self._run.id, self._region, header["seq"])
        self._optimizer.apply(self._replica.read_step(message))

    def _anchor(self, header: Header) -> None:
        """The copy that most sites of the region held before the outer step must be what the steps lead to.

        Where the log has no steps there is nothing to compare.
        """
        listed = {line["region"]: line["digest"] for line in header["participants"]}
        self._replica.begin_outer_round()
        if (
            self._region in listed
            and self._run.spec.exchange != "none"
            and not self._replica.is_buffers(header["fragment"])
        ):
            self._copies += 1
            if self._replica.fragment_digest(header["fragment"]) != listed[self._region]:
                self._differing.append(header["seq"])
        self._replica.apply_anchor(header)


def _alone(data: bytes | None) -> bytes:
    assert data is not None
    return data
