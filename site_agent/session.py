"""What a training script uses: `join()`, and of the site it gives, `optimizer`, `batches`, `evaluate` and `log`."""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import structlog
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from algorithms import DeMo
from algorithms.flat import FlatParameters
from algorithms.traffic import ddp_bytes, parameters_bytes
from api.client import CoordinatorClient
from api.errors import GoneError, IsthmusError, ProblemError
from api.schemas import FinalReport, JoinReply, JoinRequest, StartUpload
from api.specs import RunSpec
from api.transport import transport_to
from site_agent.buffers import buffer_bytes, save_buffers
from site_agent.catch_up import CatchUp
from site_agent.counting import CountingTransport, counted_as_outer
from site_agent.exchange import WAIT_S, Exchange
from site_agent.fetched import fetched
from site_agent.inner import Factory, InnerParameters, LocalSteps, inner_optimizer
from site_agent.local_ranks import LocalRanks
from site_agent.metrics import Metrics
from site_agent.outer import OuterRounds
from site_agent.replica import Replica, parameters_source
from site_agent.saved_momentum import SavedMomentum, load_momentum, save_momentum
from site_agent.settings import Session, load_session
from site_agent.snapshots import Snapshots
from site_agent.stop import Stop

__all__ = ["Site", "join"]

B = TypeVar("B")

log = structlog.get_logger()

_ENDED = b""

_PATIENCE_S = 86_400.0
"""A run outlives an outage of its coordinator; if it ends meanwhile, the agent stops its ranks."""


@contextlib.contextmanager
def join() -> Iterator["Site"]:
    """Joins the run that this process was started for.

    Raises:
        IsthmusError: no agent has started this process; or the coordinator refuses, with its reason.
    """
    session, place = load_session()
    with Stop() as stop:
        ranks = LocalRanks(place)
        transport = CountingTransport(transport_to(session.coordinator, session.ca_file))
        client = _client(session, transport) if ranks.rank == 0 else None
        site = Site(session, ranks, client, transport, stop)
        try:
            yield site
        finally:
            site.keep_momentum()
            if client is not None:
                client.close()
            if not stop.asked:  # the others are ending, too
                ranks.close()


def _client(session: Session, transport: CountingTransport) -> CoordinatorClient:
    return CoordinatorClient(session.coordinator, session.secret, transport=transport, patience=_PATIENCE_S)


