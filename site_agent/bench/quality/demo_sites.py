"""DeMo as users run it: one optimizer and one replica per site, each in a thread of its own, in lockstep."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from threading import Barrier, BrokenBarrierError
from typing import Any

from torch import Tensor

from algorithms import DeMo
from algorithms.codec import pack_contribution
from algorithms.step_entry import StepEntry
from algorithms.updates import SparseUpdate
from site_agent.bench.quality.method import Sites, set_rate

__all__ = ["DeMoSites", "Round"]

_CHECK_EVERY = 100
"""Steps between two comparisons of all replicas."""


class Round:
    """The exchange of optimizers in threads: `partial(round, site)` is that of one site. The first one counts bytes.

    With `overlap` the entry is there one step later.
    """

    def __init__(self, sites: int, overlap: bool = False) -> None:
        self.sent = 0
        """Bytes of the packed contributions of site 0."""
        self._overlap = overlap
        self._contributions: list[SparseUpdate | None] = [None] * sites
        self._barrier = Barrier(sites)
        self._entry: StepEntry | None = None

    def __call__(
        self, site: int, optimizer: DeMo, contribution: SparseUpdate | None
    ) -> StepEntry | Callable[[], StepEntry]:
        self._contributions[site] = contribution
        if site == 0 and contribution is not None:
            settings = optimizer.settings
            arrays = pack_contribution(contribution, optimizer.layout, settings.codec, settings.indices)
            self.sent += sum(array.nbytes for array in arrays.values())
        if self._barrier.wait() == 0:
            sent = [contribution for contribution in self._contributions if contribution is not None]
            self._entry = optimizer.entry(sent, listed=True)
        self._barrier.wait()
        assert self._entry is not None
        entry = replace(self._entry, listed=contribution is not None)
        return (lambda: entry) if self._overlap else entry

    def abort(self) -> None:
        """Lets all other sites fail that wait, or will."""
        self._barrier.abort()


class DeMoSites:
    """DeMo with any settings of `DeMo(...)`. Sent: the packed arrays of every contribution.

    With `overlap` every entry is applied one step late.
    """

    def __init__(self, sites: Sites, overlap: bool = False, **settings: Any) -> None:
        self._sites = sites
        self._replicas = sites.replicas()
        self._round = Round(sites.count, overlap)
        self._optimizers = [
            DeMo(replica.named_parameters(), lr=0.0, exchange=partial(self._round, site), **settings)
            for site, replica in enumerate(self._replicas)
        ]
        self._threads = ThreadPoolExecutor(sites.count)
        self._steps = 0

    @property
    def sent(self) -> int:
        return self._round.sent

    def step(self, batches: Sequence[Tensor], lr: float) -> None:
        set_rate(self._optimizers, lr)
        futures = [self._threads.submit(self._step, site, batch) for site, batch in enumerate(batches)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, BrokenBarrierError)):
            raise error
        self._steps += 1
        if self._steps % _CHECK_EVERY == 0 or self._steps == self._sites.steps:
            for optimizer in self._optimizers:
                optimizer.settle()
            self._compare()

    def _step(self, site: int, batch: Tensor) -> None:
        try:
            self._sites.backward(self._replicas[site], batch)
            self._sites.clip(self._replicas[site])
            self._optimizers[site].step()
        except BaseException:
            self._round.abort()
            raise

    def _compare(self) -> None:
        """Raises RuntimeError unless all sites have the same bits."""
        if len({optimizer.parameters_digest() for optimizer in self._optimizers}) > 1:
            raise RuntimeError(f"the replicas differ after step {self._optimizers[0].steps}")
