"""What runs ahead of commits: begun with the last contribution, used for exactly what it was begun with."""

import asyncio

import pytest

from coordinator.aggregation import LostContributionError, Spool, inputs_of
from coordinator.ahead import Ahead
from coordinator.events import Abstained, Contributed
from tests.unit.coordinator.runs import Driver, digest_of, sent

SITES = {"ant": "west", "bee": "west", "cat": "east"}


@pytest.fixture
def driver():
    driver = Driver(SITES)
    driver.begin()
    return driver


class Recorder:
    """Makes empty spools, or raises, and keeps books."""

    def __init__(self, error=None):
        self.error = error
        self.asked = []
        self.spools = []

    async def __call__(self, state, inputs):
        self.asked.append(inputs)
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        self.spools.append(_Watched())
        return self.spools[-1]


class _Watched(Spool):
    closed = False

    def close(self):
        self.closed = True
        super().close()


def contribution(state, site, step=1, words="first"):
    return Contributed(site, 1, SITES[site], step, state.regions[SITES[site]].head, sent(site, words, tokens=1))


def run(driver, body, error=None):
    recorder = Recorder(error)

    async def main():
        await body(driver.state, recorder, Ahead(recorder))

    asyncio.run(main())
    return recorder


def test_it_begins_with_the_last_live_site_of_the_region(driver):
    async def body(state, recorder, ahead):
        ahead.arrived(state, contribution(state, "cat"))
        ahead.arrived(state, contribution(state, "ant"))
        await asyncio.sleep(0)
        assert [list(inputs.sent) for inputs in recorder.asked] == [["cat"]]
        ahead.arrived(state, contribution(state, "bee"))
        expected = {site: contribution(state, site).sent for site in ("ant", "bee")}
        spool = await ahead.take("west", inputs_of(state, "west", 1, expected))
        assert spool is recorder.spools[-1]
        assert recorder.asked[-1].sent == expected
        assert await ahead.take("west", inputs_of(state, "west", 1, expected)) is None

    assert len(run(driver, body).asked) == 2


def test_what_others_have_taken_in_counts(driver):
    driver.send(contribution(driver.state, "ant"))

    async def body(state, recorder, ahead):
        ahead.arrived(state, contribution(state, "bee"))
        assert ahead._rounds["drill-1", "west"].task is not None

    run(driver, body)


def test_a_round_is_complete_once_all_live_sites_have_answered(driver):
    async def body(state, recorder, ahead):
        first = ahead.arrived(state, contribution(state, "ant"))
        assert not first.is_set()
        assert ahead.arrived(state, contribution(state, "cat")).is_set()
        abstained = Abstained("bee", 1, "west", 1, state.regions["west"].head, "no data")
        assert ahead.arrived(state, abstained) is first
        assert first.is_set()
        later = ahead.arrived(state, contribution(state, "ant", step=2))
        assert not later.is_set()
        assert ahead.arrived(state, contribution(state, "bee")) is None
        ahead.close()
        assert later.is_set()

    run(driver, body)


def test_what_was_committed_makes_a_round_complete(driver):
    driver.send(contribution(driver.state, "ant"))

    async def body(state, recorder, ahead):
        assert ahead.arrived(state, contribution(state, "bee")).is_set()

    run(driver, body)


def test_other_contributions_are_not_mistaken_for_these(driver):
    async def body(state, recorder, ahead):
        for site in ("ant", "bee"):
            ahead.arrived(state, contribution(state, site))
        other = {site: contribution(state, site, words="second").sent for site in ("ant", "bee")}
        assert await ahead.take("west", inputs_of(state, "west", 1, other)) is None
        few = {"ant": contribution(state, "ant").sent}
        assert await ahead.take("west", inputs_of(state, "west", 1, few)) is None

    run(driver, body)


def test_a_newer_round_takes_the_place_of_an_older_one(driver):
    async def body(state, recorder, ahead):
        for site in ("ant", "bee"):
            ahead.arrived(state, contribution(state, site))
        for _ in range(3):
            await asyncio.sleep(0)
        ahead.arrived(state, contribution(state, "ant", step=2))
        ahead.arrived(state, contribution(state, "bee", step=1))
        await asyncio.sleep(0)
        assert recorder.spools[0].closed
        assert ahead._rounds["drill-1", "west"].step == 2

    assert len(run(driver, body).asked) == 1


def test_a_contribution_that_is_not_there_yet_is_no_fault(driver):
    async def body(state, recorder, ahead):
        ahead.arrived(state, contribution(state, "cat"))
        inputs = inputs_of(state, "east", 1, {"cat": contribution(state, "cat").sent})
        assert await ahead.take("east", inputs) is None

    assert len(run(driver, body, LostContributionError(digest_of("cat"))).asked) == 1


def test_rounds_of_which_nobody_hears_the_end_give_way(driver, monkeypatch):
    monkeypatch.setattr("coordinator.ahead._KEPT", 1)

    async def body(state, recorder, ahead):
        ahead.arrived(state, contribution(state, "cat"))
        for _ in range(3):
            await asyncio.sleep(0)
        ahead.arrived(state, contribution(state, "ant"))
        await asyncio.sleep(0)
        assert recorder.spools[0].closed
        assert list(ahead._rounds) == [("drill-1", "west")]

    run(driver, body)


def test_close_leaves_nothing(driver):
    async def body(state, recorder, ahead):
        ahead.arrived(state, contribution(state, "cat"))
        ahead.close()
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    assert run(driver, body).asked == []