class Site:
    """This rank's side of a run.

    Attributes:
        rank, ranks: this rank among the ranks of the site.
        name, device, spec: the site's name, where to train, and what.
        seed: differs between runs, sites, ranks (rule C10) and attempts: a site started again sees other data.
    """

    def __init__(
        self,
        session: Session,
        ranks: LocalRanks,
        client: CoordinatorClient | None,
        transport: CountingTransport,
        stop: Stop,
    ) -> None:
        self._session = session
        self._local = ranks
        self._client = client
        self._stop = stop
        spec = client.run(session.run).spec.model_dump_json().encode() if client else None
        self.spec = RunSpec.model_validate_json(ranks.share(spec))
        self.name, self.rank, self.ranks, self.device = session.site, ranks.rank, ranks.count, ranks.device
        again = [] if session.attempt == 1 else [session.attempt]
        self.seed = _seed(self.spec.seed, session.run, session.site, ranks.rank, *again)
        self._alone = LocalSteps(self.spec) if self.spec.exchange == "none" else None
        self._exchange = self._alone or Exchange(self.spec, session, ranks, client, stop)
        self._metrics = Metrics(session, client, transport)
        self._evaluation: tuple[Callable[[], float], int | None] | None = None
        self._holder: FlatParameters | None = None
        self._demo: DeMo | None = None
        self._entered = False

    # --- the optimizer ------------------------------------------------------------------------------------------------

    def optimizer(self, model: nn.Module, inner: Factory | None = None) -> Optimizer:
        """The optimizer that the run's spec names, its parameters those of the log's head.

        Returns when every site has joined. Parameters of one dimension or none are in group `no_decay`, the others in
        `decay`. With `optimizer.kind` custom, `inner` makes it of groups of named parameters; the spec's learning rate,
        schedule and weight decay hold for it, too.
        Raises IsthmusError if it is called twice, or with several ranks and a model without DistributedDataParallel, or
        if the optimizer cannot be had; ProblemError if another site's model has another layout.
        """
        if self._holder is not None:
            raise IsthmusError("site.optimizer() was called twice: a run trains one model")
        if self.ranks > 1 and not any(isinstance(module, DistributedDataParallel) for module in model.modules()):
            raise IsthmusError(
                f"this site has {self.ranks} ranks, but the model is not wrapped in DistributedDataParallel: only "
                "rank 0's gradients would count"
            )
        optimizer, holder = self._made(_groups(model), inner)
        self._hold(model, holder)
        if isinstance(self._exchange, Exchange):
            self._exchange.attach(self._replica)
        else:
            self._exchange.attach(self._replica, optimizer)
        self._metrics.describe(
            ddp_bytes_per_step=float(ddp_bytes(holder.layout)),
            parameter_bytes=float(parameters_bytes(holder.layout)),
        )
        if self._client is not None:
            buffers = partial(save_buffers, model)
            self._snapshots = Snapshots(self._session, self._client, holder, self._replica, buffers)
        self._begin(model, holder)
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        return optimizer

    def _made(self, groups: list[dict[str, Any]], inner: Factory | None) -> tuple[Optimizer, FlatParameters]:
        """The optimizer, and what holds its parameters."""
        spec = self.spec.optimizer
        if isinstance(self._exchange, LocalSteps):
            optimizer = inner_optimizer(spec, groups, inner)
            return optimizer, optimizer if isinstance(optimizer, DeMo) else InnerParameters(groups, optimizer, spec)
        if inner is not None:
            raise IsthmusError("inner= needs optimizer.kind = custom, and exchange = none, in the run's spec")
        owned = (self.rank, self.ranks)
        self._demo = DeMo(groups, lr=spec.lr, exchange=self._exchange, owned=owned, **spec.settings())
        return self._demo, self._demo

    def _hold(self, model: nn.Module, holder: FlatParameters) -> None:
        """The replica of the parameters, and who keeps it up to date."""
        outer = self.spec.outer
        self._holder = holder
        self._replica = Replica(
            holder,
            model,
            holder.layout.fragments(outer.fragments) if outer else (),
            self.name,
            partial(fetched, self._client, self._local.share, self._session.folder),
            self._fetch_part,
            self.spec.part_bytes,
            indices=self.spec.optimizer.indices,
            schedule=self.spec.outer_schedule,
            mix=outer.mix if outer else 1.0,
            resets=self.spec.forgets,
            keeps_anchors=outer is not None and outer.codec != "fp32" and self._client is not None,
        )
        place = self._session, self._local, self._client
        self._outer = OuterRounds(self.spec, *place, self._replica, holder.layout)
        self._catch_up = CatchUp(*place, self._demo, self._replica, self._stop)

    def _fetch_part(self, seq: int, part: int) -> bytes:
        place = (self._session.run, self._session.region, seq, part)
        return self._local.share(self._client.entry(*place) if self._client else None)

    def _begin(self, model: nn.Module, holder: FlatParameters) -> None:
        """Returns at the head of the log: at entry 0 once every site has joined, or later in a run that goes on.

        Ends the process, with status 0, if the run has ended meanwhile: nothing is left to do for it.
        """
        joined = self._local.share(self._join(model, holder) if self._client else None)
        if joined == _ENDED:
            raise SystemExit
        reply = JoinReply.model_validate_json(joined)
        self._exchange.evaluates = reply.evaluate
        start = self._client.log(self._session.run, self._session.region, 0, 1).items[0] if self._client else None
        header = json.loads(self._local.share(json.dumps(start).encode() if start else None))
        self._replica.listed = reply.listed
        self._go_on(self._catch_up.enter(header, reply.resume, self._kept_momentum(reply)))
        self._entered = True

    def _join(self, model: nn.Module, holder: FlatParameters) -> bytes:
        """The answer to `_enter`, or `_ENDED` if the run has ended."""
        try:
            return self._enter(model, holder)
        except GoneError as error:
            return _quietly(error)

    def _enter(self, model: nn.Module, holder: FlatParameters) -> bytes:
        """Presents the layout until there is an entry 0, and uploads that if this site is to (rule A3)."""
        assert self._client is not None
        run, site = self._session.run, self._session.site
        request = JoinRequest(
            attempt=self._session.attempt, layout=holder.layout.to_json(), buffer_bytes=buffer_bytes(model)
        )
        while True:
            reply = self._client.join(run, site, request)
            if reply.upload_start:
                self._upload_start(model, holder)
            page = self._client.log(run, self._session.region, 0, 1, WAIT_S)
            if page.items:
                return reply.model_dump_json().encode()
            if page.ended:
                raise GoneError("run_ended", "the run ended before all of its sites had joined")

    def _upload_start(self, model: nn.Module, holder: FlatParameters) -> None:
        assert self._client is not None
        tensors = range(len(holder.layout.tensors))
        buffers = save_buffers(model)
        start = StartUpload(
            parameters=self._client.put_blob(parameters_source(holder, tensors)),
            buffers=self._client.put_blob(buffers) if buffers is not None else None,
        )
        try:
            self._client.upload_start(self._session.run, self._session.site, start)
        except ProblemError as error:
            if error.code not in ("not_the_donor", "other_bytes"):  # another site has become the donor
                raise

    # --- from one attempt to the next ---------------------------------------------------------------------------------

    @property
    def _momentum_file(self) -> Path:
        """Beside the folders of all attempts."""
        return self._session.folder.parent / f"momentum-{self.rank}.safetensors"

    def keep_momentum(self) -> None:
        """If these ranks have been told to end while the run goes on, the next ones may use it (rule A10)."""
        demo, exchange = self._demo, self._exchange
        if demo is None or not isinstance(exchange, Exchange) or not self._stop.asked or not self._entered:
            return
        if exchange.ended or self._step == self.spec.steps:
            return
        assert self._replica.position is not None
        seq, listed = self._replica.position.seq, self._replica.listed
        save_momentum(self._momentum_file, demo, SavedMomentum(demo.momentum(), seq, listed, exchange.on_its_way))

    def _kept_momentum(self, reply: JoinReply) -> SavedMomentum | None:
        """If all ranks have what is good, they all use it. Where there are no rounds nothing is kept."""
        if self._demo is None:
            return None
        try:
            saved = load_momentum(self._momentum_file, self._demo)
        except ValueError as error:
            log.warning("beginning without momentum", error=str(error))
            saved = None
        enters = 0 if reply.resume is None else reply.resume.position.seq
        good = saved is not None and saved.is_good(reply.listed, enters, self.spec.optimizer.subtract)
        if saved is not None and not good:
            log.info("the momentum of earlier ranks is out of date", entry=saved.seq, listed=reply.listed)
        everybody = self._local.gather(b"good" if good else b"")
        if not self._local.share((b"good" if all(everybody) else b"") if self._client is not None else None):
            return None
        assert saved is not None
        log.info("going on with the momentum of earlier ranks", entry=saved.seq)
        return saved

    # --- the end of a step --------------------------------------------------------------------------------------------

    def _before_step(self, *_: object) -> None:
        """The gradients are there: now the step before must be over. From here on momentum changes."""
        self._stop.hold()
        if self._alone is not None:
            self._alone.begin()
        elif not self._settled:
            self._settle()

    def _after_step(self, *_: object) -> None:
        if not self._exchange.ended and (self._settled or self._is_looked_at(self._step + 1)):
            self._settle()
        self._stop.let_go()

    @property
    def _settled(self) -> bool:
        return self._demo is None or self._demo.settled

    def _is_looked_at(self, step: int) -> bool:
        """Whether the parameters after this step are wanted before the next one: for them nothing overlaps."""
        every = self._evaluation[1] if self._evaluation else None
        evaluated = every is not None and step % every == 0
        return evaluated or step == self.spec.steps or self._replica.outer.concerns(step)

    def _settle(self) -> None:
        """Ends a step: its entry is applied, or those of others if its round was closed without this site."""
        if self._alone is not None:
            self._alone.end()
        behind = self._demo is not None and self._entry_missed(self._demo)
        if self._exchange.ended:
            return
        if isinstance(self._exchange, Exchange) and self._exchange.snapshot is not None:
            self._snapshots.take(self._exchange.snapshot)
            self._exchange.snapshot = None
        self._go_on(not behind or self._catch_up.to_head(WAIT_S))  # the entry may still be in the making
        if self._exchange.ended:
            return
        self._metrics.flush_sometimes(self._step, self._exchange.wait_s + self._outer.wait_s)
        every = self._evaluation[1] if self._evaluation else None
        if every and self._step % every == 0 and self._step < self.spec.steps:
            self._evaluate()

    def _entry_missed(self, demo: DeMo) -> bool:
        """Whether the round of the step that ends here was closed without this site."""
        demo.settle()
        return isinstance(self._exchange, Exchange) and self._exchange.behind

    def _go_on(self, running: bool) -> None:
        """Takes part in the outer rounds that concern this step, and catches up with one held without this site."""
        while running and self._outer.due:
            begun = self._outer.begun
            with self._stop.let(), counted_as_outer():
                running = self._outer.go_on(self._exchange.tokens)
            if self._alone is not None:
                self._alone.evaluates = self._outer.evaluates
                if self._outer.begun != begun:
                    self._alone.tokens = 0
            if running and self._outer.left_out:
                running = self._catch_up.to_head()
        self._exchange.ended = not running

    @property
    def _step(self) -> int:
        """Of the last entry applied."""
        return self._replica.step if self._holder is not None else 0

    # --- the loop -----------------------------------------------------------------------------------------------------

    def batches(self, loader: Iterable[B], tokens: Callable[[B], int] | None = None) -> Iterator[B]:
        """Batches until the run ends; a loader that is exhausted starts over, if it can.

        `tokens` counts a batch's tokens; by default, the elements of its first integer tensor, or else its samples.
        Raises IsthmusError if there is no optimizer yet, or if the loader is empty.
        """
        if self._holder is None:
            raise IsthmusError("call site.optimizer(model) before site.batches(loader)")
        count = tokens or _tokens
        self._evaluate()
        self._metrics.start(self._step)
        endless = _endless(loader)
        while not self._exchange.ended and self._step < self.spec.steps:
            batch = next(endless)
            number = count(batch)
            self._exchange.tokens += number
            self._metrics.tokens += number
            yield batch
        self._finish(self._holder)

    def evaluate(self, function: Callable[[], float], every: int | None = None) -> None:
        """Registers the held-out evaluation: run at one site, at entry 0, every N steps and after the last entry.

        `function` returns the held-out loss; it runs at rank 0 of the lowest-named site that is there (rule C10).
        """
        self._evaluation = (function, every)

    def _evaluate(self) -> None:
        """Rank 0 evaluates; the others wait on the store, not in the next collective (rule A16)."""
        if self._evaluation is None:
            return
        with self._stop.let():
            if self._client is not None and self._exchange.evaluates:
                self._metrics.log(self._step, {"heldout_loss": self._evaluation[0]()})
            self._local.share(b"" if self._client is not None else None)

    def log(self, **values: float) -> None:
        """Metrics of the last step; only rank 0's are kept, sent about once a second."""
        self._metrics.log(self._step + (not self._settled), values)

    def _finish(self, holder: FlatParameters) -> None:
        self._evaluate()
        self._metrics.flush(self._step, self._exchange.wait_s + self._outer.wait_s)
        if self._client is None or self._exchange.ended:
            return
        self._snapshots.finish()
        assert self._replica.position is not None
        report = FinalReport(seq=self._replica.position.seq, digest=holder.parameters_digest())
        try:
            if self._client.report_final(self._session.run, self._session.site, report).upload:
                tensors = range(len(holder.layout.tensors))
                self._client.put_blob(parameters_source(holder, tensors))
                buffers = self._replica.save_buffers()
                if buffers is not None:
                    report = report.model_copy(update={"buffers": self._client.put_blob(buffers)})
                self._client.report_final(self._session.run, self._session.site, report)
        except GoneError as error:
            _quietly(error)


