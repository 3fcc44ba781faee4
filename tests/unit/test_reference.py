"""Known answers, worked out by hand, for the reference that other tests trust."""

import hashlib
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import reference
from tests.reference import ChunkUpdate, SentChunk

# With s = 16 the weight is one chunk of 72 elements (7-bit indices, 2 kept at k = 8) and the bias a dense one of 3.
TENSORS = [("bias", (3,)), ("weight", (9, 8))]


def packed(arrays):
    return {name: np.array(values, dtype=np.uint8) for name, values in arrays.items()}


def shapes(tensor_shape, side):
    return [(piece.rows, piece.cols) for piece in reference.chunks([("x", tensor_shape)], side)]


# --- layout -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensor_shape", "side", "expected"),
    [
        ((), 64, [(1, 1)]),
        ((0, 5), 64, []),
        ((7,), 64, [(1, 7)]),
        ((768,), 64, [(12, 64)]),
        ((130,), 64, [(2, 64), (1, 2)]),
        ((1, 130), 64, [(2, 64), (1, 2)]),
        ((130, 1), 64, [(2, 64), (1, 2)]),
        ((64 * 65 + 1,), 64, [(33, 64), (32, 64), (1, 1)]),
        ((64 * 65 + 1,), 128, [(65, 64), (1, 1)]),
        ((131, 2), 64, [(44, 2), (44, 2), (43, 2)]),
        ((5, 5), 4, [(3, 3), (3, 2), (2, 3), (2, 2)]),
        ((4, 3, 2, 2), 8, [(4, 6), (4, 6)]),
        ((6, 2, 1), 8, [(6, 2)]),
        ((130, 1, 1), 64, [(2, 64), (1, 2)]),
        ((2, 3, 20), 16, [(3, 10), (3, 10), (3, 10), (3, 10)]),
        ((2, 1, 130), 64, [(2, 64), (1, 2), (2, 64), (1, 2)]),
    ],
)
def test_grid(tensor_shape, side, expected):
    assert shapes(tensor_shape, side) == expected


def test_positions_of_a_stack_of_matrices():
    second_matrix = reference.chunks([("x", (2, 3, 20))], 16)[3]
    assert second_matrix.positions[:, 0].tolist() == [70, 90, 110]


@given(st.lists(st.integers(0, 20), max_size=4), st.integers(2, 9))
def test_every_element_is_in_one_chunk_no_larger_than_the_side(tensor_shape, side):
    pieces = reference.chunks([("x", tuple(tensor_shape))], side)
    assert all(max(piece.rows, piece.cols) <= side for piece in pieces)
    positions = [int(position) for piece in pieces for position in piece.positions.flat]
    assert sorted(positions) == list(range(math.prod(tensor_shape)))


def test_layout_order_ignores_wrappers():
    assert reference.layout_order(["module.b", "_orig_mod.a.module.c", "a.d"]) == [
        "_orig_mod.a.module.c",
        "a.d",
        "module.b",
    ]


# --- transform --------------------------------------------------------------------------------------------------------


def test_integer_bases():
    assert reference.integer_basis(1).tolist() == [[126]]
    assert reference.integer_basis(2).tolist() == [[126, 126], [126, -126]]
    assert reference.integer_basis(3).tolist() == [[89, 89, 89], [109, 0, -109], [63, -126, 63]]


@given(st.integers(1, 70))
def test_dct_is_orthonormal(length):
    basis = reference.dct(length)
    np.testing.assert_allclose(basis @ basis.T, np.eye(length), atol=1e-12)


def test_forward_of_a_constant_has_one_coefficient():
    piece = reference.chunks([("x", (4, 4))], 4)[0]
    coefficients = reference.forward(np.ones((4, 4)), piece.positions)
    np.testing.assert_allclose(coefficients, np.diag([4.0, 0, 0, 0]), atol=1e-12)


# --- wire format ------------------------------------------------------------------------------------------------------


def test_unpack_contribution_of_signs():
    arrays = packed(
        {
            "9x8.indices": [0x03, 0x23],  # 3 + (70 << 7)
            "9x8.values": [0b10],
            "9x8.scales": [0xC0, 0x3F],
            "1x3.values": [0b101],
            "1x3.scales": [0x80, 0x3E],
        }
    )
    assert reference.unpack_contribution(arrays, TENSORS, 16, "sign", 8, []) == [
        SentChunk({0: -1, 1: 1, 2: -1}, 0.25),
        SentChunk({3: 1, 70: -1}, 1.5),
    ]


