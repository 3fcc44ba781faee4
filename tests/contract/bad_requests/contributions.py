"""Contributions that cannot be read, or say what cannot be."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from algorithms.codec import pack_bits, pack_contribution
from tests.contract.bad_requests.case import Case, Http
from tests.contract.bad_requests.states import State
from tests.contract.by_hand import LAYOUT, coefficients

__all__ = ["ARRAYS", "BYTES", "HEADERS", "PART", "contribution"]

PART = "/v1/runs/RUN/regions/west/steps/STEP/contributions/SITE/parts/0"
_MEDIA_TYPE = {"Content-Type": "application/vnd.isthmus+safetensors"}
_GOOD = pack_contribution(coefficients(0), LAYOUT, "sign")
_SPARSE = "9x12"
_WIDTH = 7


def contribution(body: bytes | Callable[[State], bytes], path: str = PART) -> Http:
    return Http("PUT", path, "ranks", body, headers=_MEDIA_TYPE)


def _case(what: str, body: bytes | Callable[[State], bytes], detail: str) -> Case:
    return Case(what, contribution(body), 422, "bad_contribution", detail)


# --- bytes ------------------------------------------------------------------------------------------------------------


def _safetensors(header: str, data: bytes = b"") -> bytes:
    text = header.encode()
    return len(text).to_bytes(8, "little") + text + data


def _crafted(tensors: Mapping[str, Any], data: bytes = b"", **changes: Any) -> Callable[[State], bytes]:
    """A message with the header of a good one, and these tensors."""

    def made(state: State) -> bytes:
        header = state.site.header(state.step) | {"position": state.site.position().model_dump()} | changes
        return _safetensors(json.dumps({"__metadata__": {"contribution": json.dumps(header)}, **tensors}), data)

    return made


def _tensor(start: int, stop: int, dtype: str = "U8", shape: list[int] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [stop - start] if shape is None else shape, "data_offsets": [start, stop]}


def _pickle(state: State) -> bytes:
    """Whoever opens it makes a folder."""
    return state.fill("cos\nmkdir\n(VMARKER\ntR.").encode()


def _cut(state: State) -> bytes:
    return state.site.message(state.step)[:-1]


def _longer(state: State) -> bytes:
    return state.site.message(state.step) + b"\0"


_NOT = "not a safetensors message"
_NO_LENGTH = "not a safetensors message: its header's length is out of range"
BYTES = [
    _case("nothing", b"", "0 bytes are too few for a safetensors message"),
    _case("seven zeros", bytes(7), "7 bytes are too few for a safetensors message"),
    _case("a pickle, which is never opened", _pickle, _NO_LENGTH),
    _case("a header of 2^64 - 1 bytes", b"\xff" * 64, _NO_LENGTH),
    _case("a header of no bytes", bytes(4096), _NO_LENGTH),
    _case("a header of 5 MiB", (5 << 20).to_bytes(8, "little") + b" " * (5 << 20), _NO_LENGTH),
    _case("a header that is no JSON", _safetensors("{{}}"), "the message's header is not valid JSON"),
    _case("a header of 100,000 lists, one in the other", _safetensors("[" * 100_000), "not valid JSON"),
    _case("no metadata", _safetensors("{}"), "the message's metadata has no 'contribution'"),
    _case(
        "an entry", _safetensors('{"__metadata__": {"entry": "{}"}}'), "the message's metadata has no 'contribution'"
    ),
    _case("a list for a header", _safetensors('{"__metadata__": {"contribution": "[]"}}'), "header is not an object"),
    _case("a message that is cut off", _cut, _NOT),
    _case("a message with a byte too much", _longer, _NOT),
    _case("arrays that overlap", _crafted({"a": _tensor(0, 4), "b": _tensor(2, 6)}, bytes(6)), _NOT),
    _case("an array beyond the end", _crafted({"a": _tensor(0, 100)}, bytes(6)), _NOT),
    _case("an array that ends before it begins", _crafted({"a": _tensor(4, 0, shape=[4])}, bytes(4)), _NOT),
    _case("an array of 2^62 by 2^62", _crafted({"a": _tensor(0, 4, shape=[2**62] * 2)}, bytes(4)), _NOT),
    _case("an array of a dtype that is none", _crafted({"a": _tensor(0, 4, "X9")}, bytes(4)), _NOT),
    _case(
        "an array of 8-bit floats", _crafted({"a": _tensor(0, 4, "F8_E5M2")}, bytes(4)), "no arrays of dtype 'F8_E5M2'"
    ),
]

# --- headers ----------------------------------------------------------------------------------------------------------


def _changed(**changes: Any) -> Callable[[State], bytes]:
    return lambda state: state.site.message(state.step, changes)


def _header(what: str, detail: str, **changes: Any) -> Case:
    return _case(what, _changed(**changes), detail)


def _differs(what: str, detail: str, **changes: Any) -> Case:
    return Case(what, contribution(_changed(**changes)), 409, "settings_differ", detail)


def _elsewhere(what: str, detail: str, code: str = "other_place", **changes: Any) -> Case:
    return Case(what, contribution(_changed(**changes)), 422, code, detail)


HEADERS = [
    _header("-1 tokens", "contribution header: tokens: Input should be greater than or equal to 0", tokens=-1),
    _header("2^62 tokens", "tokens: Input should be less than or equal to 1099511627776", tokens=2**62),
    _header("tokens of 1,000 digits", "tokens: Input should be less than or equal", tokens=10**999),
    _header("tokens as text", "tokens: Input should be a valid integer", tokens="many"),
    _case("NaN tokens", _crafted({}, tokens=float("nan")), "tokens: Input should be a finite number"),
    _header("a field that nobody knows", "surprise: Extra inputs are not permitted", surprise=1),
    _header("another version", "contribution version 2; this is 1", version=2),
    _header("a version of 2^64 - 1", f"contribution version {2**64 - 1}; this is 1", version=2**64 - 1),
    _header("an absent tensor that is not there", "absent tensors are not in the layout: nothing", absent=["nothing"]),
    _header("a text for absent tensors", "absent: Input should be a valid list", absent="bias"),
    _header("a position before the log", "position.seq: Input should be", position={"seq": -1, "hash": "0" * 64}),
    _header("a hash that is none", "position.hash: String should match", position={"seq": 0, "hash": "Z" * 64}),
    _header("a path as site", "site: '../a' is no name", site="../a"),
    _differs("another layout", f"layout is {'0' * 64}, the run's is {LAYOUT.digest}", layout="0" * 64),
    _differs("another k", "contribution of SITE: k is 32, the run's is 64", k=32),
    _differs("another codec", "codec is int8, the run's is sign", codec="int8"),
    _differs("another form of indices", "indices is compact, the run's is packed", indices="compact"),
    _differs("a codec of 1 MB", "contribution of SITE: codec is xxx", codec="x" * 1_000_000),
    _differs("half of a surrogate pair as codec", "the run's is sign", codec="\ud800"),
    _elsewhere("another run than the URL's", "the contribution's header says {'run': 'x'", run="x"),
    _elsewhere("another region than the URL's", "'region': 'east'", region="east"),
    _elsewhere("another part than the URL's", "'part': 1", part=1),
    _elsewhere(
        "two parts, where the run has one",
        "part 0 of 2: contributions to this run have one part",
        "other_parts",
        parts=2,
    ),
    _elsewhere("2^64 - 1 parts", f"part 0 of {2**64 - 1}", "other_parts", parts=2**64 - 1),
    Case(
        "part 2^48 of as many",
        contribution(_changed(part=2**48, parts=2**48 + 1), PART.replace("parts/0", f"parts/{2**48}")),
        422,
        "other_parts",
        f"part {2**48} of {2**48 + 1}: contributions to this run have one part, number 0",
    ),
]

# --- arrays -----------------------------------------------------------------------------------------------------------


def _arrays(what: str, detail: str, **changes: NDArray[Any] | None) -> Case:
    """`scales` stands for `9x12.scales`; None leaves an array out."""
    named = {f"{_SPARSE}.{field}": array for field, array in changes.items()}
    arrays = {name: array for name, array in (_GOOD | named).items() if array is not None}
    return _case(what, lambda state: state.site.message(state.step, arrays=arrays), detail)


def _indices(*values: int) -> NDArray[np.uint8]:
    return pack_bits(np.array(values, np.uint16), _WIDTH)


def _scale(value: float) -> NDArray[np.uint8]:
    return (np.array([value], "<f4").view("<u4") >> 16).astype("<u2").view(np.uint8)


_CHUNK = "tensor 'embedding', chunk"
ARRAYS = [
    _case("no array", lambda state: state.site.message(state.step, arrays={}), "is missing"),
    _arrays("an array is missing", "array 9x12.indices is missing", indices=None),
    _arrays("an array too many", "unexpected arrays: 9x12.surplus", surplus=np.zeros(3, np.uint8)),
    _arrays("counts, which updates have", "unexpected arrays: 9x12.counts", counts=np.zeros(2, np.uint8)),
    _arrays(
        "too many values",
        "array 9x12.values must be 1 uint8, got uint8 of shape (1000,)",
        values=np.zeros(1000, np.uint8),
    ),
    _arrays(
        "too few scales", "array 9x12.scales must be 2 uint8, got uint8 of shape (1,)", scales=np.zeros(1, np.uint8)
    ),
    _arrays("values as floats", "array 9x12.values must be 1 uint8, got float32", values=np.zeros(1, np.float32)),
    _arrays("values in two dimensions", "array 9x12.values must be 1 uint8", values=np.zeros((1, 1), np.uint8)),
    _arrays("bits that mean nothing", "array 9x12.values", values=np.full(1, 0xFF, np.uint8)),
    _arrays(
        "a scale of NaN", f"{_CHUNK} 1 (9, 12): scale is negative, not finite or too large", scales=_scale(float("nan"))
    ),
    _arrays("a scale of infinity", "scale is negative, not finite or too large", scales=_scale(float("inf"))),
    _arrays("a negative scale", "scale is negative, not finite or too large", scales=_scale(-1.0)),
    _arrays("a scale of 1e38", "scale is negative, not finite or too large", scales=_scale(1e38)),
    _arrays("an index out of range", "index not below 108", indices=_indices(1, 2, 3, 4, 5, 6, 108)),
    _arrays("an index twice", "indices do not ascend", indices=_indices(1, 2, 3, 4, 5, 6, 6)),
    _arrays("indices out of order", "indices do not ascend", indices=_indices(7, 6, 5, 4, 3, 2, 1)),
]
