"""What follows what was read is on its way, and no more than that."""

from threading import Event

import pytest

from coordinator.read_ahead import ReadAhead
from tests.conftest import wait_until

DATA = bytes(range(256)) * 4


class Far:
    """Notes what is asked for; ranges behind `held` wait for `open`, those that begin in `failing` fail once."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, int]] = []
        self.failing: set[int] = set()
        self.held = 1 << 30
        self.open = Event()

    def fetch(self, digest: str, start: int, stop: int) -> bytes:
        self.asked.append((digest, start, stop))
        if start >= self.held:
            assert self.open.wait(20)
        if start in self.failing:
            self.failing.remove(start)
            raise OSError("the link broke")
        return DATA[start:stop]


@pytest.fixture
def far() -> Far:
    return Far()


def test_every_range_is_asked_for_once(far: Far):
    ahead = ReadAhead(far.fetch)
    parts = dict.fromkeys("abc", b"")
    for start in range(0, 1024, 100):  # of several blobs in turn, as an outer step reads them
        for digest in parts:
            parts[digest] += ahead.read(digest, start, min(start + 100, 1024))
    assert set(parts.values()) == {DATA}
    for digest in parts:
        asked = [place for place in far.asked if place[0] == digest and place[1] < 1024]
        assert sorted(asked) == [(digest, start, start + 100) for start in range(0, 1024, 100)]


def test_the_next_one_is_on_its_way(far: Far):
    far.held = 20
    ahead = ReadAhead(far.fetch)
    ahead.read("a", 0, 10)
    assert far.asked == [("a", 0, 10)], "one range says nothing about the next"
    assert ahead.read("a", 10, 20) == DATA[10:20]
    wait_until(lambda: ("a", 20, 30) in far.asked, "the next range")
    far.open.set()
    assert ahead.read("a", 20, 30) == DATA[20:30]
    assert far.asked.count(("a", 20, 30)) == 1


@pytest.mark.parametrize("places", [[(20, 40), (40, 45), (45, 50)], [(7, 9), (9, 11)], [(500, 600), (20, 30)]], ids=str)
def test_other_places_and_other_sizes(far: Far, places):
    ahead = ReadAhead(far.fetch)
    for start, stop in [(0, 10), (10, 20), *places]:
        assert ahead.read("a", start, stop) == DATA[start:stop]


def test_what_failed_on_its_way_is_asked_for_again(far: Far):
    far.failing = {20}
    ahead = ReadAhead(far.fetch)
    for start in (0, 10, 20):
        assert ahead.read("a", start, start + 10) == DATA[start : start + 10]
    assert far.asked.count(("a", 20, 30)) == 2
    far.failing = {500}
    with pytest.raises(OSError, match="the link broke"):
        ahead.read("a", 500, 510)


def test_little_waits_to_be_read(far: Far):
    ahead = ReadAhead(far.fetch)
    for number in range(50):
        ahead.read(str(number), 0, 10)
        ahead.read(str(number), 10, 20)
    assert ahead._coming.keys() == {str(number) for number in range(42, 50)}
    large = 8 << 20
    for start in (0, large):
        ahead.read("large", start, start + large)
    assert far.asked[-2:] == [("large", 0, large), ("large", large, 2 * large)]
