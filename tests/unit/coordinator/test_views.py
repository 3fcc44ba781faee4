"""How a run looks from outside."""

from datetime import timedelta

from coordinator.events import PauseRequested
from coordinator.views import run_view
from tests.unit.coordinator.runs import NOW, Driver

TWO = {"a": "west", "b": "east"}


def lasted(driver, later_s=0.0):
    return run_view(driver.state, driver.now + timedelta(seconds=later_s)).lasted_s


def test_a_run_lasts_from_its_start_until_now_or_to_its_end():
    driver = Driver(TWO, steps=2)
    assert lasted(driver, 60) == 0
    driver.pass_time(5)
    driver.begin()
    started = (driver.now - NOW).total_seconds()
    assert started == 5
    assert lasted(driver, 16.5) == 16.5
    driver.pass_time(7)
    driver.send(PauseRequested())
    assert lasted(driver, 27) == 34
    assert lasted(driver, -3600) == 7

    ended = Driver(TWO, steps=2).begin()
    ended.pass_time(9)
    ended.finish()
    assert lasted(ended, 1000) == 9
