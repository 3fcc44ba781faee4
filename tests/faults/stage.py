"""A coordinator with its Redis and three sites, all with traps, and what starts them again; runs that stop and go."""

import hashlib
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import stamina

from api.client import CoordinatorClient
from api.processes import Service
from api.schemas import Condition, Manifest, Run, RunStatus, SiteStatus
from api.specs import OptimizerSpec, RoundsSpec, RunSpec
from site_agent.chaos.checks import differing, lost, repeated, unchained
from site_agent.chaos.evidence import applied, journal, read_log, replay
from tests.conftest import ROOT, wait_until
from tests.faults.traps import Point, Traps, Victim
from tests.processes import processes_of

__all__ = ["REGIONS", "GatedRun", "Stage"]

REGIONS = {"a": "west", "b": "west", "c": "east"}
PATIENCE_S = 60.0
QUIET = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


class Stage:
    """A context manager, whose folder stays if something goes wrong. `options`: more of the coordinator's."""

    def __init__(self, *options: str, sites: tuple[str, ...] = tuple(REGIONS)) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kill-"))  # a short name: unix sockets have no long ones
        self.data = self.folder / "coordinator"
        self.traps = Traps(self.folder)
        self.sites = sites
        self._options = options
        self._services: dict[str, Service] = {}
        self._starts = 0

    def __enter__(self) -> Self:
        stamina.instrumentation.set_on_retry_hooks([])  # that the coordinator is away is no news here
        self.data.mkdir(parents=True)
        try:
            self._start_coordinator(port=0)
            self.url = self._services["coordinator"].wait_for_file(self.data / "url")
            self.client = CoordinatorClient(self.url, self.token, patience=PATIENCE_S)
            for site in self.sites:
                self._start_agent(site)
            wait_until(self._all_online, "all sites to register")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.client.close()
        self._end()
        if kind is None:
            shutil.rmtree(self.folder)

    def _end(self) -> None:
        for service in reversed(self._services.values()):
            service.interrupt()
        for service in reversed(self._services.values()):
            service.join()

    @property
    def token(self) -> str:
        return (self.data / "admin-token").read_text().strip()

    def site(self, name: str) -> Path:
        return self.folder / f"site-{name}"

    def _all_online(self) -> bool:
        return {site.name for site in self.client.sites() if site.status is SiteStatus.ONLINE} >= set(self.sites)

    def _start(self, name: str, module: str, arguments: list[str]) -> None:
        self._starts += 1
        log = self.folder / f"{self._starts:03}-{name}.log"
        self._services[name] = Service(module, arguments, log, ROOT, QUIET)

    def _start_coordinator(self, port: int) -> None:
        options = [str(self.folder), "--port", str(port), "--data-dir", str(self.data), "--heartbeat-s", "0.5"]
        self._start("coordinator", "tests.faults.killed_coordinator", [*options, "--tick-s", "0.2", *self._options])

    def _start_agent(self, site: str) -> None:
        options = {
            "--name": site,
            "--region": REGIONS[site],
            "--coordinator": self.url,
            "--join-token-file": str(self.data / "join-token"),
            "--site-dir": str(self.site(site)),
            "--task": f"kill=python -m tests.faults.killed_rank {self.folder} {site}",
            "--finish-s": "20",
            "--grace-s": "3",
        }
        self._start(site, "site_agent", [word for option in options.items() for word in option])

    # --- what was killed ----------------------------------------------------------------------------------------------

    def start_again(self, victim: Victim, site: str) -> None:
        """As whatever supervises them would; the coordinator starts its Redis again itself."""
        if victim == "redis":
            return
        self.kill("coordinator" if victim == "coordinator" else site)
        if victim == "site":
            wait_until(lambda: not processes_of(self.site(site)), f"the end of all processes of {site}")
        if victim == "coordinator":
            self._start_coordinator(int(self.url.rpartition(":")[2]))
        else:
            self._start_agent(site)

    def kill(self, name: str) -> None:
        """The coordinator, or the agent of a site."""
        self._services[name].kill()

    def set_options(self, *options: str) -> None:
        """Of coordinators that are started from now on."""
        self._options = options

    # --- blobs --------------------------------------------------------------------------------------------------------

    def require_whole_blobs(self) -> None:
        """Every blob in the store has the digest that it is named by."""
        for path in (self.data / "blobs").glob("??/*"):
            data = path.read_bytes()
            assert hashlib.sha256(data).hexdigest() == path.name, f"{path} is not whole"

    def require_no_drafts(self) -> None:
        left = list((self.data / "blobs" / "incoming").iterdir())
        assert not left, f"drafts are left: {left}"