def test_unpack_contribution_of_int8_without_the_absent():
    arrays = packed({"1x3.values": [127, 0, 0x81], "1x3.scales": [0x80, 0x3E]})
    assert reference.unpack_contribution(arrays, TENSORS, 16, "int8", 8, ["weight"]) == [
        SentChunk({0: 127, 1: 0, 2: -127}, 0.25),
        None,
    ]


@pytest.mark.parametrize(
    ("codec", "values", "expected"),
    [
        ("int2", [0b11_00_01], [-1, -3, 3]),
        ("int4", [0x97, 0x0F], [7, -7, -1]),
        ("int16", [1, 0, 1, 0x80, 0xFF, 0x7F], [1, -32767, 32767]),
    ],
)
def test_unpack_contribution_of_other_integers(codec, values, expected):
    arrays = packed({"1x3.values": values, "1x3.scales": [0x80, 0x3E]})
    (bias, _) = reference.unpack_contribution(arrays, TENSORS, 16, codec, 8, ["weight"])
    assert bias == SentChunk(dict(enumerate(expected)), 0.25)


def test_unpack_contribution_refuses_the_most_negative_number():
    arrays = packed({"1x3.values": [0x08, 0], "1x3.scales": [0x80, 0x3E]})
    with pytest.raises(AssertionError, match="a value that the codec has not"):
        reference.unpack_contribution(arrays, TENSORS, 16, "int4", 8, ["weight"])


COMPACT = {
    # of 72 elements 8 are kept at k = 28: 56 bits in `indices`, or 8 * 3 in `low` and 8 + 9 - 1 in `high`
    "9x8.low": [0b11_001_000, 0b1_110_000_1, 0b001_000_11],  # of 0, 1, 7, 8, 30, 31, 40, 65
    "9x8.high": [0b10010111, 0b10001001],
    "9x8.values": [0b10000001],
    "9x8.scales": [0xC0, 0x3F],
}


def test_unpack_contribution_of_compact_indices():
    sent = reference.unpack_contribution(packed(COMPACT), TENSORS, 16, "sign", 28, ["bias"], "compact")
    assert sent == [None, SentChunk({0: -1, 1: 1, 7: 1, 8: 1, 30: 1, 31: 1, 40: 1, 65: -1}, 1.5)]


@pytest.mark.parametrize(
    ("field", "values", "message"),
    [
        ("high", [0b10010111, 0b11001001], "as many ones"),
        ("low", [0b11_000_000, 0b1_110_000_1, 0b001_000_11], "ascend"),
        ("low", [0b11_001_000, 0b1_110_000_1, 0b001_000_11, 0], "too long"),
    ],
)
def test_unpack_contribution_refuses_other_records(field, values, message):
    arrays = packed(COMPACT | {f"9x8.{field}": values})
    with pytest.raises(AssertionError, match=message):
        reference.unpack_contribution(arrays, TENSORS, 16, "sign", 28, ["bias"], "compact")


def update_arrays():
    return packed(
        {
            "present": [0b11],
            "9x8.counts": [2, 0],
            "9x8.indices": [0x03, 0x23],
            "9x8.bits": [4],
            "9x8.exponents": [0xFE, 0xFF],
            "9x8.values4": [0x97],  # 7, then -7
            "1x3.bits": [4],
            "1x3.exponents": [1, 0],
            "1x3.values4": [0x0F, 0x06],  # -1, 0, 6
        },
    )


UPDATE = [ChunkUpdate({0: -1, 2: 6}, 1, 4), ChunkUpdate({3: 7, 70: -7}, -2, 4)]


def test_unpack_update():
    assert reference.unpack_update(update_arrays(), TENSORS, 16) == UPDATE


def test_unpack_update_of_compact_indices():
    """As many ones in the record as `counts` says; 40 bits instead of 56."""
    arrays = {name: array for name, array in update_arrays().items() if not name.startswith("9x8")}
    arrays |= packed({f"9x8.{field}": COMPACT[f"9x8.{field}"] for field in ("low", "high")})
    arrays |= packed({"9x8.counts": [8, 0], "9x8.bits": [4], "9x8.exponents": [0, 0], "9x8.values4": [0x21, 0x43] * 2})
    expected = dict(zip([0, 1, 7, 8, 30, 31, 40, 65], [1, 2, 3, 4] * 2, strict=True))
    assert reference.unpack_update(arrays, TENSORS, 16) == [UPDATE[0], ChunkUpdate(expected, 0, 4)]


