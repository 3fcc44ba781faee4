"""Sites that fail, are late, leave and come back: over real HTTP against a real coordinator and Redis, by hand."""

import hashlib
import re
import secrets
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import pytest
import redis

from api.errors import ConflictError, ForbiddenError, NotFoundError, UnauthorizedError
from api.payload import contribution_digest, decode_message
from api.schemas import Abstention, Condition, MetricPoint, RunStatus
from api.specs import GuardsSpec, OuterSpec, RoundsSpec
from coordinator.redis_server import EmbeddedRedis
from tests.conftest import LiveCoordinator, start_coordinator, wait_until
from tests.contract.by_hand import LAYOUT, WAIT_S, RunByHand, SiteByHand, new_name, problem


@dataclass
class Watched:
    """A coordinator whose Redis can be looked into, and changed behind its back."""

    live: LiveCoordinator
    redis: redis.Redis

    def end_lease(self, site):
        self.redis.zadd("leases", {site.name: 1})


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("watched")
    with EmbeddedRedis(folder / "redis") as server, redis.Redis.from_url(server.url) as client:
        options = ("--lease-s", "36000", "--tick-s", "0.1", "--redis-url", server.url)
        live = start_coordinator(folder / "coordinator", *options)
        yield Watched(live, client)
        live.service.interrupt()
        live.service.join()


def names(lines):
    return [line["site"] for line in lines]


def until(run, site, condition):
    return wait_until(
        lambda: (view := run.member(site)).condition is condition and view, f"{site.name} {condition}", 30
    )


# --- late -------------------------------------------------------------------------------------------------------------


def test_a_site_that_never_answers_does_not_hold_up_the_others(patient):
    run = RunByHand(patient, ("west",) * 3, rounds=RoundsSpec(deadline_s=0.5, late_rounds=2, bench_s=3600), steps=9)
    first, second, third = run.sites
    late = third.message(1)
    for step in (1, 2):
        first.contribute(step)
        assert "and until 2 have answered" in run.view.reason
        header, _ = decode_message("entry", second.contribute(step, wait=WAIT_S))
        assert names(header["contributors"]) == [first.name, second.name]
    benched = run.member(third)
    assert (benched.condition, benched.attempt) == (Condition.BENCHED, 1)
    assert "missed 2 rounds in a row; back when it has caught up, but not before " in benched.reason
    gone = problem(third.send(1, late), 410, "closed_without_you")
    assert gone["context"] == {"seq": 1}
    assert third.caught_up().active
    first.contribute(3)
    assert second.contribute(3, wait=WAIT_S)  # at once: nobody waits for the third
    assert third.contribute(4) is None
    assert run.member(third).condition is Condition.ACTIVE
    assert f"waiting for 2 of 3 sites: {first.name}, {second.name}" in run.view.reason


def test_a_benched_site_is_released_by_time_once_it_has_answered_too_late(patient):
    run = RunByHand(patient, ("west",) * 2, rounds=RoundsSpec(deadline_s=0.2, late_rounds=1, bench_s=0.5), steps=9)
    first, second = run.sites
    late = second.message(1)
    assert first.contribute(1, wait=WAIT_S)
    until(run, second, Condition.BENCHED)
    problem(second.send(1, late), 410, "closed_without_you")
    assert re.search(r"missed 1 rounds in a row, its answers come \d s after the first", run.member(second).reason)
    until(run, second, Condition.ACTIVE)
    assert run.member(second).reason == ""


def test_what_lost_ranks_have_sent_is_listed_and_others_cannot_send_again(patient):
    run = RunByHand(patient, ("west",) * 2, steps=9)
    first, second = run.sites
    sent = second.message(1)
    assert second.send(1, sent).status_code == 202
    second.beat(second.failed())
    second.start_again()
    assert second.caught_up().active
    problem(second.send(1, second.message(1, seed=5)), 409, "other_bytes")
    header, _ = decode_message("entry", first.contribute(1, wait=WAIT_S))
    assert header["contributors"][1]["digest"] == contribution_digest([hashlib.sha256(sent).hexdigest()])
    assert second.send(1, sent).status_code == 200


# --- agents -----------------------------------------------------------------------------------------------------------


