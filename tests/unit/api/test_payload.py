"""Messages of tensors: what comes out is what went in, and hostile bytes raise ValueError and nothing else."""

import contextlib
import hashlib
import json

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from api.payload import canonical_json, decode_message, digest_json, encode_message

ARRAYS = {"a": np.arange(5, dtype=np.uint8), "b": np.zeros((2, 3), np.float32)}
MESSAGE = encode_message("entry", {"step": 3}, ARRAYS)


def message(header, data=b""):
    """Bytes with any header, an object or text."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def with_metadata(value):
    return message({"__metadata__": {"entry": "{}"}, "x": value}, bytes(16))


def decode(body):
    """Whatever the bytes are: a message or a ValueError."""
    with contextlib.suppress(ValueError):
        header, arrays = decode_message("entry", body)
        assert isinstance(header, dict)
        assert all(isinstance(array, np.ndarray) for array in arrays.values())


@pytest.mark.parametrize("arrays", [{}, ARRAYS, {"empty": np.zeros(0, np.uint8)}, {"strided": np.arange(10)[::2]}])
def test_round_trip(arrays):
    header = {"text": 'ä\n"\\', "number": 0.1, "nested": {"list": [1, None, True]}}
    read, back = decode_message("entry", encode_message("entry", header, arrays))
    assert read == header
    assert back.keys() == arrays.keys()
    for name, array in arrays.items():
        assert back[name].dtype == array.dtype
        np.testing.assert_array_equal(back[name], array)


def test_equal_messages_have_equal_bytes():
    swapped = dict(reversed(ARRAYS.items()))
    assert encode_message("entry", {"b": 1, "a": 2}, ARRAYS) == encode_message("entry", {"a": 2, "b": 1}, swapped)


def test_canonical_json():
    assert canonical_json({"b": [1, 2.5], "a": "ä"}) == '{"a":"\\u00e4","b":[1,2.5]}'
    assert digest_json({"b": 1, "a": 2}) == hashlib.sha256(b'{"a":2,"b":1}').hexdigest()
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError):
            canonical_json(value)


def test_another_kind_of_message():
    with pytest.raises(ValueError, match="'contribution'"):
        decode_message("contribution", MESSAGE)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\0" * 7,
        b"\0" * 8,
        b"\xff" * 8 + b"{}",
        (1 << 62).to_bytes(8, "little") + bytes(100),
        message(b"{}"),
        message(b"[]"),
        message(b"null"),
        message(b"  "),
        message(b"\xff\xfe"),
        message(b"[" * 100_000),
        message(b'{"__metadata__": ' + b"9" * 5000 + b"}"),
        message({"__metadata__": None}),
        message({"__metadata__": 5}),
        message({"__metadata__": "entry"}),
        message({"__metadata__": ["entry"]}),
        message({"__metadata__": {}}),
        message({"__metadata__": {"entry": 5}}),
        message({"__metadata__": {"entry": None}}),
        message({"__metadata__": {"entry": {}}}),
        message({"__metadata__": {"entry": "5"}}),
        message({"__metadata__": {"entry": "{"}}),
        message({"__metadata__": {"entry": "[" * 100_000}}),
        message({"__metadata__": {"entry": '{"x": ' + "9" * 5000 + "}"}}),
        message({"__metadata__": {"entry": "{}", "other": 5}}),
        with_metadata(None),
        with_metadata({}),
        with_metadata({"dtype": "U8", "shape": [16], "data_offsets": [0, 17]}),
        with_metadata({"dtype": "U8", "shape": [17], "data_offsets": [0, 16]}),
        with_metadata({"dtype": "U8", "shape": [15], "data_offsets": [0, 15]}),
        with_metadata({"dtype": "U8", "shape": [-16], "data_offsets": [0, 16]}),
        with_metadata({"dtype": "U8", "shape": [2**63, 2**63], "data_offsets": [0, 16]}),
        with_metadata({"dtype": "U8", "shape": [16], "data_offsets": [16, 0]}),
        with_metadata({"dtype": "OBJECT", "shape": [16], "data_offsets": [0, 16]}),
        MESSAGE[:-1],
        MESSAGE + b"\0",
    ],
    ids=range(36),
)
def test_hostile_bytes(body):
    with pytest.raises(ValueError):
        decode_message("entry", body)


@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3", "F8_E5M2", "F4", "C64", "BOOL", "I64", "F64", "F16", "E8M0"])
def test_every_dtype_is_read_or_refused(dtype):
    for elements in (1, 2, 4, 8, 16, 32):
        decode(with_metadata({"dtype": dtype, "shape": [elements], "data_offsets": [0, 16]}))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
tensors = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(("U8", "F32", "BF16", "F8_E4M3", "nothing", 5)),
        "shape": st.lists(st.integers(-2, 20), max_size=3) | json_values,
        "data_offsets": st.lists(st.integers(-2, 40), min_size=1, max_size=3) | json_values,
        "surplus": json_values,
    },
)


@given(st.binary(max_size=200))
@example(MESSAGE[:8])
def test_any_bytes(body):
    decode(body)


@given(st.binary(max_size=100), st.binary(max_size=20))
def test_any_header(text, data):
    decode(message(text, data))


@given(
    metadata=json_values | st.dictionaries(st.sampled_from(("entry", "x")), st.text(max_size=5) | json_values),
    described=st.dictionaries(st.text(max_size=3), tensors | json_values, max_size=3),
    data=st.binary(max_size=40),
)
def test_any_tensors(metadata, described, data):
    decode(message({"__metadata__": metadata} | described, data))


@given(st.data())
def test_one_byte_changed(data):
    place = data.draw(st.integers(0, len(MESSAGE) - 1))
    byte = data.draw(st.integers(0, 255))
    decode(MESSAGE[:place] + bytes([byte]) + MESSAGE[place + 1 :])