def test_unpack_update_of_one_tensor():
    arrays = {name: array for name, array in update_arrays().items() if not name.startswith("1x3")}
    arrays["present"] = np.array([0b10], dtype=np.uint8)
    assert reference.unpack_update(arrays, TENSORS, 16) == [None, UPDATE[1]]


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("9x8.counts", [3, 0], "too short"),
        ("9x8.counts", [1, 0], "too long|padding"),
        ("9x8.indices", [0x46, 0x01], "ascend"),  # 70, then 2
        ("9x8.values4", [0x90], "zeros are dropped"),
        ("1x3.values4", [0x0F, 0x16], "padding"),
        ("8x9.bits", [4], "no chunk asks for"),
    ],
)
def test_malformed_updates_are_refused(name, values, message):
    arrays = update_arrays() | {name: np.array(values, dtype=np.uint8)}
    with pytest.raises(AssertionError, match=message):
        reference.unpack_update(arrays, TENSORS, 16)


def test_kept_per_chunk_rounds_and_clamps():
    def kept(elements, k):
        return reference.kept_per_chunk(reference.Chunk(0, 1, elements, np.empty(0)), k, 64)

    assert [kept(4096, 32), kept(2048, 32), kept(192, 32), kept(65, 8), kept(65, 4096)] == [32, 16, 2, 1, 65]


# --- aggregate --------------------------------------------------------------------------------------------------------


ONE_CHUNK = reference.chunks([("x", (9, 8))], 16)


def test_one_site_comes_back_in_four_bits():
    # E = 1, v = 1.5 * 2^21 = 6 * 2^19: shift 19, exponent 1 - 22 + 19.
    sent = [[SentChunk({3: 1, 70: -1}, 1.5)]]
    assert reference.aggregate(sent, [0], "sign", ONE_CHUNK) == [ChunkUpdate({3: 6, 70: -6}, -2, 4)]


def test_mean_is_over_the_sites_that_sent_and_zeros_are_dropped():
    contributions = [[SentChunk({0: 1, 1: 1}, 1.0)], [SentChunk({0: -1, 2: -1}, 1.0)], [SentChunk({2: 1, 3: 1}, 3.0)]]
    # E = 2: unit 2^20. Index 0 cancels; 2 has (3 - 1) / 2; 3 has 3. Shift 19 makes them 2, 2 and 6.
    expected = [ChunkUpdate({1: 2, 2: 2, 3: 6}, -1, 4)]
    assert reference.aggregate(contributions, [0, 0, 0], "sign", ONE_CHUNK) == expected


def test_halvings_scale_zero_and_absence():
    present, nothing = SentChunk({0: 1}, 4.0), SentChunk({0: -1}, 0.0)
    quarter = [ChunkUpdate({0: 4}, -2, 4)]
    assert reference.aggregate([[present], [None]], [2, 0], "sign", ONE_CHUNK) == quarter
    assert reference.aggregate([[present], [nothing]], [2, 0], "sign", ONE_CHUNK) == quarter
    assert reference.aggregate([[nothing]], [0], "sign", ONE_CHUNK) == [None]
    assert reference.aggregate([[None], [None]], [0, 0], "sign", ONE_CHUNK) == [None]


def test_a_tensor_is_absent_only_if_all_of_its_chunks_are_zero():
    pieces = reference.chunks([("x", (20, 8)), ("y", (9, 8))], 16)
    assert [piece.tensor for piece in pieces] == [0, 0, 1]
    value, nothing, minus = SentChunk({0: 1}, 4.0), SentChunk({0: 1}, 0.0), SentChunk({0: -1}, 4.0)
    contributions = [[nothing, value, value], [nothing, value, minus]]
    # the first chunk stays, 4 bits wide and empty; the two values of tensor y cancel
    expected = [ChunkUpdate({}, 0, 4), ChunkUpdate({0: 4}, 0, 4), None]
    assert reference.aggregate(contributions, [0, 0], "sign", pieces) == expected


def test_exponents_have_the_bits_of_the_largest_integer():
    codecs = ["sign", "int2", "int4", "int8", "int16"]
    assert [reference.chunk_exponent(1.0, codec) for codec in codecs] == [1, 3, 4, 8, 16]


