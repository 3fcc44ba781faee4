"""What a site's metrics add up to where it has started again, in the report and on the page."""

import json
import re
import shutil
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from api.schemas import StoredPoint
from api.totals import per_step, total

METRICS_JS = Path(__file__).parents[3] / "api" / "web" / "metrics.js"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
START = datetime(2026, 1, 1, 10, tzinfo=UTC)


def points_of(*sessions: list[tuple[int, int, float, float]]) -> list[StoredPoint]:
    """Each a list of step, bytes, seconds of waiting and of computing; as the API orders them, by step."""
    told = [(str(number), *line) for number, session in enumerate(sessions) for line in session]
    points = [
        StoredPoint(
            site="a",
            session=session,
            step=step,
            at=START + timedelta(seconds=second, microseconds=second % 2),
            values={"bytes_up": sent, "wait_s": wait, "compute_s": compute},
        )
        for second, (session, step, sent, wait, compute) in enumerate(told)
    ]
    losses = [StoredPoint(site="a", step=3, at=START + timedelta(hours=1), values={"loss": 5.0, "bytes_up": None})]
    return sorted(points + losses, key=lambda point: (point.step, point.at))


ONE = [(0, 100, 0.0, 0.0), (10, 600, 2.0, 8.0)]
EARLIER = [(4, 30, 0.0, 0.1), (12, 230, 3.0, 5.0)]
"""It starts again at an earlier step."""
SHORT = [(0, 50, 0.0, 0.0)]
"""It ends before its second report: nothing falls after it."""
MORE = [(10, 700, 0.0, 0.2), (12, 900, 1.0, 1.5)]
"""It has sent more before its first report than the session before it had altogether."""
CASES = [
    ([], 0, 0.0, 0.0, 0.0),
    ([ONE], 600, 50.0, 2.0, 8.0),
    ([SHORT, ONE], 650, 50.0, 2.0, 8.0),
    ([ONE, EARLIER], 830, 700 / 18, 5.0, 13.0),
    ([ONE, MORE], 1500, 700 / 12, 3.0, 9.5),
    ([ONE, EARLIER, MORE], 1730, 900 / 20, 6.0, 14.5),
]


@pytest.mark.parametrize(("sessions", "sent", "rate", "wait", "compute"), CASES)
def test_the_sessions_of_a_site_add_up(sessions, sent, rate, wait, compute):
    points = points_of(*sessions)
    assert total(points, "bytes_up") == sent
    assert per_step(points, "bytes_up") == pytest.approx(rate)
    assert (total(points, "wait_s"), total(points, "compute_s")) == pytest.approx((wait, compute))
    assert total(points, "round_bytes_up") == 0


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium")
def test_the_page_adds_up_as_the_report_does(tmp_path):
    cases = [[point.model_dump(mode="json") for point in points_of(*sessions)] for sessions, *_ in CASES]
    show = "document.body.textContent = JSON.stringify(cases.map(summary))"
    page = f"{METRICS_JS.read_text()}\nconst cases = {json.dumps(cases)};\n{show}"
    path = tmp_path / "page.html"
    path.write_text(f'<meta charset="utf-8"><body><script type="module">{page}</script></body>')
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--dump-dom")
    command = [CHROMIUM, *flags, f"--user-data-dir={tmp_path / 'profile'}", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    told = json.loads(re.search(r"<body>(\[.*\])</body>", done.stdout, re.S).group(1))
    for told_of, (_, sent, rate, wait, compute) in zip(told, CASES, strict=True):
        assert (told_of["up"]["sum"] or 0) == sent
        assert (told_of["up"]["perStep"] or 0.0) == pytest.approx(rate)
        share = wait / (wait + compute) if wait + compute else None
        assert told_of["waitShare"] == pytest.approx(share)
