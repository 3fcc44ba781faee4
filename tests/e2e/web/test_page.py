"""The web page in real Chromium, against a real coordinator with a run that has ended (fixture `finished_run`)."""

import os
import re
import shutil
import signal
import subprocess

import httpx
import pytest

from api.schemas import MetricPoint
from api.specs import Change, OuterSpec, SnapshotsSpec
from tests.conftest import wait_until
from tests.contract.by_hand import RunByHand

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--window-size=1200,900",
    "--virtual-time-budget=8000",
    "--dump-dom",
]

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium")


@pytest.fixture
def browse(tmp_path):
    """Opens a URL in a fresh profile; returns the document after a few refreshes.

    No message on the console is accepted but Chromium's own about answers of status `refused`.
    """

    def open_page(url: str, refused: int | None = None) -> str:
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", url]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            document, log = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            _, log = process.communicate()
            pytest.fail(f"Chromium did not end within 60 s; its log ends with: {log[-2000:]}")
        assert document, log[-2000:]
        messages = [line for line in log.splitlines() if "CONSOLE" in line and f"status of {refused}" not in line]
        assert not messages, messages
        return document

    return open_page


@pytest.fixture
def run(finished_run):
    answer = httpx.get(
        f"{finished_run.url.rstrip('/')}/v1/runs/{finished_run.run_id}",
        headers={"Authorization": f"Bearer {finished_run.observer_token}"},
        trust_env=False,
    )
    return answer.raise_for_status().json()


def _page(finished_run, fragment):
    return f"{finished_run.url.rstrip('/')}/#{fragment}"


def test_a_run_shows_its_status_loss_sites_and_equal_digests(browse, finished_run, run):
    document = browse(_page(finished_run, f"/runs/{run['id']}?token={finished_run.observer_token}"))

    heading = re.search(r"<h1>.*?</h1>", document, re.S).group()
    assert run["spec"]["name"] in heading
    assert f'data-status="{run["status"]}"' in heading
    assert f'value="{run["step"]}"' in re.search(r"<progress[^>]*>", document).group()
    assert re.search(r'id="loss".*?<canvas', document, re.S), "no loss chart"
    assert run["members"]
    for member in run["members"]:
        row = re.search(rf'<tr data-row="{member["site"]}">.*?</tr>', document, re.S).group()
        assert member["digest"][:12] in row
        assert "✓ equal" in row
    assert 'data-digests="equal"' in document
    assert finished_run.observer_token not in document


def test_the_overview_lists_runs_and_sites(browse, finished_run, run):
    document = browse(_page(finished_run, f"token={finished_run.observer_token}"))

    row = re.search(rf'<tr data-row="{run["id"]}">.*?</tr>', document, re.S).group()
    assert f'href="#/runs/{run["id"]}"' in row
    assert f'data-status="{run["status"]}"' in row
    for member in run["members"]:
        assert f'data-row="{member["site"]}"' in document


def test_a_run_shows_what_is_in_force_its_snapshots_and_what_restarts_add_up_to(browse, coordinator):
    run = RunByHand(coordinator, ("west",), steps=9, outer=OuterSpec(every=1), snapshots=SnapshotsSpec(every=1))
    (site,) = run.sites
    run.admin.change_run(run.id, Change(from_step=2, lr=0.375, k=17, every=4))
    run.admin.change_run(run.id, Change(from_step=3, k=19))
    site.contribute(1, wait=20)
    site.announce(1, 0, run.parameters.tobytes())
    wait_until(lambda: run.admin.snapshots(run.id).items, "the snapshot")
    for session, step, sent in (("a", 0, 1_000_000), ("a", 1, 4_000_000), ("b", 1, 3_000_000)):
        values = {"bytes_up": sent, "ddp_bytes_per_step": 1_000_000}
        site.ranks.add_metrics(run.id, site.name, [MetricPoint(step=step, values=values)], session)
    run.admin.pause_run(run.id)

    document = browse(f"{coordinator.url}/#/runs/{run.id}?token={coordinator.token('observer')}")

    facts = re.search(r"<dl.*?</dl>", document, re.S).group()
    for shown in (">0.375<", "DeMo k=17 ", "outer step every 4,"):
        assert shown in facts
    assert "from step 2 on: lr 0.375, k 17, every 4" in document
    assert "from step 3 on: k 19" in document
    assert f"{run.id}/1" in re.search(r"Snapshots</h2>.*", document, re.S).group()
    row = re.search(rf'<tr data-row="{site.name}">.*?</tr>', document, re.S).group()
    assert "7.00 MB" in row
    assert ">3x<" in row
    assert 'class="reason">`isthmus run resume` goes on; ' in document
    assert f'title="{run.view.warnings[0]}">region west has one site</p>' in document
    run.admin.stop_run(run.id)


def test_the_overview_marks_runs_with_alarms(browse, coordinator):
    run = RunByHand(coordinator, ("west",) * 3, steps=2, outer=OuterSpec(every=1))
    run.round(1, "west")
    for site, byte in zip(run.sites, (0, 0, 1), strict=True):
        site.announce(1, 0, bytes([byte]) * len(run.parameters.tobytes()))
    wait_until(lambda: run.view.outer_rounds == 1, "the outer round")
    (alarm,) = run.view.alarms

    document = browse(f"{coordinator.url}/#token={coordinator.token('observer')}")

    row = re.search(rf'<tr data-row="{run.id}">.*?</tr>', document, re.S).group()
    assert f'<span class="bad" title="{alarm}"> ⚠ 1 alarm</span>' in row
    run.admin.stop_run(run.id)


def test_a_wrong_token_is_asked_for_again_with_the_reason(browse, finished_run, run):
    document = browse(_page(finished_run, "token=" + "0" * 43), refused=401)

    assert 'type="password"' in document
    assert re.search(r'role="alert">[^<]+<', document), "no reason"
    assert run["id"] not in document


def test_a_run_that_does_not_exist_is_reported(browse, finished_run):
    document = browse(_page(finished_run, f"/runs/no-such-run?token={finished_run.observer_token}"), refused=404)

    assert re.search(r'class="alarm"[^>]*>[^<]*no-such-run', document)


@pytest.mark.parametrize("path", ["", "web/app.js", "web/style.css", "web/vendor/uPlot.iife.min.js"])
def test_files_are_public_with_strict_headers(finished_run, path):
    answer = httpx.get(f"{finished_run.url.rstrip('/')}/{path}", trust_env=False).raise_for_status()

    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", ["web/../cli.py", "web/%2e%2e/cli.py", "web/..%2fcli.py", "web//etc/passwd"])
def test_nothing_outside_the_folder_is_served(finished_run, path):
    answer = httpx.get(f"{finished_run.url.rstrip('/')}/{path}", trust_env=False)

    assert answer.status_code in (401, 404, 405)