def test_int8_has_seven_more_bits_of_exponent():
    # E = 7, v = 100 * 2^15 and -50 * 2^15; 100 / 16 = 6.25 and 50 / 16 = 3.125: shift 19, exponent 7 - 22 + 19.
    sent = [[SentChunk({0: 100, 1: -50, 2: 0}, 1.0 - 2**-8)]]
    assert reference.chunk_exponent(1.0 - 2**-8, "int8") == 7
    assert reference.aggregate(sent, [0], "int8", ONE_CHUNK) == [ChunkUpdate({0: 6, 1: -3}, 4, 4)]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ChunkUpdate({0: 1, 1: -6}, -1, 4)),  # 2/3 and -3
        ({"average": "sites"}, ChunkUpdate({0: 3, 1: -4}, -2, 4)),  # 2/3 and -1
        ({"average": "median"}, ChunkUpdate({0: 2, 1: -6}, -1, 4)),  # 1 and -3
        ({"average": "tokens", "tokens": [2, 1, 1]}, ChunkUpdate({0: 2, 1: -4}, -1, 4)),  # 3/4 and -9/4
        ({"average": "tokens", "tokens": [0, 0, 0]}, None),
        ({"largest": 1}, ChunkUpdate({1: -6}, -1, 4)),
    ],
)
def test_averages(settings, expected):
    # index 0 is sent as 1, 3 and -2; index 1 as -3 by one site
    contributions = [[SentChunk({0: 1}, 1.0)], [SentChunk({0: 1, 1: -1}, 3.0)], [SentChunk({0: -1}, 2.0)]]
    assert reference.aggregate(contributions, [0, 0, 0], "sign", ONE_CHUNK, **settings) == [expected]


def test_median_of_two_is_their_mean_and_the_first_of_equals_is_kept():
    contributions = [[SentChunk({4: 1, 9: 1}, 1.0)], [SentChunk({4: 1, 9: 1}, 3.0)]]
    median = reference.aggregate(contributions, [0, 0], "sign", ONE_CHUNK, average="median", largest=1)
    assert median == [ChunkUpdate({4: 4}, -1, 4)]


@pytest.mark.parametrize(
    ("means", "expected"),
    [
        ({0: 7, 1: -7}, ChunkUpdate({0: 7, 1: -7}, 0, 4)),
        ({0: 12, 1: 5, 2: 3, 3: -1}, ChunkUpdate({0: 6, 1: 2, 2: 2}, 1, 4)),  # 2.5 and 1.5 become 2, 0.5 nothing
        ({0: 15, 1: 1}, ChunkUpdate({0: 4}, 2, 4)),  # 7.5 would become 8
    ],
)
def test_output_takes_the_least_shift_that_fits(means, expected):
    assert reference.quantise(means, 0) == expected


@pytest.mark.parametrize(("count", "bits", "largest"), [(148, 4, 7), (149, 6, 31), (512, 6, 31), (513, 8, 127)])
def test_bits_follow_the_number_of_non_zeros(count, bits, largest):
    update = reference.quantise(dict.fromkeys(range(count), 127 * 2**10), 0)
    assert update.bits == bits
    assert largest / 2 < update.values[0] <= largest


@pytest.mark.parametrize(
    ("norms", "expected"),
    [([5.0], [0]), ([1.0, 2.0], [0, 0]), ([1.0, 5.0], [0, 2]), ([1.0, 2.0, 5.0], [0, 0, 1]), ([0.0, 9.0], [0, 0])],
)
def test_outliers_are_halved_to_twice_the_lower_median(norms, expected):
    contributions = [[None, SentChunk({7: -1}, norm)] for norm in norms]
    assert reference.outlier_halvings(contributions) == expected


# --- decode and apply -------------------------------------------------------------------------------------------------


def test_decode_of_single_coefficients():
    assert reference.decode_signs({0: 3}, 2, 2).tolist() == [[1, 1], [1, 1]]
    assert reference.decode_signs({3: -1}, 2, 2).tolist() == [[-1, 1], [1, -1]]
    assert reference.decode_signs({1: 1}, 1, 3).tolist() == [[1, 0, -1]]
    assert reference.decode_signs({}, 2, 2).tolist() == [[0, 0], [0, 0]]


