"""Every bit that the packages fix, against the slow and obvious reference, on layouts of odd shapes."""

import hashlib
import json
import math
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from algorithms.aggregate import aggregate, norm, outlier_halvings
from algorithms.apply import apply_update
from algorithms.base_updates import BASE_UPDATES
from algorithms.codec import (
    digest_arrays,
    pack_contribution,
    pack_update,
    parameters_digest,
    unpack_contribution,
    unpack_update,
)
from algorithms.layout import CHUNKS, ParameterLayout, TensorSpec, canonical_name, kept
from algorithms.momentum import Ownership, encode
from algorithms.outer import OuterOptimizer, nesterov, outer_update, weighted_mean
from algorithms.settings import Average
from algorithms.transforms import TRANSFORMS, Transform
from algorithms.updates import CODEC_LIMITS, AggregateUpdate, Codec, Coefficients, Indices, SparseUpdate
from algorithms.values import MAX_SCALE
from tests import reference
from tests.reference import ChunkUpdate, SentChunk

# the autouse fixture that sets the number of threads does so once for all examples, which is what is wanted
thorough = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])

NAMES = ["module.b.weight", "_orig_mod.a.module.c", "a.d", "Z", "b.10", "b.9", "b_", "b.module", "é"]
SIZES = [1, 2, 3, 7, 8, 9, 31, 33, 64, 65, 70, 127, 131]
CODECS = get_args(Codec)
LARGEST = 5000
MAX_SCALE_BITS = 0x6F80
"""bfloat16 of 2^96."""


# --- what is drawn ----------------------------------------------------------------------------------------------------


@st.composite
def shapes(draw: Any) -> tuple[int, ...]:
    size = st.sampled_from(SIZES)
    shape = draw(
        st.one_of(
            st.just(()),
            st.just((0, 5)),
            st.tuples(st.integers(1, 300)),
            st.tuples(st.sampled_from([64 * 65 + 1, 4096, 64 * 64 + 63])),
            st.tuples(size, size),
            st.tuples(st.integers(1, 40), st.integers(1, 8), st.integers(1, 4), st.integers(1, 4)),
            st.tuples(st.integers(1, 3), size, size),
            st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(2, 40), st.integers(17, 40)),
        )
    )
    return shape if math.prod(shape) <= LARGEST else (math.prod(shape) % LARGEST,)


@st.composite
def layouts(draw: Any) -> ParameterLayout:
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True))
    tensors = [TensorSpec(name, draw(shapes()), draw(st.integers(0, 1))) for name in names]
    return ParameterLayout(tensors, draw(st.sampled_from(CHUNKS)))


@dataclass(frozen=True)
class Round:
    layout: ParameterLayout
    k: int
    codec: Any
    contributions: list[SparseUpdate]

    def __repr__(self) -> str:
        tensors = [(tensor.name, tensor.shape) for tensor in self.layout.tensors]
        return f"Round({tensors}, s={self.layout.chunk}, k={self.k}, {self.codec}, {len(self.contributions)} sites)"


def scale_bits(rng: np.random.Generator, kind: str, count: int) -> np.ndarray:
    """bfloat16 scales by their bits; about every fifth is zero."""
    low, high = {
        "usual": (0x3A00, 0x3F80),
        "alike": (0x3F80, 0x3F80),
        "faint": (0x3300, 0x3700),
        "subnormal": (1, 0x7F),
        "huge": (MAX_SCALE_BITS - 0x80, MAX_SCALE_BITS),
        "any": (0, MAX_SCALE_BITS),
    }[kind]
    bits = rng.integers(low, high, count, endpoint=True, dtype=np.uint16)
    return np.where(rng.random(count) < 0.2, np.uint16(0), bits)