def test_a_lease_that_ends_and_begins_again(watched):
    run = RunByHand(watched.live, ("west",) * 2, steps=9)
    first, second = run.sites
    watched.end_lease(second)
    away = until(run, second, Condition.AWAY)
    assert away.reason == "no heartbeat for more than 36000 s; a heartbeat brings it back"
    assert first.contribute(1, wait=WAIT_S)
    (assignment,) = second.beat(second.running()).assignments
    assert assignment.attempt == 1
    assert run.member(second).condition is Condition.ACTIVE
    assert second.caught_up().active
    assert second.contribute(2) is None
    assert f"waiting for 1 of 2 sites: {first.name}" in run.view.reason


def test_what_ranks_send_renews_the_lease_but_not_of_an_agent_that_left(watched):
    run = RunByHand(watched.live, ("west",), steps=10**6)
    (site,) = run.sites
    before = run.admin.site(site.name).lease_until
    site.contribute(1, wait=WAIT_S)
    assert run.admin.site(site.name).lease_until > before
    site.agent.leave(site.name)
    site.contribute(2, wait=WAIT_S)
    assert watched.redis.zscore("leases", site.name) is None
    until(run, site, Condition.AWAY)
    assert run.view.status is RunStatus.RUNNING
    site.beat(site.running())
    assert run.member(site).condition is Condition.ACTIVE


def test_an_agent_that_comes_back_without_its_ranks_is_not_waited_for(watched):
    """It was killed and is started again: what it has to run is still to be started."""
    run = RunByHand(watched.live, ("west",) * 2, steps=9)
    first, second = run.sites
    watched.end_lease(second)
    until(run, second, Condition.AWAY)
    (assignment,) = second.beat().assignments
    assert (assignment.attempt, run.member(second).condition) == (1, Condition.JOINING)
    assert first.contribute(1, wait=WAIT_S)
    second.start_again()
    assert second.caught_up().active


def test_an_agent_that_was_started_again_within_its_lease_is_not_waited_for(patient):
    run = RunByHand(patient)
    first, second = run.sites
    first.contribute(1)
    second.register(patient.token("join"))
    assert run.member(second).condition is Condition.JOINING
    wait_until(lambda: run.view.step == 1, "the round without it")
    assert run.view.alarms == []


# --- ranks ------------------------------------------------------------------------------------------------------------


def test_failed_ranks_are_replaced_and_their_token_is_good_no_more(patient):
    run = RunByHand(patient, steps=9)
    first, second = run.sites
    stale, old = second.message(1), second.ranks
    first.contribute(1)
    failure = second.failed(3, rank=1, detail="a traceback\nboom")
    (assignment,) = second.beat(failure).assignments
    assert (assignment.run, assignment.attempt) == (run.id, 2)
    second.beat(failure)  # the agent says it again until it has read the reply
    member = run.member(second)
    assert (member.condition, member.attempt, member.ready) == (Condition.JOINING, 2, False)
    assert member.reason.startswith("its ranks have not joined; attempt 2 after rank 1: exit code 3: boom")
    problem(second.send(1, stale), 401, "token_unknown")
    with pytest.raises(UnauthorizedError):
        old.run(run.id)
    wait_until(lambda: run.view.step == 1, "step 1 without the second site", 30)

    reply = second.start_again()
    assert (reply.upload_start, reply.resume) == (False, None)
    start = run.admin.log(run.id, "west", 0).items
    behind = second.caught_up(second.position().model_copy(update={"seq": 0, "hash": start[1]["previous"]}))
    assert (behind.active, behind.head) == (True, second.position())  # near enough
    assert run.member(second).condition is Condition.ACTIVE
    first.contribute(2)
    assert f"waiting for 1 of 2 sites: {second.name}" in run.view.reason
    header, _ = decode_message("entry", second.contribute(2, wait=WAIT_S))
    assert names(header["contributors"]) == [first.name, second.name]


def test_an_agent_that_lost_its_ranks_takes_another_seat(patient):
    run = RunByHand(patient, steps=9)
    first, second = run.sites
    old = second.ranks
    second.start_again()
    assert second.attempt == 1
    with pytest.raises(UnauthorizedError):
        old.run(run.id)
    assert run.member(second).condition is Condition.JOINING
    assert first.contribute(1, wait=WAIT_S)
    assert second.caught_up().active
    second.attempt = 2
    with pytest.raises(ConflictError) as caught:
        second.take_seat(run.id)
    assert caught.value.code == "stale_attempt"
    with pytest.raises(ConflictError) as caught:
        second.join()
    assert caught.value.code == "stale_attempt"


