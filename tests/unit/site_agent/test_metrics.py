"""What rank 0 reports, and that nothing else is sent."""

import itertools
import math
from typing import Any

import pytest
import torch

from api.schemas import MetricReport
from site_agent import metrics as metrics_module
from site_agent.counting import CountingTransport
from site_agent.metrics import Metrics
from site_agent.settings import Session

SESSION = Session(coordinator="http://none", secret="s" * 32, run="run-1", attempt=1, site="a", region="west")


class Reports:
    """Stands for the client: keeps what it is given, if the API's schema allows it."""

    def __init__(self) -> None:
        self.reports: list[MetricReport] = []

    def add_metrics(self, run: str, site: str, points: Any, session: str) -> None:
        assert run == "run-1"
        self.reports.append(MetricReport(site=site, session=session, points=list(points)))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Seconds that pass only when told."""

    class Clock:
        now = 100.0

        def monotonic(self) -> float:
            return self.now

    clock = Clock()
    monkeypatch.setattr(metrics_module, "time", clock)
    return clock


def test_values_and_totals(clock):
    reports, transport = Reports(), CountingTransport()
    metrics = Metrics(SESSION, reports, transport)
    metrics.describe(ddp_bytes_per_step=1000.0)
    metrics.start(0)
    metrics.tokens = 64
    transport.up.update(round=300, outer=4000, blob=20, other=1)
    transport.down.update(round=30, outer=5)
    metrics.log(1, {"loss": torch.tensor(2.5), "bad": math.nan, "worse": -math.inf})
    clock.now += 10
    metrics.flush(2, wait_s=4.0)
    before, after = reports.reports
    assert before.site == after.site == "a"
    assert before.session == after.session != ""
    Metrics(SESSION, reports, transport).start(0)
    assert reports.reports.pop().session != before.session
    assert before.points[0].step == 0
    assert before.points[0].values["bytes_up"] == 0
    values, totals = after.points
    assert (values.step, values.values) == (1, {"loss": 2.5, "bad": None, "worse": None})
    assert (totals.step, totals.values) == (
        2,
        {
            "bytes_up": 4321,
            "bytes_down": 35,
            "round_bytes_up": 300,
            "round_bytes_down": 30,
            "outer_bytes_up": 4000,
            "outer_bytes_down": 5,
            "blob_bytes_up": 20,
            "blob_bytes_down": 0,
            "wait_s": 4.0,
            "compute_s": 6.0,
            "tokens": 64,
            "ddp_bytes_per_step": 1000.0,
        },
    )


def test_about_once_a_second(clock):
    reports = Reports()
    metrics = Metrics(SESSION, reports, CountingTransport())
    for step in range(100):
        clock.now += 0.1
        metrics.log(step, {"loss": 1.0})
        metrics.flush_sometimes(step, 0.0)
    assert 8 <= len(reports.reports) <= 10
    steps = [point.step for report in reports.reports for point in report.points if "loss" in point.values]
    assert steps == list(range(steps[-1] + 1))


def test_more_points_than_one_report_holds(clock):
    reports = Reports()
    metrics = Metrics(SESSION, reports, CountingTransport())
    for step in range(2500):
        metrics.log(step, {"loss": 1.0})
    metrics.flush(2500, 0.0)
    assert [len(report.points) for report in reports.reports] == [1000, 1000, 501]
    points = itertools.chain.from_iterable(report.points for report in reports.reports)
    assert [point.step for point in points] == list(range(2501))


def test_other_ranks_report_nothing():
    metrics = Metrics(SESSION, None, CountingTransport())
    metrics.start(0)
    metrics.log(1, {"loss": 1.0})
    metrics.flush_sometimes(1, 0.0)
    metrics.flush(1, 0.0)