def test_dense_chunks_are_not_transformed():
    def signs(tensor_shape):
        (piece,) = reference.chunks([("x", tensor_shape)], 64)
        return reference.chunk_signs({1: 3, 2: -9}, piece)

    assert signs((2, 2)).tolist() == [[0, 1], [-1, 0]]
    assert np.count_nonzero(signs((8, 8))) == 2
    assert signs((5, 13)).tolist() == reference.decode_signs({1: 3, 2: -9}, 5, 13).tolist()
    assert np.count_nonzero(signs((5, 13))) > 2


@settings(max_examples=25)
@given(st.integers(1, 64), st.integers(1, 64), st.data())
def test_decode_agrees_with_the_float_inverse_where_that_is_clear(rows, cols, data):
    values = data.draw(st.dictionaries(st.integers(0, rows * cols - 1), st.integers(-7, 7), max_size=32))
    coefficients = np.zeros(rows * cols)
    coefficients[list(values)] = list(values.values())
    inverse = reference.dct(rows).T @ coefficients.reshape(rows, cols) @ reference.dct(cols)
    error_of_two_roundings = sum(map(abs, values.values())) * 0.03 * np.abs(reference.dct(rows)).max()
    clear = np.abs(inverse) > error_of_two_roundings * np.abs(reference.dct(cols)).max()
    assert (np.sign(inverse)[clear] == reference.decode_signs(values, rows, cols)[clear]).all()


def test_apply_rounds_twice_and_leaves_the_absent_alone():
    parameters = {"a": np.array([0.1, -0.0, 3.0], np.float32), "b": np.array([1.0], np.float32)}
    update = [ChunkUpdate({0: 5, 2: -1}, 0, 4), None]  # dense: not transformed
    after = reference.apply(parameters, update, 16, lr=[0.001, 1.0], decay=[0.999, 0.5])
    lr, decay = np.float32(0.001), np.float32(0.999)
    assert after["a"][0] == np.float32(np.float32(0.1) * decay) - lr
    assert after["a"][1] == 0
    assert np.signbit(after["a"][1])
    assert after["a"][2] == np.float32(np.float32(3) * decay) + lr
    assert after["b"].tolist() == [1.0]
    assert parameters["b"].tolist() == [1.0]


def test_bases_by_hand():
    assert reference.integer_basis(4, "hadamard").tolist() == [
        [1, 1, 1, 1],
        [1, -1, 1, -1],
        [1, 1, -1, -1],
        [1, -1, -1, 1],
    ]
    assert reference.integer_basis(3, "hadamard").tolist() == np.eye(3).tolist()
    assert reference.integer_basis(4, "identity").tolist() == np.eye(4).tolist()
    for length in (4, 8, 3):
        base = reference.integer_basis(length, "hadamard" if length != 3 else "dct")
        fresh = reference.integer_basis(length, "random", 7)
        columns = sorted(np.abs(column).tolist() for column in fresh.T)
        assert columns == sorted(np.abs(column).tolist() for column in base.T)
        assert (np.rint(fresh @ fresh.T) == np.rint(base @ base.T)).all()
    assert reference.integer_basis(8, "random", 7).tolist() != reference.integer_basis(8, "random", 8).tolist()
    scale = reference.basis_scale(16, "dct")
    assert np.abs(reference.integer_basis(16) / scale - reference.dct(16)).max() < 0.51 / scale
    assert [reference.basis_scale(length, "hadamard") for length in (16, 3)] == [4, 1]


def test_base_updates_by_hand():
    parameters = {"a": np.array([1.0, 1.0, 1.0], np.float32)}
    update = [ChunkUpdate({0: 3, 2: -1}, -1, 4)]  # dense: u = 1.5, 0, -0.5

    def after(base_update, adam=None):
        moved = reference.apply(
            parameters, update, 16, lr=[0.25], decay=[1.0], base_update=base_update, beta2=0.75, adam=adam
        )
        return moved["a"]

    assert after("signum").tolist() == [0.75, 1.0, 1.25]
    assert after("sgd").tolist() == [0.625, 1.0, 1.125]
    adam = {}
    np.testing.assert_allclose(after("adam", adam), [0.75, 1.0, 1.25], rtol=1e-6)  # v / c is u^2 at first
    assert adam["a"].second_moment.tolist() == [0.5625, 0, 0.0625]
    assert adam["a"].unseen == 0.75
    after("adam", adam)
    assert adam["a"].second_moment.tolist() == [0.75 * 0.5625 + 0.5625, 0, 0.75 * 0.0625 + 0.0625]
    assert adam["a"].unseen == 0.5625