class GatedRun:
    """A run whose sites train no further than it lets them."""

    def __init__(self, stage: Stage, *, steps: int, sites: tuple[str, ...], **spec: Any) -> None:
        self.stage = stage
        self.client = stage.client
        self.steps = steps
        self.reached = 0
        self.let(0)
        self.sites = sites
        self.made = self.client.create_run(
            RunSpec(
                name="killed",
                task="kill",
                steps=steps,
                sites=list(sites),
                optimizer=OptimizerSpec(lr=1e-3, k=32),
                rounds=RoundsSpec(deadline_s=3600.0, restarts=1000),
                **spec,
            )
        )
        self.id = self.client.start_run(self.made.id).id
        self.until(lambda run: run.status is RunStatus.RUNNING, "the begin")

    @property
    def view(self) -> Run:
        return self.client.run(self.id)

    def let(self, step: int) -> None:
        """Sites may train up to this step."""
        self.reached = min(step, self.steps)
        draft = self.stage.folder / "draft-of-gate"
        draft.write_text(str(self.reached))
        draft.rename(self.stage.folder / "gate")

    def until(self, condition: Callable[[Run], bool], what: str) -> Run:
        deadline = time.monotonic() + PATIENCE_S

        def there() -> Run | None:
            run = self.view
            assert not run.status.terminal or condition(run), f"run {run.status} before {what}: {run.reason}"
            assert time.monotonic() < deadline, f"waited for {what}: {_described(run)}"
            return run if condition(run) else None

        return wait_until(there, what, 2 * PATIENCE_S)

    def settled(self, run: Run) -> bool:
        """All that was let has happened, everywhere, and all sites are there."""
        every = run.spec.outer.every if run.spec.outer else None
        outer = run.outer_rounds == self.reached // every if every else True
        there = all(member.condition is Condition.ACTIVE for member in run.members)
        done = all(region.step == self.reached for region in run.regions)
        return outer and there and done and run.status is RunStatus.RUNNING

    def strike(self, point: Point, victim: Victim, site: str, go_on: Callable[[], object]) -> None:
        """Arms the trap, goes on, which may take until all is well again, and starts again what has been killed."""
        self.stage.traps.arm(point, victim, site)
        with ThreadPoolExecutor(1) as pool:
            going = pool.submit(go_on)
            self._bring_back(point, victim)
            going.result()

    def _bring_back(self, point: Point, victim: Victim) -> None:
        wait_until(lambda: self.stage.traps.sprung, f"{victim} to be killed when: {point.name}", PATIENCE_S)
        killed = self.stage.traps.killed_site
        before = self._attempts(killed)
        self.stage.start_again(victim, killed)
        if victim == "site":  # until then the coordinator may not have noticed
            wait_until(lambda: self._attempts(killed) > before, f"new ranks of {killed}", PATIENCE_S)

    def _attempts(self, site: str) -> int:
        """How often the site has started ranks."""
        return len(list((self.stage.site(site) / "runs" / self.id).iterdir()))

    def end(self) -> Run:
        self.let(self.steps)
        return self.until(lambda run: run.status.terminal, "the end")

    def until_trained(self, step: int) -> None:
        """Until all sites have said that they have trained so far, whatever the coordinator knows of it."""
        wait_until(lambda: all(max(said, default=0) >= step for said in self.said().values()), f"step {step}")

    # --- what must be true --------------------------------------------------------------------------------------------

    def said(self) -> dict[str, dict[int, str]]:
        """The digest of the parameters after each step, by region; all processes of one must agree."""
        lines = [one for site in self.sites for one in applied(self.stage.site(site), self.made, site, REGIONS[site])]
        assert differing(lines) == []
        found: dict[str, dict[int, str]] = {REGIONS[site]: {} for site in self.sites}
        for process in lines:
            found.setdefault(process.region, {}).update(dict(process.steps))
        return found

    def snapshots(self, last: int) -> list[Manifest]:
        """Every one that is listed, the last of this number; each is whole, by what it names."""
        wait_until(lambda: last in [item.number for item in self.client.snapshots(self.id).items], f"snapshot {last}")
        manifests = []
        for item in self.client.snapshots(self.id).items:
            manifest = Manifest.model_validate_json(self.client.get_blob(item.manifest))
            assert (manifest.number, manifest.step, manifest.run) == (item.number, item.step, self.id)
            momenta = manifest.outer.momenta if manifest.outer else []
            named = [*manifest.parameters, manifest.layout["blob"], manifest.buffers, *momenta]
            for digest in named:
                if digest is not None:
                    self.client.get_blob(digest)
            manifests.append(manifest)
        assert manifests[-1].number == last
        return manifests

    def parameters(self, manifest: Manifest) -> str:
        """The digest of all parameters of a snapshot."""
        data = b"".join(self.client.get_blob(digest) for digest in manifest.parameters)
        return hashlib.sha256(data).hexdigest()

    def judge(self, *, whole_log: bool = True) -> str:
        """All that `isthmus chaos` asks for, at the end; the digest with which every site ended."""
        run = self.view
        assert run.status is RunStatus.SUCCEEDED, run.reason
        digests = {member.site: member.digest for member in run.members}
        assert len(set(digests.values())) == 1, digests
        self.said()
        self.stage.require_whole_blobs()
        assert replay(self.stage.url, self.stage.token, run.id) == ""
        if whole_log:
            self._require_log(run)
        (digest,) = set(digests.values())
        assert digest is not None
        return digest

    def _require_log(self, run: Run) -> None:
        there = {member.site: REGIONS[member.site] for member in run.members}
        logs = {region: read_log(self.client, run.id, region) for region in set(there.values())}
        said = [one for site, region in there.items() for one in applied(self.stage.site(site), run, site, region)]
        journals = {site: journal(self.stage.site(site), run) for site in there}
        assert all(journals.values())
        assert [*lost(journals, logs, there), *unchained(logs), *repeated(logs, said)] == []


def _described(run: Run) -> str:
    members = ", ".join(f"{member.site} {member.condition} (attempt {member.attempt})" for member in run.members)
    regions = ", ".join(f"{region.name} at {region.step}" for region in run.regions)
    return f"{run.status}, {regions}, {run.outer_rounds} outer rounds, {members}; {run.reason}; alarms {run.alarms}"