def test_a_seat_that_was_refused_leaves_no_token(patient):
    run = RunByHand(patient)
    second = run.sites[1]
    second.attempt, second.seat = 7, secrets.token_urlsafe(32)
    with pytest.raises(ConflictError):
        second.take_seat(run.id)
    with pytest.raises(UnauthorizedError):
        second.ranks.run(run.id)


def test_too_many_failures_exclude_a_site_and_the_last_one_of_a_region_ends_the_run(patient):
    run = RunByHand(patient, rounds=RoundsSpec(restarts=1, deadline_s=3600), steps=9)
    first, second = run.sites
    second.beat(second.failed())
    second.start_again()
    assert second.beat(second.failed(5, detail="out of disk")).assignments == []
    member = run.member(second)
    assert (member.condition, member.reason) == (Condition.EXCLUDED, "exit code 5: out of disk\nout of disk")
    assert run.view.status is RunStatus.RUNNING
    with pytest.raises(ForbiddenError):
        second.take_seat(run.id)
    assert first.contribute(1, wait=WAIT_S)
    first.beat(first.failed())
    first.start_again()
    first.beat(first.failed(-9, rank=0))
    assert run.view.status is RunStatus.FAILED
    assert f"no site is left in region west: site {first.name}, rank 0: killed (out of memory?)" in run.view.reason


def test_a_script_that_fails_alike_after_every_start_is_told_and_slowed_down(patient):
    run = RunByHand(patient, rounds=RoundsSpec(deadline_s=3600), steps=9)
    first, second = run.sites
    for step in (1, 2, 3):
        assert run.view.alarms == []
        first.contribute(step)
        second.contribute(step, wait=WAIT_S)
        assignments = second.beat(second.failed(rank=0, detail=f"at 0x{step}\nValueError: bad batch")).assignments
        if step < 3:
            assert [assignment.attempt for assignment in assignments] == [step + 1]
            second.start_again()
            assert second.caught_up().active
    assert assignments == []
    (alarm,) = run.view.alarms
    assert alarm.startswith(
        f"site {second.name} has failed again and again, 3 times in a row with the same error, the "
    )
    assert "exit code 1: ValueError: bad batch; mend its training script or its data there, or " in alarm
    assert run.member(second).reason.startswith("its ranks are started again at ")
    assert first.contribute(4, wait=WAIT_S)  # nobody waits for it
    second.register(patient.token("join"))
    second.start_again()
    assert (second.attempt, second.caught_up().active) == (4, True)


def test_ranks_learn_that_their_run_has_ended(watched):
    run = RunByHand(watched.live)
    first, second = run.sites
    body = first.message(1)
    run.admin.stop_run(run.id)
    for site in run.sites:
        site.beat()
    assert run.view.status is RunStatus.STOPPED
    problem(first.send(1, body), 410, "run_ended")
    headers = {"Authorization": f"Bearer {second.seat}"}
    path = f"{run.url}/v1/runs/{run.id}/regions/west/steps/1/update/parts/0"
    problem(httpx.get(path, params={"wait": WAIT_S}, headers=headers), 410, "run_ended")
    seats = [hashlib.sha256(site.seat.encode()).hexdigest() for site in run.sites]
    left = [watched.redis.ttl(f"token:{seat}") for seat in seats]
    assert all(3000 < seconds <= 3600 for seconds in left)


# --- outer rounds -----------------------------------------------------------------------------------------------------


