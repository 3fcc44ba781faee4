"""Versions of a task, as agents say over real HTTP what they are."""

import pytest

from api.client import CoordinatorClient
from api.errors import ConflictError
from api.schemas import Heartbeat, Seat
from api.specs import RunSpec
from tests.contract.by_hand import TASK, SiteByHand, new_name, registration


def test_versions_of_the_task_are_shown_and_compared_where_the_same_is_asked_for(patient):
    prefix = new_name("v")
    sites = [SiteByHand(f"{prefix}-{number}", "west", patient.url) for number in range(3)]
    for site, version in zip(sites, ("1", "2", "1"), strict=True):
        with CoordinatorClient(patient.url, patient.token("join")) as client:
            client.register_site(site.name, registration(site.secret, version=version))
    _, second, third = sites
    admin, names = patient.client(), [site.name for site in sites[:2]]
    assert admin.site(second.name).versions == {TASK: "2"}
    run = admin.create_run(RunSpec(name="versions", task=TASK, steps=1, sites=names, same_version=True))
    with pytest.raises(ConflictError) as caught:
        admin.start_run(run.id)
    listed = f"{prefix}-0 1, {prefix}-1 2"
    assert caught.value.errors == [f"the sites have different versions of task {TASK}: {listed}"]
    second.agent.heartbeat(second.name, Heartbeat(versions={TASK: "1"}), 0)  # its script was changed
    admin.start_run(run.id)
    for site in sites[:2]:
        site.agent.take_seat(run.id, site.name, Seat(attempt=1, secret=site.seat, version="1"))
    assert [member.version for member in admin.run(run.id).members] == ["1", "1"]
    third.agent.heartbeat(third.name, Heartbeat(versions={TASK: "3"}), 0)
    with pytest.raises(ConflictError, match=f"different versions of task {TASK}: .*{third.name} 3"):
        admin.add_site(run.id, third.name)
    third.agent.heartbeat(third.name, Heartbeat(), 0)
    third.agent.heartbeat(third.name, Heartbeat(versions={TASK: "1"}), 0)
    admin.add_site(run.id, third.name)
    with pytest.raises(ConflictError, match="asks for the same at all sites"):
        third.agent.take_seat(run.id, third.name, Seat(attempt=1, secret=third.seat, version="3"))
    admin.stop_run(run.id)
