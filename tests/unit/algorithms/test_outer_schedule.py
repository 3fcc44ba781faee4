"""Which fragments are due when, which outer rounds follow, and how a delayed anchor is applied."""

import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from algorithms.outer import delayed_anchor, shifted
from algorithms.schedule import OuterSchedule, outer_due
from tests import reference


@st.composite
def schedules(draw: Any) -> OuterSchedule:
    every, fragments, stagger = draw(st.integers(1, 30)), draw(st.integers(1, 40)), draw(st.booleans())
    distance = OuterSchedule(every=every, fragments=fragments, steps=1, stagger=stagger).distance
    return OuterSchedule(
        every=every,
        fragments=fragments,
        steps=draw(st.integers(1, 100)),
        stagger=stagger,
        delay=draw(st.integers(0, distance - 1)),
    )


def due_steps(schedule: OuterSchedule) -> list[int]:
    return [step for step in range(-1, schedule.steps + 2) if schedule.due(step)]


@given(schedules())
def test_every_fragment_is_due_once_in_every_so_many_steps_and_after_the_last(schedule: OuterSchedule) -> None:
    for fragment in range(schedule.fragments):
        steps = [step for step in due_steps(schedule) if fragment in schedule.due(step)]
        assert steps[-1] == schedule.steps
        assert steps[0] <= schedule.every
        gaps = np.diff(steps)
        assert (gaps[:-1] == schedule.every).all()
        assert (gaps[-1:] <= schedule.every).all()
    assert schedule.due(schedule.steps) == tuple(range(schedule.fragments))


@given(schedules())
def test_without_changes_an_outer_round_follows_every_turn(schedule: OuterSchedule) -> None:
    assert rounds(schedule) == due_steps(schedule)


def rounds(schedule: OuterSchedule) -> list[int]:
    found: list[int] = []
    while (step := schedule.following(found[-1] if found else 0)) is not None:
        found.append(step)
    return found


@given(schedules(), st.lists(st.tuples(st.integers(1, 100), st.integers(1, 30)), max_size=4))
def test_after_changes_turns_are_left_out_that_come_while_anchors_are_on_their_way(
    schedule: OuterSchedule, changes: list[tuple[int, int]]
) -> None:
    changes = sorted(((step, every) for step, every in changes if step <= schedule.steps), key=lambda one: one[0])
    changed = replace(schedule, changes=tuple(changes))
    expected: list[int] = []
    for step in range(1, schedule.steps + 1):
        every = [schedule.every, *(every for since, every in changes if since <= step)][-1]
        turns = [number * every // schedule.fragments for number in range(1, schedule.fragments + 1)]
        fragments = [f for f, turn in enumerate(turns) if (step - (turn if schedule.stagger else 0)) % every == 0]
        if step == schedule.steps:
            fragments = list(range(schedule.fragments))
        assert list(changed.due(step)) == fragments
        on_their_way = bool(expected) and step <= expected[-1] + schedule.delay
        early = not expected and step <= schedule.delay
        if fragments and (step == schedule.steps or not (on_their_way or early)):
            expected.append(step)
    assert rounds(changed) == expected


@given(schedules(), st.integers(1, 90))
def test_the_turns_around_a_step(schedule: OuterSchedule, step: int) -> None:
    endless = replace(schedule, steps=1000)
    turns = due_steps(endless)
    assert endless.has_turn(step) == (step in turns)
    assert endless.turn_before(step) == max((turn for turn in turns if turn < step), default=0)
    assert endless.turn_after(step) == min(turn for turn in turns if turn > step)


@given(schedules())
def test_an_anchor_is_applied_before_the_next_copy_is_taken_and_not_after_the_last_step(
    schedule: OuterSchedule,
) -> None:
    steps = due_steps(schedule)
    for step, following in pairwise(steps):
        assert step <= schedule.applied_after(step) <= following
        assert following == schedule.steps or schedule.applied_after(step) < following
    assert schedule.applied_after(schedule.steps) == schedule.steps


@given(schedules())
def test_the_distance_is_between_two_rounds(schedule: OuterSchedule) -> None:
    long = OuterSchedule(
        every=schedule.every, fragments=schedule.fragments, steps=5 * schedule.every, stagger=schedule.stagger
    )
    assert min(np.diff(due_steps(long))) == schedule.distance


def test_staggered_fragments_are_spread() -> None:
    schedule = OuterSchedule(every=10, fragments=4, steps=24, stagger=True, delay=1)
    due = {step: schedule.due(step) for step in due_steps(schedule)}
    assert due == {
        2: (0,), 5: (1,), 7: (2,), 10: (3,), 12: (0,), 15: (1,), 17: (2,), 20: (3,), 22: (0,), 24: (0, 1, 2, 3)
    }  # fmt: skip
    assert [schedule.applied_after(step) for step in (2, 10, 24)] == [3, 11, 24]


@given(st.integers(1, 20), st.integers(1, 60), st.integers(0, 70))
def test_without_stagger_all_are_due_together(every: int, steps: int, step: int) -> None:
    schedule = OuterSchedule(every=every, fragments=3, steps=steps)
    assert schedule.due(step) == ((0, 1, 2) if 0 < step <= steps and outer_due(step, every, steps) else ())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"every": 0}, "every must be at least 1, got 0"),
        ({"fragments": 0}, "fragments must be at least 1, got 0"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"delay": -1}, "at least 0 and below 10"),
        ({"delay": 10}, "below 10, the fewest steps between two outer rounds, got 10"),
        ({"stagger": True, "delay": 3}, "below 3"),
        ({"stagger": True, "fragments": 11, "delay": 1}, "below 1"),
    ],
)
def test_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        OuterSchedule(**{"every": 10, "fragments": 3, "steps": 100} | changes)