def _quietly(error: GoneError) -> bytes:
    """Says why the run has ended, which is no failure of this site; any other reason is."""
    if error.code != "run_ended":
        raise error
    log.info("the run has ended", reason=error.detail)
    return _ENDED


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    named = [(name, parameter) for name, parameter in model.named_parameters()]
    groups = [
        {"name": "decay", "params": [(name, parameter) for name, parameter in named if parameter.ndim >= 2]},
        {"name": "no_decay", "params": [(name, parameter) for name, parameter in named if parameter.ndim < 2]},
    ]
    return [group for group in groups if group["params"]]


def _seed(*parts: object) -> int:
    return int.from_bytes(hashlib.sha256(json.dumps(parts).encode()).digest()[:7], "big")


def _endless(loader: Iterable[B]) -> Iterator[B]:
    total = before = 0
    while True:
        for batch in loader:
            total += 1
            yield batch
        if total == before:
            raise IsthmusError(
                f"the loader given to site.batches() ended after {total} batches and cannot start over: give one that "
                "can, such as a list or a DataLoader, or a generator without end"
            )
        before = total


def _tokens(batch: Any) -> int:
    """Elements of an integer tensor, samples of any other; of the first tensor in a batch of several."""
    while isinstance(batch, (list, tuple, dict)):
        batch = next(iter(batch.values() if isinstance(batch, dict) else batch))
    if isinstance(batch, np.ndarray):
        batch = torch.from_numpy(batch)
    if not isinstance(batch, Tensor):
        raise IsthmusError(f"cannot count the tokens of a {type(batch).__name__}: pass tokens= to site.batches()")
    return batch.numel() if not batch.is_floating_point() else len(batch)
