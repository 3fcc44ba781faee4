"""Two real sites that train over HTTPS, with a certificate that a private authority has signed."""

import pytest

from tests.certificates import make_certificates
from tests.integration.test_agents import Agents, digests
from tests.processes import processes_of


@pytest.fixture
def agents(new_coordinator, tmp_path, monkeypatch):
    certificates = make_certificates(tmp_path / "certificates")
    live = new_coordinator(*certificates.options)
    live.ca_file = certificates.authority
    monkeypatch.setenv("ISTHMUS_CA_FILE", str(certificates.authority))
    agents = Agents(live, tmp_path / "agents")
    agents.folder.mkdir()
    for name in ("heron", "ibis"):
        agents.start(name, "coast")
    yield agents
    agents.close()
    assert not processes_of(agents.folder)


def test_a_run_over_https(agents, tmp_path):
    assert agents.coordinator.url.startswith("https://")
    folder = tmp_path / "digests"
    folder.mkdir()
    run = agents.end(agents.run("linear", ["heron", "ibis"], folder, {}, steps=4))
    assert run.status == "succeeded", run.reason
    seen = [digests(folder, site) for site in ("heron", "ibis")]
    assert len(seen[0]) == 4
    assert seen[0] == seen[1]