def floats(size: int) -> Any:
    return arrays.arrays(np.float32, size, elements=st.floats(-(2.0**60), 2.0**60, width=32))


@given(st.data(), st.sampled_from([0.0, 0.1, 0.5, 1.0]))
def test_delayed_anchor_is_the_reference(data: Any, mix: float) -> None:
    size = data.draw(st.integers(0, 7))
    anchor, now, taken = (data.draw(floats(size)) for _ in range(3))
    found = delayed_anchor(anchor, now, taken, mix)
    assert found.dtype == np.float32
    assert found.tobytes() == reference.delayed_anchor(anchor, now, taken, mix).tobytes()


@given(st.data(), st.floats(0, 1, width=32))
def test_where_nothing_moved_it_is_the_anchor_bit_for_bit(data: Any, mix: float) -> None:
    anchor, now = (data.draw(floats(4)) for _ in range(2))
    anchor[0] = -0.0
    assert delayed_anchor(anchor, now, now.copy(), mix).tobytes() == anchor.tobytes()


def test_delayed_anchor_rounds_every_operation() -> None:
    anchor, now, taken = (np.array([value], np.float32) for value in (2.0**-24, 1, -(2.0**-25)))
    assert delayed_anchor(anchor, now, taken, 1.0)[0] == 1, "with one rounding in all it would be above 1"


def test_delayed_anchor_refuses_other_sizes() -> None:
    with pytest.raises(ValueError, match="one size"):
        delayed_anchor(np.zeros(2, np.float32), np.zeros(3, np.float32), np.zeros(2, np.float32), 1.0)


@given(st.data())
def test_shifted_is_the_reference(data: Any) -> None:
    size = data.draw(st.integers(1, 7))
    now, anchor, before = (data.draw(floats(size)) for _ in range(3))
    if data.draw(st.booleans()):
        now[0] = before[0]
    if data.draw(st.booleans()):
        anchor[-1] = before[-1]
    found = shifted(now, anchor, before)
    assert found.dtype == np.float32
    assert found.tobytes() == reference.shifted(now, anchor, before).tobytes()


def test_shifted_is_exact_where_nothing_or_only_the_anchor_moved() -> None:
    now = np.array([0.0, -0.0, 1e8, 1e-3], np.float32)
    anchor, before = np.array([-0.0, 0.25, 1e-3, 1e8], np.float32), np.array([0.0, 0.25, 1e8, 1e8], np.float32)
    assert (now + (anchor - before))[2] == 0
    assert shifted(now, anchor, before).tobytes() == np.array([-0.0, -0.0, 1e-3, 1e-3], np.float32).tobytes()


def test_shifted_rounds_every_operation() -> None:
    now, anchor, before = (np.array([value], np.float32) for value in (2.0**-24, 1, -(2.0**-25)))
    assert shifted(now, anchor, before)[0] == 1, "with one rounding in all it would be above 1"
