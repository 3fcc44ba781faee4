"""The states of a run that requests are sent in. Each goes on afterwards as if nothing had been sent."""

import hashlib
import re
import secrets

import httpx

from api.access import TokenRequest
from api.payload import contribution_digest, decode_message
from api.schemas import Abstention
from api.specs import OuterSpec, RunSpec
from tests.conftest import LiveCoordinator, wait_until
from tests.contract.by_hand import LAYOUT, TASK, WAIT_S, RunByHand, SiteByHand, new_name

__all__ = ["RUNNING", "State", "lost_tokens"]

STEPS = 100_000
FRAGMENTS = 2


def lost_tokens(live: LiveCoordinator) -> dict[str, str]:
    """Tokens that are good no more, or never were."""
    admin = live.client()
    revoked = admin.create_token(TokenRequest(scope="admin", name="revoked"))
    expired = admin.create_token(TokenRequest(scope="admin", name="expired", expires_in_s=1))
    admin.revoke_token(revoked.id)
    removed = SiteByHand(new_name(), "west", live.url)
    removed.register(live.token("join"))
    admin.remove_site(removed.name)
    wait_until(lambda: expired.id not in [token.id for token in admin.tokens()], "the token to expire", 10)
    tokens = {"revoked": revoked.token, "expired": expired.token, "removed": removed.secret}
    return tokens | {"unknown": secrets.token_urlsafe(32)}


class State:
    """A run of two sites, `SITE` and `OTHER`; who sends is mostly `SITE`, whose ranks are of attempt 2.

    Args:
        lost: tokens by what became of them.

    `words` says what the words in capitals stand for; `seen` is what a refused request must not change.
    """

    name = "a round is open"
    steps = STEPS
    regions = ("west", "west")
    outer: OuterSpec | None = None

    def __init__(self, live: LiveCoordinator, lost: dict[str, str]) -> None:
        self.live, self.url, self.admin = live, live.url, live.client()
        self.http = httpx.Client(base_url=live.url, timeout=60)
        self.key = secrets.token_hex(8)
        self.keyed = self.admin.create_run(RunSpec(name="keyed", task=TASK, steps=3), self.key).id
        self.unwilling = self.admin.create_run(RunSpec(name="unwilling", task="nobodys", steps=3)).id
        self.empty = self.admin.put_blob(b"")
        self.tokens = {scope: live.token(scope) for scope in ("admin", "observer", "join")}
        self.tokens |= lost
        self.make()

    def make(self) -> None:
        self.run = RunByHand(self.live, self.regions, steps=self.steps, outer=self.outer)
        self.site, self.other = self.run.sites
        self.tokens["replaced"] = self.site.seat
        self.site.beat(self.site.failed())
        self.site.start_again()
        self.site.caught_up()
        self.take_tokens()
        self.close_round()

    def take_tokens(self) -> None:
        self.tokens |= {"site": self.site.secret, "other site": self.other.secret}
        self.tokens |= {"ranks": self.site.seat, "other ranks": self.other.seat}

    # --- before a request ---------------------------------------------------------------------------------------------

    def ready(self) -> None:
        """To be called before each request."""
        self.prepare()
        self.words = self.words_now()

    def prepare(self) -> None:
        """Brings the run from where it goes on to where the request is sent."""

    @property
    def step(self) -> int:
        """The one that is open."""
        return self.run.view.step + 1

    def words_now(self) -> dict[str, object]:
        head, step = self.site.position() if self.site.run else None, self.step
        return {
            "RUN": self.run.id,
            "SITE": self.site.name,
            "OTHER": self.other.name,
            "STEP": step,
            "LAST": step - 1,
            "NEXT": step + 1,
            "SEQ": head.seq if head else 0,
            "HASH": head.hash if head else "0" * 64,
            "SHORT": head.hash[:12] if head else "0" * 12,
            "ZERO": "0" * 64,
            "NAME": new_name(),
            "KEY": self.key,
            "KEYED": self.keyed,
            "EMPTY": self.empty,
            "FAR": step + 2**40,
            "OBSERVER": self.tokens["observer"],
            "RANKS": self.tokens.get("ranks", ""),
            "TAKEN": self.tokens.get("other ranks", ""),
            "UNWILLING": self.unwilling,
            "MARKER": self.live.directory / "opened",
        }

    def fill(self, text: str) -> str:
        return re.sub(r"\b[A-Z]+\b", lambda match: str(self.words.get(match[0], match[0])), text)

    # --- after a request ----------------------------------------------------------------------------------------------

    @property
    def seen(self) -> dict[str, object]:
        """All but how long and for what the run waits: a contribution that was refused is an answer."""
        runs = [run.model_dump(exclude={"reason", "lasted_s"}) for run in self.admin.runs()]
        return {"runs": runs, "sites": [site.name for site in self.admin.sites()]}

    def go_on(self) -> None:
        """What the run does next, which shows that it can."""
        self.close_round()

    def close_round(self) -> None:
        """Both sites contribute; both are listed, with what they have sent."""
        step = self.step
        bodies = {site.name: site.message(step) for site in (self.site, self.other)}
        for site in (self.site, self.other):
            answer = site.send(step, bodies[site.name], wait=WAIT_S if site is self.other else 0)
            assert answer.is_success, answer.text
        header, _ = decode_message("entry", answer.content)
        sent = {name: contribution_digest([hashlib.sha256(body).hexdigest()]) for name, body in bodies.items()}
        assert {line["site"]: line["digest"] for line in header["contributors"]} == sent
        assert (header["abstentions"], header["refusals"]) == ([], [])