def as_scales(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def random_values(codec: Codec, size: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    if codec in ("sign", "int2"):
        return rng.choice(np.arange(-CODEC_LIMITS[codec], CODEC_LIMITS[codec] + 1, 2, dtype=np.int8), size)
    limit = CODEC_LIMITS[codec]
    values = rng.integers(-limit, limit, size, endpoint=True) // rng.choice([1, 1, limit // 3, 2 * limit])
    return values.astype(np.int16 if codec == "int16" else np.int8)


def random_contribution(
    layout: ParameterLayout, k: int, codec: Any, kind: str, absent: frozenset[int], rng: np.random.Generator
) -> SparseUpdate:
    """Of random places, half of them from the lower eighth of the chunk, so that sites meet."""
    parts = {}
    for shape in layout.shapes:
        elements = shape[0] * shape[1]
        numbers = layout.select(shape, absent)
        if not numbers.size:
            continue
        size = (numbers.size, kept(k, elements, layout.chunk))
        keys = rng.random((numbers.size, elements))
        keys[:, : elements // 8] /= 4
        indices = np.sort(np.argsort(keys, axis=1)[:, : size[1]], axis=1)
        values = random_values(codec, size, rng)
        scales = as_scales(scale_bits(rng, kind, numbers.size))
        parts[shape] = Coefficients(numbers, indices.astype(np.uint16), values, scales)
    return SparseUpdate(parts, absent, codec)


def changed(update: SparseUpdate, *, sign: int = 1, scale: float = 1.0) -> SparseUpdate:
    parts = {
        shape: replace(part, values=part.values * part.values.dtype.type(sign), scales=part.scales * np.float32(scale))
        for shape, part in update.shapes.items()
    }
    return replace(update, shapes=parts)


@st.composite
def rounds(draw: Any, max_sites: int = 5, mixed: bool = False) -> Round:
    """With `mixed` every site has a codec of its own."""
    layout = draw(layouts())
    k = draw(st.sampled_from([1, 2, 8, 32, 300, layout.chunk**2 // 2, layout.chunk**2]))
    codec = draw(st.sampled_from(CODECS))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    contributions: list[SparseUpdate] = []
    for _ in range(draw(st.integers(1, max_sites))):
        like = draw(st.sampled_from(["new", "new", "new", "opposite", "equal", "larger"])) if contributions else "new"
        if like == "new":
            kind = draw(st.sampled_from(["usual", "usual", "alike", "faint", "subnormal", "huge", "any"]))
            absent = draw(st.frozensets(st.integers(0, len(layout.tensors) - 1)))
            own_codec = draw(st.sampled_from(sorted(CODEC_LIMITS))) if mixed else codec
            contributions.append(random_contribution(layout, k, own_codec, kind, absent, rng))
        elif like == "opposite":
            contributions.append(changed(contributions[0], sign=-1))
        elif like == "equal":
            contributions.append(contributions[0])
        else:
            most = max((part.scales.max() for part in contributions[0].shapes.values()), default=np.float32(1))
            factor = 8.0 if most * 8.0 <= MAX_SCALE else 0.125
            contributions.append(changed(contributions[0], scale=factor))
    return Round(layout, k, codec, contributions)


# --- our records as the reference's -----------------------------------------------------------------------------------


def tensors_of(layout: ParameterLayout) -> reference.Tensors:
    return [(tensor.name, tensor.shape) for tensor in layout.tensors]


def pieces_of(layout: ParameterLayout) -> list[reference.Chunk]:
    return reference.chunks(tensors_of(layout), layout.chunk)


def sent_chunks(update: SparseUpdate, layout: ParameterLayout) -> list[SentChunk | None]:
    sent: list[SentChunk | None] = [None] * layout.chunk_count
    for part in update.shapes.values():
        rows = zip(part.chunks, part.indices, part.values, part.scales, strict=True)
        for chunk, indices, values, scale in rows:
            pairs = zip(indices.tolist(), values.tolist(), strict=True)
            sent[chunk] = SentChunk(dict(pairs), float(scale))
    return sent


def chunk_updates(update: AggregateUpdate, layout: ParameterLayout) -> list[ChunkUpdate | None]:
    chunks: list[ChunkUpdate | None] = [None] * layout.chunk_count
    for part in update.shapes.values():
        ends = np.cumsum(part.counts)
        for row, chunk in enumerate(part.chunks):
            mine = slice(ends[row] - part.counts[row], ends[row])
            pairs = zip(part.indices[mine].tolist(), part.values[mine].tolist(), strict=True)
            values = {index: value for index, value in pairs if value}
            chunks[chunk] = ChunkUpdate(values, int(part.exponents[row]), int(part.bits[row]))
    return chunks


def assert_same(one: Any, other: Any) -> None:
    """Equal records of arrays, shape by shape."""
    assert one.absent == other.absent
    assert one.shapes.keys() == other.shapes.keys()
    for shape, part in one.shapes.items():
        for name, array in vars(part).items():
            np.testing.assert_array_equal(array, vars(other.shapes[shape])[name], err_msg=f"{shape} {name}")


# --- layout -----------------------------------------------------------------------------------------------------------


@thorough
@given(layouts())
def test_chunks_have_the_same_numbers_places_and_shapes(layout: ParameterLayout) -> None:
    pieces = pieces_of(layout)
    assert layout.chunk_count == len(pieces)
    for block in layout.blocks:
        counts, sizes = block.size[:3], block.size[3:]
        for chunk, place in zip(block.chunks, np.ndindex(*counts), strict=True):
            first = block.offset + sum(np.multiply(place, block.strides[:3]))
            rows, cols = np.ogrid[: sizes[0], : sizes[1]]
            piece = pieces[chunk]
            assert piece.tensor == block.tensor
            np.testing.assert_array_equal(first + rows * block.strides[3] + cols * block.strides[4], piece.positions)


@given(st.lists(st.sampled_from(["module", "_orig_mod", "a", "b", "module_"]), min_size=1, max_size=5))
def test_canonical_names(parts: list[str]) -> None:
    name = ".".join(parts)
    assert canonical_name(name) == reference.canonical_name(name)


@thorough
@given(layouts(), st.randoms())
def test_layout_digest_is_of_the_documented_text_in_whatever_order_tensors_come(
    layout: ParameterLayout, random: Any
) -> None:
    tensors = list(layout.tensors)
    random.shuffle(tensors)
    assert [tensor.name for tensor in layout.tensors] == reference.layout_order([tensor.name for tensor in tensors])
    wrapped = [replace(tensor, name=f"module.{tensor.name}") for tensor in tensors]
    transformed = [piece for piece in pieces_of(layout) if not reference.is_dense(piece)]
    lengths = sorted({length for piece in transformed for length in (piece.rows, piece.cols)})
    bases = b"".join(reference.integer_basis(length).astype(np.int8).tobytes() for length in lengths)
    identity = {
        "version": 2,
        "chunk": layout.chunk,
        "transform": "dct",
        "basis": hashlib.sha256(bases).hexdigest(),
        "groups": ["decay", "no_decay"],
        "tensors": [[tensor.name, list(tensor.shape), tensor.group] for tensor in layout.tensors],
    }
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    assert ParameterLayout(wrapped, layout.chunk).digest == layout.digest == hashlib.sha256(text.encode()).hexdigest()


# --- wire format ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("loops")
@thorough
@given(rounds(max_sites=1), st.sampled_from(get_args(Indices)))
def test_contributions_read_as_they_were_packed(round_: Round, form: Any) -> None:
    layout, codec, k, (update,) = round_.layout, round_.codec, round_.k, round_.contributions
    arrays = pack_contribution(update, layout, codec, form)
    absent = [layout.tensors[index].name for index in update.absent]
    read = reference.unpack_contribution(arrays, tensors_of(layout), layout.chunk, codec, k, absent, form)
    assert read == sent_chunks(update, layout)
    assert_same(unpack_contribution(arrays, layout, codec=codec, k=k, absent=absent, indices=form), update)
    assert digest_arrays(arrays) == reference.digest_arrays(arrays)


# --- aggregate --------------------------------------------------------------------------------------------------------


def one_chunk(codec: Any, *contributions: tuple[list[int], float], k: int = 4096) -> Round:
    """Sites that each send the same places of one chunk of 70 elements."""
    layout = ParameterLayout([TensorSpec("x", (10, 7), 0)])
    parts = [
        SparseUpdate(
            {
                (10, 7): Coefficients(
                    np.array([0]),
                    np.arange(len(values), dtype=np.uint16)[None],
                    np.array([values], np.int16 if codec == "int16" else np.int8),
                    np.array([scale], np.float32),
                )
            },
            frozenset(),
            codec,
        )
        for values, scale in contributions
    ]
    return Round(layout, k, codec, parts)


@dataclass(frozen=True)
class Rule:
    """How a round is aggregated: arguments of `aggregate` and of the reference alike."""

    average: Average = "contributors"
    tokens: tuple[int, ...] | None = None
    largest: int | None = None


@st.composite
def rules(draw: Any, sites: int) -> Rule:
    average = draw(st.sampled_from(get_args(Average)))
    tokens = st.lists(st.sampled_from([0, 1, 2, 3, 1000, 2**40 + 1]), min_size=sites, max_size=sites)
    largest = draw(st.none() | st.sampled_from([1, 2, 5, 60, 148, 149, 600]))
    return Rule(average, tuple(draw(tokens)) if average == "tokens" else None, largest)


def expected_update(round_: Round, halvings: list[int], rule: Rule) -> list[ChunkUpdate | None]:
    sent = [sent_chunks(update, round_.layout) for update in round_.contributions]
    codecs: list[str] = [update.codec for update in round_.contributions]
    return reference.aggregate(sent, halvings, codecs, pieces_of(round_.layout), **vars(rule))


@pytest.mark.usefixtures("loops")
@thorough
@example(one_chunk("int16", ([32767] * 70, 2.0**96)))  # the largest value that can be sent
@example(one_chunk("int8", ([127] * 70, 2.0**96)))
@example(one_chunk("sign", ([1] * 70, 2.0**-133)))  # and the smallest
@example(one_chunk("int8", ([127] * 70, 2.0**96), ([-1] * 70, 2.0**-133)))
@given(rounds())
def test_a_round_is_the_same_value_by_value(round_: Round) -> None:
    layout, contributions = round_.layout, round_.contributions
    halvings = outlier_halvings([norm(update) for update in contributions])
    assert halvings == reference.outlier_halvings([sent_chunks(update, layout) for update in contributions])
    update = aggregate(contributions, layout, halvings)
    expected = expected_update(round_, halvings, Rule())
    assert chunk_updates(update, layout) == expected
    arrays = pack_update(update, layout)
    assert reference.unpack_update(arrays, tensors_of(layout), layout.chunk) == expected
    assert_same(unpack_update(arrays, layout), update)
    assert digest_arrays(arrays) == reference.digest_arrays(arrays)


@pytest.mark.usefixtures("loops")
@thorough
@given(rounds(mixed=True), st.data())
def test_every_average_is_the_same_value_by_value(round_: Round, data: Any) -> None:
    layout, contributions = round_.layout, round_.contributions
    rule = data.draw(rules(len(contributions)))
    count = st.lists(st.sampled_from([0, 0, 1, 7, 300]), min_size=len(contributions), max_size=len(contributions))
    halvings = data.draw(count)
    update = aggregate(contributions, layout, halvings, **vars(rule))
    assert chunk_updates(update, layout) == expected_update(round_, halvings, rule)
    assert_same(unpack_update(pack_update(update, layout), layout), update)


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("average", get_args(Average))
@pytest.mark.parametrize(("sites", "k"), [(16, 40), (64, 8)])
def test_many_sites(sites: int, k: int, average: Average) -> None:
    rng = np.random.default_rng(sites)
    layout = ParameterLayout([TensorSpec("x", (40, 40), 0), TensorSpec("y", (30,), 0)], 64)
    codecs = [*sorted(CODEC_LIMITS)] * sites
    contributions = [random_contribution(layout, k, codecs[i], "usual", frozenset(), rng) for i in range(sites)]
    rule = Rule(average, tuple(range(1, sites + 1)) if average == "tokens" else None)
    update = aggregate(contributions, layout, [0] * sites, **vars(rule))
    assert chunk_updates(update, layout) == expected_update(Round(layout, k, "mixed", contributions), [0] * sites, rule)


# --- apply ------------------------------------------------------------------------------------------------------------

ODD_FLOATS = np.array([-0.0, 0.0, 1e-45, -1e-40, 3.4e38, -1.0, 0.1, 1 + 2**-23], np.float32)


def random_parameters(layout: ParameterLayout, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """A quarter of the elements are zeros of both signs, subnormal, or huge."""
    parameters = {}
    for tensor in layout.tensors:
        values = rng.standard_normal(tensor.elements).astype(np.float32)
        odd = rng.random(values.size) < 0.25
        values[odd] = rng.choice(ODD_FLOATS, np.count_nonzero(odd))
        parameters[tensor.name] = values.reshape(tensor.shape)
    return parameters


def float32(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, width=32)


@thorough
@given(
    rounds(max_sites=3),
    st.sampled_from(TRANSFORMS),
    st.sampled_from([name for name, base_update in BASE_UPDATES.items() if base_update.exact]),
    st.booleans(),
    st.data(),
)
def test_apply_gives_the_same_bits(
    round_: Round, transform: Transform, base_update: Any, exact: bool, data: Any
) -> None:
    layout = ParameterLayout(round_.layout.tensors, round_.layout.chunk, transform=transform)
    rates = [data.draw(float32(0, 2)), data.draw(float32(0, 2**-10))]
    decays = [data.draw(float32(0.5, 1)), 1.0]
    beta2 = data.draw(st.one_of(st.just(0.99), st.floats(0, 1 - 2**-20)))
    expected = random_parameters(layout, np.random.default_rng(round_.k))
    groups = [tensor.group for tensor in layout.tensors]
    flat = {
        index: torch.from_numpy(expected[tensor.name].copy().ravel()) for index, tensor in enumerate(layout.tensors)
    }
    state: dict[int, dict[str, torch.Tensor]] = {index: {} for index in flat}
    adam: dict[str, reference.Adam] = {}
    for step in range(1 + len(round_.contributions)):  # of all sites, then of each alone
        contributions = round_.contributions[step - 1 : step] or round_.contributions
        update = aggregate(contributions, layout, [0] * len(contributions))
        before = {index: tensor.numpy().tobytes() for index, tensor in flat.items()}
        expected = reference.apply(
            expected,
            chunk_updates(update, layout),
            layout.chunk,
            [rates[group] for group in groups],
            [decays[group] for group in groups],
            transform=transform,
            step=step,
            base_update=base_update,
            beta2=beta2,
            adam=adam,
        )
        apply_update(
            update,
            layout,
            flat,
            rates,
            decays,
            lambda _: exact,
            base_update=base_update,
            beta2=beta2,
            state=state,
            step=step,
        )
        for index, tensor in enumerate(layout.tensors):
            after = flat[index].numpy().tobytes()
            assert after == expected[tensor.name].tobytes(), tensor
            assert index not in update.absent or after == before[index]
    if base_update == "adam":
        for index, tensor in enumerate(layout.tensors):
            assert bool(state[index]) == (tensor.name in adam)
            if tensor.name in adam:
                assert state[index]["second_moment"].numpy().tobytes() == adam[tensor.name].second_moment.tobytes()
                assert state[index]["unseen"].item() == adam[tensor.name].unseen
    arrays = [flat[index].numpy() for index in range(len(flat))]
    assert parameters_digest(arrays) == reference.parameters_digest([expected[name] for name, _ in tensors_of(layout)])


# --- encode -----------------------------------------------------------------------------------------------------------


@thorough
@given(layouts(), st.sampled_from([1, 32, 1024]), st.sampled_from(CODECS), st.integers(0, 1000))
def test_encode_sends_the_largest_coefficients(layout: ParameterLayout, k: int, codec: Any, seed: int) -> None:
    """Encoding need not be bit-equal anywhere (B10): close to the reference's transform, and from it the largest."""
    rng = np.random.default_rng(seed)
    gradients = [rng.standard_normal(tensor.shape).astype(np.float32) for tensor in layout.tensors]
    ownership = Ownership(layout, range(layout.chunk_count))
    momentum = {index: torch.zeros(tensor.elements) for index, tensor in enumerate(layout.tensors)}
    tensors = {index: torch.from_numpy(gradient) for index, gradient in enumerate(gradients)}
    sent = sent_chunks(encode(ownership, momentum, tensors, beta=0.0, k=k, codec=codec), layout)
    for piece, chunk in zip(pieces_of(layout), sent, strict=True):
        gradient = gradients[piece.tensor]
        if reference.is_dense(piece):
            coefficients = gradient.reshape(-1)[piece.positions].ravel()
        else:
            coefficients = reference.forward(gradient, piece.positions).ravel()
        count = reference.kept_per_chunk(piece, k, layout.chunk) if not reference.is_dense(piece) else piece.elements
        assert chunk is not None
        assert len(chunk.values) == count
        magnitudes = np.abs(coefficients)
        picked = magnitudes[list(chunk.values)]
        np.testing.assert_allclose(np.sort(picked), np.sort(magnitudes)[-count:], atol=1e-5)
        values = np.array(list(chunk.values.values())) * chunk.scale
        if codec != "sign":
            error = 1.001 if codec == "int2" else 0.501
            np.testing.assert_allclose(values, coefficients[list(chunk.values)], atol=error * chunk.scale + 1e-5)
        else:
            np.testing.assert_allclose(chunk.scale, picked.mean(), rtol=2**-8 + 1e-5)
            clear = picked > 1e-5
            np.testing.assert_array_equal(np.sign(values)[clear], np.sign(coefficients[list(chunk.values)])[clear])


# --- outer step -------------------------------------------------------------------------------------------------------


@given(
    st.integers(1, 5),
    st.integers(0, 2**32),
    st.one_of(st.just((1.0, 0.0)), st.tuples(st.floats(0, 3), st.floats(0, 0.99))),
    st.lists(st.integers(0, 2**62), min_size=5, max_size=5),
    st.sampled_from(get_args(OuterOptimizer)),
)
def test_outer_step_gives_the_same_bits(
    copies: int, seed: int, outer: tuple[float, float], weights: list[int], optimizer: OuterOptimizer
) -> None:
    rng = np.random.default_rng(seed)
    magnitudes = np.float32(10.0) ** rng.integers(-20, 20, 300).astype(np.float32)
    draws = [(rng.standard_normal(300) * magnitudes).astype(np.float32) for _ in range(copies + 2)]
    weights = [max(weights[0], 1), *weights[1:copies]]
    anchor, buffer, *values = draws
    new = outer_update(optimizer, anchor, buffer, weighted_mean(values, weights), *outer)
    expected = reference.outer_step(anchor, buffer, values, weights, *outer, optimizer)
    assert [array.tobytes() for array in new] == [array.tobytes() for array in expected]


def test_outer_step_of_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("algorithms.outer.BLOCK", 7)
    rng = np.random.default_rng(0)
    anchor, buffer, *copies = rng.standard_normal((5, 100)).astype(np.float32)
    new = nesterov(anchor, buffer, weighted_mean(copies, [1, 0, 5]), 0.7, 0.5)
    expected = reference.outer_step(anchor, buffer, copies, [1, 0, 5], 0.7, 0.5)
    assert [array.tobytes() for array in new] == [array.tobytes() for array in expected]
