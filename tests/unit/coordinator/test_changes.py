"""Changes of settings in a run that goes on: what is refused, where they come into the logs, what follows them."""

from api.schemas import RunStatus
from api.specs import Change, OuterSpec
from coordinator.changes import MOST_CHANGES
from coordinator.events import ChangeRequested, PauseRequested, ResumeRequested, SiteLost
from tests.unit.coordinator.runs import Driver, entry_hash

TWO = {"a": "west", "b": "west"}
APART = {"a": "west", "b": "west", "c": "east"}


def change(driver, step, **settings):
    return driver.send(ChangeRequested(Change(from_step=step, **settings)))


def refused(driver, code, step, **settings):
    return driver.refused(ChangeRequested(Change(from_step=step, **settings)), code)


def kinds(driver, region="west"):
    return [(header["kind"], header["step"]) for header in driver.logs[region]]


def test_changes_have_an_end():
    driver = Driver(TWO, steps=9).begin()
    for number in range(MOST_CHANGES):
        change(driver, 3, k=8 + number % 2)
    assert "200 changes of settings, and no run can have more" in refused(driver, "too_many_changes", 3, k=8).detail
    change(driver, 3, k=9)  # the answer to the last one was lost
    assert driver.finish().status is RunStatus.SUCCEEDED


def test_a_change_comes_into_the_log_right_before_its_step_is_opened():
    driver = Driver(TWO, steps=4).begin()
    change(driver, 3, lr=0.5, k=8)
    driver.until_step(1)
    assert kinds(driver) == [("start", 0), ("step", 1)]
    before = driver.state.regions["west"]
    driver.until_step(2)
    header = driver.logs["west"][-1]
    assert header == {
        "version": 1,
        "kind": "change",
        "seq": 3,
        "step": 2,
        "previous": entry_hash(driver.logs["west"][2]),
        "from_step": 3,
        "lr": 0.5,
        "k": 8,
        "every": None,
    }
    error = driver.refused(driver.contribution("a", step=3, position=Driver.position(before)), "off_chain")
    assert "load the log again" in error.detail
    old = Driver.position(before).model_copy(update={"seq": 2, "hash": header["previous"]})
    error = driver.refused(driver.contribution("a", step=3, position=old), "settings_changed")
    assert error.context == {"seq": 3}
    assert driver.finish().status is RunStatus.SUCCEEDED
    steps = [header for header in driver.logs["west"] if header["kind"] == "step"]
    assert [header["k"] for header in steps] == [32, 32, 8, 8]


def test_without_rounds_changes_come_right_behind_outer_rounds():
    driver = Driver({"a": "west", "b": "east"}, steps=11, every=2, fragments=2, exchange="none").begin()
    assert refused(driver, "step_open", 2, lr=0.5).context == {"from_step": 3}
    driver.until_outer()  # after step 2: only its anchors are still to come
    error = refused(driver, "not_behind_an_outer_step", 4, every=3)
    assert str(error).endswith("only right behind an outer step: with H = 2 before it make that 3 or 5")
    change(driver, 3, lr=0.5, every=3)
    assert str(refused(driver, "not_behind_an_outer_step", 6, lr=0.25)).endswith("make that 4 or 7")
    change(driver, 7, lr=0.25)
    error = refused(driver, "not_behind_an_outer_step", 4, every=4)  # after which there would be none at step 6
    assert "settings change from step 7 on" in str(error)
    assert driver.state.changes == (Change(from_step=3, lr=0.5, every=3), Change(from_step=7, lr=0.25))
    driver.until_outer_round(1)
    assert driver.words == "outer round 2, after step 3: 2 of 2 sites on their way: a, b"
    assert driver.finish().status is RunStatus.SUCCEEDED
    for region in driver.state.regions:
        assert kinds(driver, region) == [
            ("start", 0),
            *[("anchor", 2), ("anchor", 2), ("change", 2)],
            *[("anchor", 3), ("anchor", 3)],
            *[("anchor", 6), ("anchor", 6), ("change", 6)],
            *[("anchor", 9), ("anchor", 9)],
            *[("anchor", 11), ("anchor", 11)],
        ]
    assert [header["lr"] for header in driver.logs["east"] if header["kind"] == "change"] == [0.5, 0.25]


def test_what_cannot_be_changed_is_refused():
    driver = Driver(TWO, steps=4)
    refused(driver, "wrong_status", 3, k=8)
    driver.begin().until_step(1)
    assert refused(driver, "step_open", 2, k=8).context == {"from_step": 3}
    refused(driver, "nothing_to_change", 3)
    refused(driver, "nothing_to_change", 3, k=driver.spec.optimizer.k)
    refused(driver, "no_such_step", 5, k=8)
    refused(driver, "no_outer_steps", 3, every=2)
    assert "k must be 1 to 4096" in refused(driver, "bad_change", 3, k=4097).detail
    assert driver.state.changes == ()
    change(driver, 3, k=8)
    driver.until_step(3)
    change(driver, 3, k=8)  # the answer was lost
    refused(driver, "step_open", 3, k=9)


def test_the_later_one_of_two_changes_from_the_same_step_counts():
    driver = Driver(TWO, steps=4).begin()
    change(driver, 3, k=8, lr=0.5)
    change(driver, 3, k=4)
    change(driver, 2, k=2)
    assert [one.from_step for one in driver.state.changes] == [2, 3, 3]
    driver.finish()
    steps = [header for header in driver.logs["west"] if header["kind"] == "step"]
    assert [header["k"] for header in steps] == [32, 2, 4, 4]
    told = [(header["k"], header["lr"]) for header in driver.logs["west"] if header["kind"] == "change"]
    assert told == [(2, driver.spec.optimizer.lr), (8, 0.5), (4, 0.5)]


def test_a_change_of_h_moves_the_outer_rounds():
    driver = Driver(APART, steps=12, every=4).begin()
    change(driver, 6, every=3)
    change(driver, 10, every=5)
    assert driver.finish().status is RunStatus.SUCCEEDED
    assert [summary.step for summary in driver.summaries] == [4, 6, 9, 10, 12]
    for region in ("west", "east"):
        assert kinds(driver, region)[4:8] == [("step", 4), ("anchor", 4), ("step", 5), ("change", 5)]


def test_a_change_waits_for_the_outer_round_before_its_step_and_for_the_resume():
    driver = Driver(APART, steps=4, every=2).begin().until_outer()
    change(driver, 3, k=8)
    driver.send(PauseRequested())
    while driver.exchange():
        pass
    assert kinds(driver)[-1] == ("anchor", 2)
    change(driver, 3, k=4)
    driver.send(ResumeRequested())
    assert kinds(driver)[-3:] == [("anchor", 2), ("change", 2), ("change", 2)]
    assert driver.finish().status is RunStatus.SUCCEEDED


def test_a_region_that_was_taken_along_gets_the_changes_it_has_missed():
    driver = Driver(APART, steps=8, every=4).begin()
    driver.send(SiteLost("c", "no heartbeat"))
    change(driver, 2, k=8)
    driver.until_outer()
    assert kinds(driver, "east") == [("start", 0)]
    while driver.state.outer is not None:
        driver.exchange()
    assert kinds(driver, "east") == [("start", 0), ("anchor", 4), ("change", 4)]
    assert driver.state.regions["east"].resume.in_force.k == 8


def test_h_may_not_exceed_the_steps():
    driver = Driver(APART, steps=12, every=4).begin()
    error = refused(driver, "bad_change", 6, every=13)
    assert "outer.every = 13 is more than steps = 12" in error.detail
    assert driver.spec.outer == OuterSpec(every=4)