def test_a_region_that_is_away_is_taken_along_and_a_joiner_resumes_at_the_anchors(patient):
    outer = OuterSpec(every=2, lr=1.0, momentum=0.0, fragments=2)
    run = RunByHand(patient, ("west", "east"), steps=4, outer=outer)
    west, east = run.sites
    late = east.message(1)
    east.agent.leave(east.name)
    for step in (1, 2):
        assert west.contribute(step, wait=WAIT_S)
    copy = run.parameters.tobytes()
    layout = run.admin.log(run.id, "west", 0).items[0]["layout"]
    half = 4 * LAYOUT.fragment_elements(LAYOUT.fragments(2)[0])
    for fragment, part in enumerate((copy[:half], copy[half:])):
        west.announce(1, fragment, part)
    wait_until(lambda: run.view.outer_rounds == 1, "the outer round", 30)
    log = run.admin.log(run.id, "east", 0).items
    assert [(line["kind"], line["step"]) for line in log] == [("start", 0), ("anchor", 2), ("anchor", 2)]
    assert [part["region"] for part in log[1]["participants"]] == ["west"]

    east.beat()
    assert "seq" not in problem(east.send(1, late), 410, "closed_without_you")["context"]
    reply = east.start_again()
    assert reply.layout == layout
    assert reply.resume.position == east.position()
    assert reply.resume.step == 2
    assert reply.resume.anchors == [line["digest"] for line in log[1:]]
    assert b"".join(run.admin.get_blob(digest) for digest in reply.resume.anchors) == copy
    assert east.caught_up(reply.resume.position).active
    assert east.contribute(3, wait=WAIT_S)


def test_a_lost_participant_is_not_waited_for(patient):
    run = RunByHand(patient, ("west", "west"), steps=2, outer=OuterSpec(every=1))
    first, second = run.sites
    run.round(1, "west")
    copy = run.parameters.tobytes()
    second.agent.leave(second.name)
    first.announce(1, 0, copy)
    wait_until(lambda: run.view.outer_rounds == 1, "the outer round", 30)
    assert second.announce(1, 0, copy) is False


# --- people -----------------------------------------------------------------------------------------------------------


def test_pause_and_resume(patient):
    run = RunByHand(patient, steps=9)
    first, second = run.sites
    first.contribute(1)
    assert run.admin.pause_run(run.id).status is RunStatus.PAUSED
    assert second.contribute(1, wait=WAIT_S)
    body = first.message(2)
    answer = first.send(2, body, wait=0.2)
    assert (answer.status_code, answer.headers["isthmus-accepted"]) == (202, "false")
    assert answer.text == "paused, `isthmus run resume` goes on"
    assert run.view.step == 1
    assert sorted(a.run for a in first.beat().assignments) == [run.id]
    assert run.admin.resume_run(run.id).status is RunStatus.RUNNING
    assert first.send(2, body).headers["isthmus-accepted"] == "true"
    header, _ = decode_message("entry", second.contribute(2, wait=WAIT_S))
    assert names(header["contributors"]) == [first.name, second.name]


def test_a_contribution_that_waits_is_taken_in_when_the_run_resumes(patient):
    run = RunByHand(patient, ("west",), steps=9)
    (site,) = run.sites
    site.contribute(1, wait=WAIT_S)
    run.admin.pause_run(run.id)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(site.contribute, 2, wait=WAIT_S)
        run.admin.resume_run(run.id)
        header, _ = decode_message("entry", answer.result(60))
    assert header["step"] == 2


def test_sites_are_added_and_removed(patient):
    run = RunByHand(patient, steps=9)
    first, second = run.sites
    run.round(1, "west")
    third = SiteByHand(new_name(), "west", patient.url)
    with pytest.raises(ConflictError, match="is not registered"):
        run.admin.add_site(run.id, third.name)
    third.register(patient.token("join"))
    joining = run.admin.add_site(run.id, third.name).members[-1]
    assert (joining.site, joining.condition) == (third.name, Condition.JOINING)
    assert third.start_again().evaluate is False
    assert third.caught_up().active
    for site in (first, second):
        site.contribute(2)
    assert f"waiting for 1 of 3 sites: {third.name}" in run.view.reason
    header, _ = decode_message("entry", third.contribute(2, wait=WAIT_S))
    assert names(header["contributors"]) == sorted([first.name, second.name, third.name])

    first.contribute(3)
    third.contribute(3)
    view = run.admin.exclude_site(run.id, second.name)
    assert [member.reason for member in view.members if member.site == second.name] == ["removed by an administrator"]
    wait_until(lambda: run.view.step == 3, "the step without the second site", 30)
    assert second.beat().assignments == []
    with pytest.raises(UnauthorizedError):
        second.ranks.run(run.id)
    with pytest.raises(NotFoundError):
        run.admin.exclude_site(run.id, "nobody")
    run.admin.add_site(run.id, second.name)
    second.start_again()
    assert second.attempt == 2
    elsewhere = SiteByHand(new_name(), "north", patient.url)
    elsewhere.register(patient.token("join"))
    with pytest.raises(ConflictError, match="has west only"):
        run.admin.add_site(run.id, elsewhere.name)