# --- outer step -------------------------------------------------------------------------------------------------------


def test_outer_step_by_hand():
    anchor, buffer = np.array([1.0], np.float32), np.array([0.0], np.float32)
    copies = [np.array([value], np.float32) for value in (0.0, 3.0)]  # mean 2, pseudo-gradient -1
    assert reference.outer_step(anchor, buffer, copies, [1, 2], lr=0.5, momentum=0.5) == (1.75, -1.0)
    assert reference.outer_step(anchor, buffer + 4, copies, [1, 2], lr=0.5, momentum=0.5) == (1.25, 1.0)


def test_outer_step_without_momentum_is_the_mean_bit_for_bit():
    anchor = np.array([1e8, 0.3], np.float32)
    copy = np.array([1e-8, 0.1], np.float32)
    after, _ = reference.outer_step(anchor, np.zeros(2, np.float32), [copy, copy], [3, 5], lr=1, momentum=0)
    assert after.tobytes() == copy.tobytes()


# --- digests and replay -----------------------------------------------------------------------------------------------


def test_digests_are_of_the_documented_bytes():
    assert reference.entry_hash({"b": [2.5], "a": "é"}) == hashlib.sha256(rb'{"a":"\u00e9","b":[2.5]}').hexdigest()
    arrays = packed({"b": [3], "a": [1, 2]})
    expected = b"a\0" + bytes([2, 0, 0, 0, 0, 0, 0, 0, 1, 2]) + b"b\0" + bytes([1, 0, 0, 0, 0, 0, 0, 0, 3])
    assert reference.digest_arrays(arrays) == hashlib.sha256(expected).hexdigest()
    one = np.array([1.0], np.float32)
    assert reference.parameters_digest([one, one]) == hashlib.sha256(b"\0\0\x80\x3f" * 2).hexdigest()


START = {"weight": np.full((9, 8), 2.0, np.float32), "bias": np.zeros(3, np.float32)}
ANCHOR_BLOB = np.arange(3, dtype="<f4").tobytes()


def example_log():
    """Start, a step, an empty step, an anchor of the bias."""
    arrays = update_arrays()
    bodies = [
        {"kind": "start", "parameters": reference.parameters_digest([START["bias"], START["weight"]])},
        {"kind": "step", "parts": [reference.digest_arrays(arrays)], "lr": [0.5, 0.25], "decay": [1.0, 0.5]},
        {"kind": "step", "parts": [], "lr": [0.5, 0.25], "decay": [1.0, 0.5]},
        {
            "kind": "anchor",
            "fragment": 0,
            "digest": hashlib.sha256(ANCHOR_BLOB).hexdigest(),
            "step": 2,
            "taken_after": 2,
        },
    ]
    headers = []
    for seq, body in enumerate(bodies):
        previous = reference.entry_hash(headers[-1]) if headers else "0" * 64
        headers.append(body | {"seq": seq, "step": seq, "previous": previous})
    return list(zip(headers, [None, arrays, None, None], strict=True))


def replay(log):
    blobs = {hashlib.sha256(ANCHOR_BLOB).hexdigest(): ANCHOR_BLOB}
    return reference.replay(log, START, blobs.__getitem__, chunk=16, fragments=[(0, 1), (1, 2)], groups=[0, 1])


def test_replay_of_a_whole_log():
    signs = reference.decode_signs(UPDATE[1].values, 9, 8)
    after = replay(example_log())
    assert after["weight"].tolist() == (1.0 - 0.25 * signs).tolist()
    assert after["bias"].tolist() == [0.0, 1.0, 2.0]
    assert replay(example_log()[:3])["bias"].tolist() == [0.5, 0.0, -0.5]  # of -1, 0, 6
    assert START["bias"].tolist() == [0.0, 0.0, 0.0]


def test_replay_refuses_a_broken_chain_and_other_bytes():
    log = example_log()
    with pytest.raises(AssertionError, match="entry 2 says seq 3"):
        replay(log[:2] + log[3:])
    log[1][0]["lr"][0] = 0.75
    with pytest.raises(AssertionError, match="entry 2 does not follow"):
        replay(log)
    log = example_log()
    log[1][1]["9x8.values4"][0] = 0x79
    with pytest.raises(AssertionError, match="not the arrays"):
        replay(log)