RUNNING = State


class Answered(State):
    name = "the site has contributed"

    def prepare(self) -> None:
        self.site.contribute(self.step)


class Abstained(State):
    name = "the site has abstained"

    def prepare(self) -> None:
        reason = Abstention(position=self.site.position(), reason="no data")
        self.site.ranks.abstain(self.run.id, "west", self.step, self.site.name, reason, 0.0)

    def go_on(self) -> None:
        header, _ = decode_message("entry", self.other.contribute(self.step, wait=WAIT_S))
        assert [line["site"] for line in header["contributors"]] == [self.other.name]
        assert header["abstentions"] == [{"site": self.site.name, "reason": "no data"}]


class Pending(State):
    name = "the run is not started"

    def make(self) -> None:
        self.run = RunByHand(self.live, self.regions, steps=self.steps, start=False)
        self.site, self.other = self.run.sites
        self.tokens |= {"site": self.site.secret, "other site": self.other.secret}

    def go_on(self) -> None:
        assert self.run.view.status == "pending"


class Starting(State):
    name = "no site has joined yet"

    def make(self) -> None:
        self.run = RunByHand(self.live, self.regions, steps=self.steps, begin=False)
        self.site, self.other = self.run.sites
        self.take_tokens()

    def go_on(self) -> None:
        assert self.run.view.status == "starting"


class Joining(Starting):
    name = "one site has not joined yet"

    def make(self) -> None:
        super().make()
        self.site.join()
        self.site.upload_start(self.run.parameters.tobytes())


class Paused(State):
    name = "the run is paused"

    def prepare(self) -> None:
        """The open round ends, and nothing opens after it."""
        self.admin.pause_run(self.run.id)
        self.close_round()

    def go_on(self) -> None:
        self.admin.resume_run(self.run.id)
        self.close_round()


class Stopped(State):
    name = "the run was stopped"

    def make(self) -> None:
        super().make()
        self.admin.stop_run(self.run.id)
        for site in self.run.sites:
            site.beat()

    def go_on(self) -> None:
        assert self.run.view.status == "stopped"


class Done(State):
    name = "all steps are done"
    steps = 1

    def go_on(self) -> None:
        assert self.run.view.status == "running"


class Outer(State):
    name = "an outer round is open"
    regions = ("west", "east")
    outer = OuterSpec(every=1, fragments=FRAGMENTS)

    def make(self) -> None:
        self.run = RunByHand(self.live, self.regions, steps=self.steps, outer=self.outer)
        self.site, self.other = self.run.sites
        self.take_tokens()

    def words_now(self) -> dict[str, object]:
        return super().words_now() | {"OUTER": self.run.view.outer_rounds + 1}

    def prepare(self) -> None:
        step = self.step
        for site in self.run.sites:
            assert site.contribute(step, wait=WAIT_S) is not None
        self.run.sites[0].announce(self.run.view.outer_rounds + 1, 0, self.copies()[0], wait=0.0)

    def copies(self) -> list[bytes]:
        return [bytes(4 * LAYOUT.fragment_elements(tensors)) for tensors in LAYOUT.fragments(FRAGMENTS)]

    def go_on(self) -> None:
        number = self.run.view.outer_rounds + 1
        for fragment, copy in enumerate(self.copies()):
            for site in self.run.sites:
                site.announce(number, fragment, copy, wait=0.0)
        wait_until(lambda: self.run.view.outer_rounds == number, "the end of the outer round", 30)


class Absent(Outer):
    name = "an outer round is open, and the site's ranks were replaced"

    def prepare(self) -> None:
        super().prepare()
        self.site.beat(self.site.failed())
        self.site.start_again()
        self.take_tokens()

    def go_on(self) -> None:
        number = self.run.view.outer_rounds + 1
        for fragment, copy in enumerate(self.copies()):
            self.other.announce(number, fragment, copy, wait=0.0)
        wait_until(lambda: self.run.view.outer_rounds == number, "the end of the outer round", 30)
        assert self.site.caught_up().active