def test_a_refused_contribution_is_listed_with_its_reason(patient):
    run = RunByHand(patient, steps=9)
    first, second = run.sites
    reason = problem(first.send(1, first.message(1, {"absent": ["nothing \ud800"]})), 422, "bad_contribution")["detail"]
    header, _ = decode_message("entry", second.contribute(1, wait=WAIT_S))
    assert names(header["contributors"]) == [second.name]
    (refusal,) = header["refusals"]
    assert refusal["site"] == first.name
    assert refusal["reason"][:40] == reason[:40]
    gone = problem(first.send(1, first.message(1)), 410, "closed_without_you")
    assert gone["context"] == {"seq": 1}

    problem(first.send(2, first.message(2, arrays={})), 422, "bad_contribution")
    assert first.contribute(2) is None  # a better one
    header, _ = decode_message("entry", second.contribute(2, wait=WAIT_S))
    assert header["refusals"] == []
    assert names(header["contributors"]) == [first.name, second.name]
    problem(first.send(9, first.message(9, arrays={})), 409, "round_not_open")
    assert f"waiting for 2 of 2 sites: {first.name}, {second.name}" in run.view.reason


# --- the held-out evaluation ------------------------------------------------------------------------------------------


def test_sites_learn_with_every_answer_which_of_them_evaluates(patient):
    run = RunByHand(patient, ("west",) * 3, steps=9)
    first, second, third = run.sites

    def told(answer):
        return answer.headers["isthmus-evaluate"]

    body = second.message(1)
    assert [told(first.send(1, first.message(1))), told(second.send(1, body))] == ["true", "false"]
    first.agent.leave(first.name)
    assert told(second.send(1, body)) == "true"
    assert told(third.send(1, third.message(1), wait=WAIT_S)) == "false"
    url = f"{run.url}/v1/runs/{run.id}/regions/west/steps/1/update/parts/0"
    updates = [httpx.get(url, headers={"Authorization": f"Bearer {site.seat}"}) for site in (second, third)]
    assert [told(update) for update in updates] == ["true", "false"]
    admin = httpx.get(url, headers={"Authorization": f"Bearer {patient.token('admin')}"})
    assert "isthmus-evaluate" not in admin.headers
    abstention = Abstention(position=third.position(), reason="no data")
    assert third.ranks.abstain(run.id, "west", 2, third.name, abstention, 0.0).evaluate is False
    run.admin.exclude_site(run.id, second.name)
    assert third.ranks.update_answer(run.id, "west", 2, 0, WAIT_S).evaluate is True


# --- guards -----------------------------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_pauses_the_run_with_the_reason(patient):
    run = RunByHand(patient, steps=9)
    first, _ = run.sites
    run.round(1, "west")

    def report(step, **values):
        first.ranks.add_metrics(run.id, first.name, [MetricPoint(step=step, values=values)])

    report(1, loss=2.0, bytes_up=None)
    assert run.view.status is RunStatus.RUNNING
    report(2, loss=None)
    because = f"the loss of site {first.name} is not finite at step 2"
    assert (run.view.status, run.view.paused_because) == (RunStatus.PAUSED, because)
    assert run.view.reason.startswith(f"paused: {because}, `isthmus run resume` goes on; region west: step 2")
    run.round(2, "west")
    run.admin.resume_run(run.id)
    assert (run.view.status, run.view.paused_because) == (RunStatus.RUNNING, "")
    report(2, loss=None)
    assert run.view.status is RunStatus.RUNNING


def test_a_loss_far_above_the_ones_before_pauses_the_run(patient):
    run = RunByHand(patient, steps=9, guards=GuardsSpec(spike=3.0))
    first, second = run.sites
    for site, loss in ((first, 1.0), (second, 9.0)):
        site.ranks.add_metrics(run.id, site.name, [MetricPoint(step=n, values={"loss": loss}) for n in range(9)])
    second.ranks.add_metrics(run.id, second.name, [MetricPoint(step=9, values={"loss": 20.0})])
    assert run.view.status is RunStatus.RUNNING
    first.ranks.add_metrics(run.id, first.name, [MetricPoint(step=9, values={"loss": 3.5})])
    assert run.view.paused_because == (
        f"the loss of site {first.name} is 3.5 at step 9, the median before 1: more than 3 times as much"
    )
