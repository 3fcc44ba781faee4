"""How a run looks from outside."""

from datetime import timedelta

from coordinator.events import PauseRequested, SiteAdded
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


def test_the_step_does_not_fall_when_a_region_comes():
    driver = Driver(TWO, steps=4, every=3).begin().until_step(2)
    driver.send(SiteAdded("c", "north"))
    view = run_view(driver.state, driver.now)
    assert view.step == 2
    assert [(region.name, region.step, region.came_later) for region in view.regions] == [
        ("east", 3, False),
        ("north", 0, True),
        ("west", 2, False),
    ]
    assert driver.state.step == 0  # and it is waited for before the end
    driver.finish()
    assert run_view(driver.state, driver.now).step == 4
