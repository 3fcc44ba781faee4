"""A segment gives back each of its entries alone; what is damaged is a ValueError."""

import json

import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from coordinator.segments import pack_segment, read_index, read_span

PLACE = {"run": "run", "region": "west"}
HEADERS = [{"kind": "step", "seq": seq, "step": seq, "note": '"{ä'} for seq in (7, 8, 9, 10)]
MESSAGES = {7: [b"seven", b""], 9: [b"nine" * 100, "a" * 64], 10: ["b" * 64]}


def reader(path):
    return lambda start, stop: path.read_bytes()[start:stop]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "segment"
    path.write_bytes(pack_segment(PLACE, HEADERS, MESSAGES))
    return path


def test_every_message_by_itself(path):
    index = read_index(reader(path))
    assert (index.first, list(index.headers)) == (7, HEADERS)
    assert {key: read_span(reader(path), span) for key, span in index.spans.items()} == {
        (7, 0): b"seven",
        (7, 1): b"",
        (9, 0): b"nine" * 100,
    }
    assert index.blobs == {(9, 1): "a" * 64, (10, 0): "b" * 64}


def test_it_is_a_safetensors_file(path):
    with safetensors.safe_open(path, "numpy") as file:
        assert file.get_tensor("7.0").tobytes() == b"seven"
        assert json.loads(file.metadata()["segment"])["run"] == "run"


def test_two_logs_share_no_segment():
    assert pack_segment(PLACE, HEADERS, MESSAGES) != pack_segment({**PLACE, "region": "east"}, HEADERS, MESSAGES)


@given(st.lists(st.lists(st.binary(max_size=50), max_size=3), min_size=1, max_size=30), st.integers(0, 2**40))
def test_any_messages(tmp_path_factory, parts, first):
    path = tmp_path_factory.getbasetemp() / "any"
    messages = {first + offset: bodies for offset, bodies in enumerate(parts)}
    path.write_bytes(pack_segment(PLACE, [{"seq": seq} for seq in messages], messages))
    index = read_index(reader(path))
    expected = {(seq, part): body for seq, bodies in messages.items() for part, body in enumerate(bodies)}
    assert {key: read_span(reader(path), span) for key, span in index.spans.items()} == expected


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:9],
        lambda data: b"\xff" * 8 + data[8:],
        lambda data: data[:8] + b"[" + data[9:],
        lambda data: safetensors.serialize({}, {"other": "{}"}),
        lambda data: safetensors.serialize({}, {"segment": '{"first": 1}'}),
        lambda data: safetensors.serialize({}, {"segment": "[]"}),
    ],
)
def test_damage(path, damage):
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError):
        read_index(reader(path))


def test_a_file_that_is_cut_off(path):
    index = read_index(reader(path))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="ends before byte"):
        read_span(reader(path), max(index.spans.values()))
