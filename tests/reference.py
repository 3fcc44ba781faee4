"""The slow and obvious truth that tests compare with: the bits of docs/decisions/, once more.

It shares no code with the packages and must not learn from them: one chunk at a time, Python integers, fractions.
Every function takes `tensors`, a list of (name, shape) in layout order (`layout_order`).
"""

import functools
import hashlib
import json
import math
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import NamedTuple

import numpy as np

Tensors = list[tuple[str, tuple[int, ...]]]
Arrays = dict[str, np.ndarray]

# --- layout -----------------------------------------------------------------------------------------------------------


class Chunk(NamedTuple):
    """One piece of a tensor: `positions[r, c]` is the place of its element (r, c) in the flat tensor."""

    tensor: int
    rows: int
    cols: int
    positions: np.ndarray

    @property
    def elements(self) -> int:
        return self.rows * self.cols

    @property
    def shape(self) -> str:
        return f"{self.rows}x{self.cols}"


def canonical_name(name: str) -> str:
    """Without the components `module.` and `_orig_mod.`; the last one has no dot after it, and stays."""
    *path, leaf = name.split(".")
    return ".".join([part for part in path if part not in ("module", "_orig_mod")] + [leaf])


def layout_order(names: list[str]) -> list[str]:
    return sorted(names, key=canonical_name)


def nearly_equal_pieces(size: int, largest: int) -> list[tuple[int, int]]:
    """Cut `size` into the fewest pieces of at most `largest`, larger ones first, as (begin, end)."""
    count = -(-size // largest)
    sizes = [size // count + (i < size % count) for i in range(count)]
    ends = [sum(sizes[: i + 1]) for i in range(count)]
    return [(end - length, end) for length, end in zip(sizes, ends, strict=True)]


def cut_matrix(positions: np.ndarray, chunk: int) -> Iterator[np.ndarray]:
    rows, cols = positions.shape
    for top, bottom in nearly_equal_pieces(rows, chunk):
        for left, right in nearly_equal_pieces(cols, chunk):
            yield positions[top:bottom, left:right]


def cut_vector(positions: np.ndarray, chunk: int) -> Iterator[np.ndarray]:
    width = min(64, chunk)
    full = len(positions) // width * width
    if full:
        yield from cut_matrix(positions[:full].reshape(-1, width), chunk)
    if full < len(positions):
        yield positions[full:].reshape(1, -1)


def cut_tensor(shape: tuple[int, ...], chunk: int) -> Iterator[np.ndarray]:
    positions = np.arange(math.prod(shape))
    if positions.size == 0:
        return
    if len(shape) > 2 and max(shape[2:]) > 16:  # a stack of matrices
        matrices = list(positions.reshape(-1, *shape[-2:]))
    else:
        rows = shape[0] if len(shape) > 1 else 1
        matrices = [positions.reshape(rows, -1)]
    for matrix in matrices:
        yield from cut_vector(matrix.reshape(-1), chunk) if 1 in matrix.shape else cut_matrix(matrix, chunk)


def chunks(tensors: Tensors, chunk: int) -> list[Chunk]:
    return [
        Chunk(number, *positions.shape, positions)
        for number, (_, shape) in enumerate(tensors)
        for positions in cut_tensor(shape, chunk)
    ]


# --- transform --------------------------------------------------------------------------------------------------------


@functools.cache
def dct(length: int) -> np.ndarray:
    """The orthonormal DCT-II: row k holds frequency k."""
    return np.array(
        [
            [
                math.sqrt((1 if k == 0 else 2) / length) * math.cos(math.pi * (2 * i + 1) * k / (2 * length))
                for i in range(length)
            ]
            for k in range(length)
        ]
    )


@functools.cache
def integer_basis(length: int, transform: str = "dct", step: int = 0) -> np.ndarray:
    """Row i holds frequency i; every entry is scale times the orthonormal one, rounded."""
    if transform == "random":
        return random_basis(length, step)
    if transform == "hadamard" and is_power_of_two(length):
        return np.array([[(-1) ** (i & j).bit_count() for j in range(length)] for i in range(length)])
    if transform == "dct":
        basis = dct(length)
        return np.rint(126 * basis / np.abs(basis).max()).astype(np.int64)
    return np.eye(length, dtype=np.int64)


def random_basis(length: int, step: int) -> np.ndarray:
    base = integer_basis(length, "hadamard" if is_power_of_two(length) else "dct")
    stream = hashlib.shake_256(f"isthmus random basis {length} {step}".encode()).digest(9 * length)
    words = [int.from_bytes(stream[8 * j : 8 * j + 8], "little") for j in range(length)]
    order = sorted(range(length), key=lambda j: words[j])
    signs = [-1 if byte % 2 else 1 for byte in stream[8 * length :]]
    return np.array([[sign * row[column] for sign, column in zip(signs, order, strict=True)] for row in base])


def is_power_of_two(number: int) -> bool:
    return number.bit_count() == 1


def basis_scale(length: int, transform: str) -> float:
    if transform == "dct" or (transform == "random" and not is_power_of_two(length)):
        return 126 / float(np.abs(dct(length)).max())
    return math.sqrt(length) if transform != "identity" and is_power_of_two(length) else 1.0


def forward(gradient: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The float64 coefficients of one chunk of a gradient."""
    block = gradient.reshape(-1)[positions].astype(np.float64)
    rows, cols = block.shape
    return dct(rows) @ block @ dct(cols).T


def orthonormal(transform: str, length: int, step: int = 0) -> np.ndarray:
    """The basis of one side, rows are frequencies; `random` permutes and signs the columns of another one."""
    power_of_two = length & (length - 1) == 0
    if transform == "dct":
        return dct(length)
    if transform == "hadamard" and power_of_two:
        signs = [[(-1) ** (row & column).bit_count() for column in range(length)] for row in range(length)]
        return np.array(signs) / math.sqrt(length)
    if transform in ("hadamard", "identity"):
        return np.eye(length)
    assert transform == "random"
    base = orthonormal("hadamard" if power_of_two else "dct", length)
    stream = hashlib.shake_256(f"isthmus random basis {length} {step}".encode()).digest(9 * length)
    words = [int.from_bytes(stream[8 * i : 8 * i + 8], "little") for i in range(length)]
    columns = sorted(range(length), key=lambda i: words[i])
    return np.stack([base[:, columns[j]] * (1 - 2 * (stream[8 * length + j] & 1)) for j in range(length)], axis=1)


def pick(
    momenta: dict[int, np.ndarray], tensors: Tensors, chunk: int, k: int, transform: str, step: int
) -> list[dict[int, float] | None]:
    """Per chunk the largest coefficients of a momentum in the parameter domain; None where a tensor has none."""
    picked: list[dict[int, float] | None] = []
    for piece in chunks(tensors, chunk):
        if piece.tensor not in momenta:
            picked.append(None)
            continue
        block = momenta[piece.tensor].reshape(-1)[piece.positions].astype(np.float64)
        count = piece.elements
        if not is_dense(piece):
            block = orthonormal(transform, piece.rows, step) @ block @ orthonormal(transform, piece.cols, step).T
            count = kept_per_chunk(piece, k, chunk)
        coefficients = block.ravel().tolist()
        by_magnitude = sorted(range(piece.elements), key=lambda index: -abs(coefficients[index]))
        picked.append({index: coefficients[index] for index in sorted(by_magnitude[:count])})
    return picked


# --- wire format ------------------------------------------------------------------------------------------------------


LARGEST = {"sign": 1, "int2": 3, "int4": 7, "int8": 127, "int16": 32767}
"""Largest magnitude of a sent integer."""


class SentChunk(NamedTuple):
    """One chunk of one site's contribution: integers by flat coefficient index, and the scale."""

    values: dict[int, int]
    scale: float


class ChunkUpdate(NamedTuple):
    """One chunk of an update: non-zero integers by flat coefficient index; value = integer * 2^exponent."""

    values: dict[int, int]
    exponent: int
    bits: int


class BitReader:
    """Reads little-endian bit fields from one packed array; at its end only zero padding may be left."""

    def __init__(self, array: np.ndarray | None) -> None:
        self.bits: list[int] = [] if array is None else np.unpackbits(array, bitorder="little").tolist()
        self.place = 0

    def unsigned(self, width: int) -> int:
        field = self.bits[self.place : self.place + width]
        assert len(field) == width, "array too short"
        self.place += width
        return sum(bit << i for i, bit in enumerate(field))

    def signed(self, width: int) -> int:
        value = self.unsigned(width)
        return value - (1 << width) if value >> (width - 1) else value

    def check_end(self) -> None:
        rest = self.bits[self.place :]
        assert len(rest) < 8, "array too long"
        assert not any(rest), "padding is not zero"


class Readers:
    """One `BitReader` per array name, made when first asked for; an array that is missing reads as empty."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays
        self.open: dict[str, BitReader] = {}

    def __getitem__(self, name: str) -> BitReader:
        if name not in self.open:
            self.open[name] = BitReader(self.arrays.get(name))
        return self.open[name]

    def check_end(self) -> None:
        unread = [name for name, array in self.arrays.items() if array.size and name not in self.open]
        assert not unread, f"arrays that no chunk asks for: {unread}"
        for reader in self.open.values():
            reader.check_end()


def is_dense(chunk: Chunk) -> bool:
    return chunk.elements <= 64


def index_width(chunk: Chunk) -> int:
    return (chunk.elements - 1).bit_length()


def kept_per_chunk(chunk: Chunk, k: int, side: int) -> int:
    return min(max(round(Fraction(k * chunk.elements, side * side)), 1), chunk.elements)


def read_indices(reader: BitReader, count: int, width: int) -> list[int]:
    indices = [reader.unsigned(width) for _ in range(count)]
    assert indices == sorted(set(indices)), "indices must ascend"
    return indices


def high_size(elements: int, count: int, low: int) -> int:
    """Bits of one chunk's record in `high` if `low` bits of each index are in `low`."""
    return count + math.ceil(Fraction(elements, 2**low)) - 1


def low_width(elements: int, counts: list[int]) -> int:
    """The number of low bits that makes the bits of all chunks fewest, the larger of two equals."""
    sizes = {low: sum(count * low + high_size(elements, count, low) for count in counts) for low in range(15)}
    return max(low for low, size in sizes.items() if size == min(sizes.values()))


def is_compact(piece: Chunk, counts: list[int]) -> bool:
    """Whether `low` and `high` of chunks with so many indices each take fewer bytes than `indices` would."""
    low = low_width(piece.elements, counts)
    bits = [sum(counts) * low, sum(high_size(piece.elements, count, low) for count in counts)]
    return sum(-(-size // 8) for size in bits) < -(-sum(counts) * index_width(piece) // 8)


def read_compact_indices(readers: "Readers", piece: Chunk, count: int, width: int) -> list[int]:
    """Elias-Fano: the i-th one of the record, at place p, says that the high bits of the i-th index are p - i."""
    low, high, elements = readers[f"{piece.shape}.low"], readers[f"{piece.shape}.high"], piece.elements
    record = [high.unsigned(1) for _ in range(high_size(elements, count, width))]
    ones = [place for place, bit in enumerate(record) if bit]
    assert len(ones) == count, "a record must have as many ones as the chunk has indices"
    indices = [((place - i) << width) + low.unsigned(width) for i, place in enumerate(ones)]
    assert indices == sorted(set(indices)), "indices must ascend"
    assert max(indices, default=0) < elements, "indices must be in the chunk"
    return indices


def unpack_contribution(
    arrays: Arrays, tensors: Tensors, chunk: int, codec: str, k: int, absent: list[str], form: str = "packed"
) -> list[SentChunk | None]:
    """Per chunk what the site sent; None where the tensor is absent. `form` is that of the indices."""
    readers = Readers(arrays)
    pieces = chunks(tensors, chunk)
    number = Counter(piece.shape for piece in pieces if tensors[piece.tensor][0] not in absent)
    sent: list[SentChunk | None] = []
    for piece in pieces:
        if tensors[piece.tensor][0] in absent:
            sent.append(None)
            continue
        count = kept_per_chunk(piece, k, chunk)
        if is_dense(piece):
            indices = list(range(piece.elements))
        elif form == "compact" and is_compact(piece, counts := [count] * number[piece.shape]):
            indices = read_compact_indices(readers, piece, count, low_width(piece.elements, counts))
        else:
            indices = read_indices(readers[f"{piece.shape}.indices"], count, index_width(piece))
        values = {index: read_value(readers[f"{piece.shape}.values"], codec) for index in indices}
        sent.append(SentChunk(values, bfloat16(readers[f"{piece.shape}.scales"].unsigned(16))))
    readers.check_end()
    return sent


def read_value(reader: BitReader, codec: str) -> int:
    if codec == "sign":
        return -1 if reader.unsigned(1) else 1
    if codec == "int2":
        return [-3, -1, 1, 3][reader.unsigned(2)]
    value = reader.signed({"int4": 4, "int8": 8, "int16": 16}[codec])
    assert abs(value) <= LARGEST[codec], "a value that the codec has not"
    return value


def bfloat16(bits: int) -> float:
    return float(np.array([bits << 16], dtype=np.uint32).view(np.float32)[0])


def unpack_update(arrays: Arrays, tensors: Tensors, chunk: int) -> list[ChunkUpdate | None]:
    """Per chunk the update's integers; None where the tensor is not present."""
    readers = Readers(arrays)
    present = [readers["present"].unsigned(1) for _ in tensors]
    pieces = chunks(tensors, chunk)
    counts: dict[str, list[int]] = {}
    for piece in pieces:
        if present[piece.tensor] and not is_dense(piece):
            counts.setdefault(piece.shape, []).append(readers[f"{piece.shape}.counts"].unsigned(16))
    left = {shape: list(own) for shape, own in counts.items()}
    update = [
        read_update_chunk(readers, piece, counts.get(piece.shape, []), left.get(piece.shape, []))
        if present[piece.tensor]
        else None
        for piece in pieces
    ]
    readers.check_end()
    return update


def read_update_chunk(readers: Readers, piece: Chunk, counts: list[int], left: list[int]) -> ChunkUpdate:
    """`counts`: of all chunks of this shape that are present; `left`: of this one and those behind it."""
    bits = readers[f"{piece.shape}.bits"].unsigned(8)
    exponent = readers[f"{piece.shape}.exponents"].signed(16)
    assert bits in (4, 6, 8)
    if is_dense(piece):
        indices = list(range(piece.elements))
    else:
        count = left.pop(0)
        if is_compact(piece, counts):
            indices = read_compact_indices(readers, piece, count, low_width(piece.elements, counts))
        else:
            indices = read_indices(readers[f"{piece.shape}.indices"], count, index_width(piece))
    values = {index: readers[f"{piece.shape}.values{bits}"].signed(bits) for index in indices}
    assert is_dense(piece) or all(values.values()), "zeros are dropped from sparse chunks"
    return ChunkUpdate({index: value for index, value in values.items() if value}, exponent, bits)


# --- aggregate --------------------------------------------------------------------------------------------------------


def outlier_halvings(contributions: list[list[SentChunk | None]]) -> list[int]:
    """How often each contribution is halved until its L2 norm is at most twice the lower median."""
    squares = [squared_norm(contribution) for contribution in contributions]
    lower_median = sorted(squares)[(len(squares) - 1) // 2]
    return [halvings(square, lower_median) for square in squares]


def squared_norm(contribution: list[SentChunk | None]) -> Fraction:
    sent = [chunk for chunk in contribution if chunk]
    return sum((Fraction(chunk.scale) ** 2 * sum(q * q for q in chunk.values.values()) for chunk in sent), Fraction(0))


def halvings(square: Fraction, lower_median: Fraction) -> int:
    if lower_median == 0:  # nothing to compare with
        return 0
    count = 0
    while square / 4**count > 4 * lower_median:
        count += 1
    return count


def aggregate(
    contributions: list[list[SentChunk | None]],
    halvings: list[int],
    codec: str | list[str],
    pieces: list[Chunk],
    *,
    average: str = "contributors",
    tokens: list[int] | None = None,
    largest: int | None = None,
) -> list[ChunkUpdate | None]:
    """Rule B3, chunk by chunk; None where the tensor has no value but zero (rule B8). `codec` may be one per site."""
    count = len(contributions)
    codecs = [codec] * count if isinstance(codec, str) else codec
    weights = token_weights(tokens) if average == "tokens" else [1.0] * count
    update = []
    for number, piece in enumerate(pieces):
        sites = []
        for contribution, own_codec, weight, halved in zip(contributions, codecs, weights, halvings, strict=True):
            chunk = contribution[number]
            if chunk and (scale := limited(chunk.scale * weight / 2**halved, own_codec)) > 0:
                sites.append((chunk.values, scale, chunk_exponent(scale, own_codec)))
        update.append(aggregate_chunk(sites, average, count, None if is_dense(piece) else largest))
    present = {piece.tensor for piece, chunk in zip(pieces, update, strict=True) if chunk.values}
    return [chunk if piece.tensor in present else None for piece, chunk in zip(pieces, update, strict=True)]


def token_weights(tokens: list[int]) -> list[float]:
    """w * N / sum(w), rounded once; all zero if nobody has tokens."""
    return [float(Fraction(own * len(tokens), sum(tokens))) if own else 0.0 for own in tokens]


def aggregate_chunk(
    sites: list[tuple[dict[int, int], float, int]], average: str, count: int, largest: int | None
) -> ChunkUpdate:
    """One chunk of (integers, scale, exponent) of each site that sent it, in a round of `count` contributions."""
    exponent = max((site_exponent for _, _, site_exponent in sites), default=0)
    columns: dict[int, list[int]] = {}
    for values, scale, _ in sites:
        for index, q in values.items():
            # the product is exact unless the scale has a weight; then it is rounded as a double
            columns.setdefault(index, []).append(round(Fraction(q * scale) * Fraction(2) ** (22 - exponent)))
    means = {index: average_of(column, average, count) for index, column in columns.items()}
    first = sorted(means, key=lambda index: (-abs(means[index]), index))[:largest]
    return quantise({index: means[index] for index in first if means[index]}, exponent - 22)


def average_of(column: list[int], average: str, count: int) -> int:
    """Nearest integer, ties to even, as `round` of a fraction is."""
    if average == "median":
        ordered = sorted(column)
        return round(Fraction(ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2], 2))
    return round(Fraction(sum(column), count if average == "sites" else len(column)))


VALUE_BITS = {"sign": 0, "int2": 2, "int4": 3, "int8": 7, "int16": 15}
"""Bits of the largest integer of a codec; none for a sign."""


def chunk_exponent(scale: float, codec: str) -> int:
    """The least E with scale < 2^E, plus the bits of the largest integer: none for sign."""
    return math.frexp(scale)[1] + VALUE_BITS[codec]


def limited(scale: float, codec: str) -> float:
    """Cut so that no exponent is above 120."""
    return min(scale, 2.0 ** (119 - VALUE_BITS[codec]))


def quantise(means: dict[int, int], exponent: int) -> ChunkUpdate:
    """The least shift that fits the largest magnitude; a chunk of nothing is 4 bits wide with exponent 0."""
    if not means:
        return ChunkUpdate({}, 0, 4)
    bits = 4 if len(means) <= 148 else 6 if len(means) <= 512 else 8
    largest = max(abs(mean) for mean in means.values())
    shift = 0
    while round(Fraction(largest, 2**shift)) > 2 ** (bits - 1) - 1:
        shift += 1
    values = {index: round(Fraction(mean, 2**shift)) for index, mean in sorted(means.items())}
    return ChunkUpdate({index: value for index, value in values.items() if value}, exponent + shift, bits)


# --- decode and apply -------------------------------------------------------------------------------------------------


class Adam(NamedTuple):
    """The state of one tensor: the second moment, and the product of beta2 over the entries that it had part in."""

    second_moment: np.ndarray
    unseen: float


def chunk_signs(values: dict[int, int], piece: Chunk, transform: str = "dct", step: int = 0) -> np.ndarray:
    return np.sign(chunk_integers(values, piece, transform, step))


def chunk_integers(values: dict[int, int], piece: Chunk, transform: str, step: int) -> np.ndarray:
    """Dense chunks are not transformed."""
    if is_dense(piece):
        return np.array([values.get(index, 0) for index in range(piece.elements)]).reshape(piece.rows, piece.cols)
    return decode_integers(values, piece.rows, piece.cols, transform, step)


def decode_signs(values: dict[int, int], rows: int, cols: int) -> np.ndarray:
    return np.sign(decode_integers(values, rows, cols))


def decode_integers(values: dict[int, int], rows: int, cols: int, transform: str = "dct", step: int = 0) -> np.ndarray:
    """The inverse transform in int64: every sum is below 64*64*127*126*126 < 2^33 (2^35 at s=128)."""
    coefficients = np.zeros(rows * cols, dtype=np.int64)
    for index, value in values.items():
        coefficients[index] = value
    left, right = integer_basis(rows, transform, step), integer_basis(cols, transform, step)
    return left.T @ coefficients.reshape(rows, cols) @ right


def chunk_values(update: ChunkUpdate, piece: Chunk, transform: str = "dct", step: int = 0) -> np.ndarray:
    """The update u, float32: the integers times 2^exponent over both scales."""
    integers = chunk_integers(update.values, piece, transform, step)
    scales = [1.0, 1.0] if is_dense(piece) else [basis_scale(side, transform) for side in (piece.rows, piece.cols)]
    unit = np.float64(np.float32(1 / (scales[0] * scales[1])))
    return (integers.astype(np.float64) * unit * 2.0**update.exponent).astype(np.float32)


def apply(
    parameters: dict[str, np.ndarray],
    update: list[ChunkUpdate | None],
    chunk: int,
    lr: list[float],
    decay: list[float],
    *,
    transform: str = "dct",
    step: int = 0,
    base_update: str = "signum",
    beta2: float = 0.99,
    adam: dict[str, Adam] | None = None,
) -> dict[str, np.ndarray]:
    """X*decay - direction*lr for the tensors present, every operation rounded to float32.

    lr and decay are per tensor; `adam` is the state by tensor name, which is replaced for the tensors present.
    """
    tensors = tensors_of(parameters)
    pieces = chunks(tensors, chunk)
    result = {name: value.copy() for name, value in parameters.items()}
    adam = {} if adam is None else adam
    for number in sorted({piece.tensor for piece, mine in zip(pieces, update, strict=True) if mine is not None}):
        name, shape = tensors[number]
        old = adam.get(name, Adam(np.zeros(math.prod(shape), np.float32), 1.0))
        adam[name] = Adam(old.second_moment.copy(), old.unseen * float(np.float32(beta2)))
    for piece, chunk_update in zip(pieces, update, strict=True):
        if chunk_update is None:
            continue
        name = tensors[piece.tensor][0]
        if base_update == "signum":
            direction = chunk_signs(chunk_update.values, piece, transform, step).astype(np.float32)
        else:
            direction = chunk_values(chunk_update, piece, transform, step)
        if base_update == "adam":
            direction = adam_direction(direction, adam[name], piece, np.float32(beta2))
        flat = result[name].reshape(-1)
        decayed = flat[piece.positions] * np.float32(decay[piece.tensor])
        flat[piece.positions] = decayed - direction * np.float32(lr[piece.tensor])
    return result


def adam_direction(u: np.ndarray, state: Adam, piece: Chunk, beta2: np.float32) -> np.ndarray:
    """Updates the second moment of one chunk, and divides u by its root."""
    fresh = (np.float32(1) - beta2) * u
    with np.errstate(over="ignore"):  # infinite for huge u, which then does not move
        moment = beta2 * state.second_moment[piece.positions] + fresh * u
    state.second_moment[piece.positions] = moment
    root = np.sqrt(moment / np.float32(1 - state.unseen))
    return u / (root + np.float32(1e-8))


def tensors_of(parameters: dict[str, np.ndarray]) -> Tensors:
    return [(name, parameters[name].shape) for name in layout_order(list(parameters))]


# --- outer step -------------------------------------------------------------------------------------------------------


def outer_step(
    anchor: np.ndarray,
    buffer: np.ndarray,
    copies: list[np.ndarray],
    weights: list[int],
    lr: float,
    momentum: float,
    optimizer: str = "nesterov",
) -> tuple[np.ndarray, np.ndarray]:
    """The new anchor and momentum buffer: float64 in the order of `copies`, one final float32 rounding each."""
    total = np.zeros(anchor.shape, dtype=np.float64)
    for copy, weight in zip(copies, weights, strict=True):
        total = total + copy.astype(np.float64) * weight
    mean = total / sum(weights)
    if optimizer == "average":
        return mean.astype(np.float32), buffer
    pseudo_gradient = anchor.astype(np.float64) - mean
    new_buffer = momentum * buffer.astype(np.float64) + pseudo_gradient
    if (lr, momentum) == (1, 0):
        return mean.astype(np.float32), new_buffer.astype(np.float32)
    if lr == 0:
        return anchor, new_buffer.astype(np.float32)
    direction = new_buffer if optimizer == "sgd" else pseudo_gradient + momentum * new_buffer
    new_anchor = anchor.astype(np.float64) - lr * direction
    return new_anchor.astype(np.float32), new_buffer.astype(np.float32)


def mean_of_buffers(copies: list[bytes], weights: list[int], dtype: str) -> bytes:
    """One buffer of every site, element by element, in float64 in the order of `copies`, with one final rounding.

    What is not finite, or has no weight, does not count; where nothing does, and of integers, it is the first copy's.
    """
    if dtype not in FLOATS or all(copy == copies[0] for copy in copies):
        return copies[0]
    size, result = FLOATS[dtype], b""
    for place in range(0, len(copies[0]), size):
        elements = [copy[place : place + size] for copy in copies]
        values = [read_float(element, dtype) for element in elements]
        counted = [(v, w) for v, w in zip(values, weights, strict=True) if math.isfinite(v) and w > 0]
        if counted:
            mean = sum(v * w for v, w in counted) / float(sum(w for _, w in counted))
            result += write_float(mean, dtype)
        else:
            result += elements[0]
    return result


FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes of an element."""


def read_float(element: bytes, dtype: str) -> float:
    if dtype == "BF16":
        return bfloat16(int.from_bytes(element, "little"))
    return struct.unpack({"F64": "<d", "F32": "<f", "F16": "<e"}[dtype], element)[0]


def write_float(value: float, dtype: str) -> bytes:
    """Correctly rounded, ties to even, as `struct` does it, which knows no bfloat16."""
    if dtype != "BF16":
        return struct.pack({"F64": "<d", "F32": "<f", "F16": "<e"}[dtype], value)
    cut = int.from_bytes(struct.pack("<f", value), "little") >> 16
    near = [word for word in (cut - 1, cut, cut + 1) if 0 <= word < 1 << 16 and math.isfinite(bfloat16(word))]
    word = min(near, key=lambda word: (abs(Fraction(bfloat16(word)) - Fraction(value)), word & 1))
    return word.to_bytes(2, "little")


def delayed_anchor(anchor: np.ndarray, now: np.ndarray, taken: np.ndarray, mix: float) -> np.ndarray:
    """`anchor + mix * (now - taken)`, element by element, each operation rounded to float32 once."""
    values = np.zeros(len(anchor), np.float32)
    for place in range(len(anchor)):
        moved = nearest_float32(Fraction(float(now[place])) - Fraction(float(taken[place])))
        scaled = nearest_float32(Fraction(float(np.float32(mix))) * Fraction(float(moved)))
        values[place] = anchor[place] if scaled == 0 else anchor[place] + scaled
    return values


def shifted(now: np.ndarray, anchor: np.ndarray, before: np.ndarray) -> np.ndarray:
    """`now + (anchor - before)`, element by element, each operation rounded to float32 once."""
    values = np.zeros(len(anchor), np.float32)
    for place in range(len(anchor)):
        moved = nearest_float32(Fraction(float(anchor[place])) - Fraction(float(before[place])))
        values[place] = nearest_float32(Fraction(float(now[place])) + Fraction(float(moved)))
        if anchor[place] == before[place]:
            values[place] = now[place]
        if now[place] == before[place]:
            values[place] = anchor[place]
    return values


def nearest_float32(number: Fraction) -> np.float32:
    """Correctly rounded, ties to even: float64 first would round twice."""
    guess = np.float32(float(number))
    near = [guess, np.nextafter(guess, np.float32(-np.inf)), np.nextafter(guess, np.float32(np.inf))]
    return min(near, key=lambda value: (abs(Fraction(float(value)) - number), int(value.view(np.uint32)) & 1))


# --- uploads of outer rounds ------------------------------------------------------------------------------------------


def upload_bf16(values: np.ndarray) -> bytes:
    """The upper half of each float32 number, after half of the lower half's range is added; of a tie the even one."""
    words = []
    for bits in values.view(np.uint32).tolist():
        upper, lower = divmod(bits, 1 << 16)
        words.append(upper + (lower > 0x8000 or (lower == 0x8000 and upper % 2 == 1)))
    return b"".join(word.to_bytes(2, "little") for word in words)


def read_bf16(data: bytes) -> np.ndarray:
    words = [int.from_bytes(data[place : place + 2], "little") for place in range(0, len(data), 2)]
    return np.array([bfloat16(word) for word in words], np.float32)


def upload_int8(values: np.ndarray) -> bytes:
    """4,096 values at a time: a float32 scale, then an integer for each."""
    data = b""
    for start in range(0, len(values), 4096):
        part = [Fraction(float(value)) for value in values[start : start + 4096]]
        scale = nearest_float32(max(map(abs, part)) / 127)
        ratios = [0.0 if scale == 0 else float(nearest_float32(value / Fraction(float(scale)))) for value in part]
        integers = [min(max(round(ratio), -127), 127) for ratio in ratios]
        data += scale.tobytes() + b"".join(value.to_bytes(1, "little", signed=True) for value in integers)
    return data


def read_int8(data: bytes) -> np.ndarray:
    values = []
    for start in range(0, len(data), 4100):
        scale = np.frombuffer(data[start : start + 4], "<f4")[0]
        integers = [int.from_bytes([byte], signed=True) for byte in data[start + 4 : start + 4100]]
        values += [nearest_float32(integer * Fraction(float(scale))) for integer in integers]
    return np.array(values, np.float32)


def contribution_values(sent: list[SentChunk | None], tensors: Tensors, chunk: int) -> np.ndarray:
    """What a contribution says of all parameters, flat: the integer inverse times scale over both bases' scales."""
    flats = [np.zeros(math.prod(shape), np.float32) for _, shape in tensors]
    for piece, mine in zip(chunks(tensors, chunk), sent, strict=True):
        if mine is not None:
            scales = [1.0, 1.0] if is_dense(piece) else [basis_scale(side, "dct") for side in (piece.rows, piece.cols)]
            factor = mine.scale * float(np.float32(1 / (scales[0] * scales[1])))
            integers = chunk_integers(mine.values, piece, "dct", 0)
            flats[piece.tensor][piece.positions] = (integers.astype(np.float64) * factor).astype(np.float32)
    return np.concatenate([np.zeros(0, np.float32), *flats])


# --- digests and replay -----------------------------------------------------------------------------------------------


def entry_hash(header: dict) -> str:
    text = json.dumps(header, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def digest_arrays(arrays: Arrays) -> str:
    parts = [
        name.encode() + b"\0" + arrays[name].nbytes.to_bytes(8, "little") + arrays[name].tobytes()
        for name in sorted(arrays)
    ]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def parameters_digest(arrays: list[np.ndarray]) -> str:
    return hashlib.sha256(b"".join(array.astype("<f4").tobytes() for array in arrays)).hexdigest()


def replay(
    log: list[tuple[dict, Arrays | None]],
    start: dict[str, np.ndarray],
    blobs: Callable[[str], bytes],
    *,
    chunk: int,
    fragments: list[tuple[int, int]] | None = None,
    groups: list[int] | None = None,
    transform: str = "dct",
    base_update: str = "signum",
    beta2: float = 0.99,
    mix: float = 1.0,
    copied: dict[int, dict[str, np.ndarray]] | None = None,
) -> dict[str, np.ndarray]:
    """The parameters after the whole log, from its entry 0 on, with hash chain and digests checked.

    `mix` is the share of what was done between the copies and their anchors that is kept. An anchor whose header has
    `before` was made without this region, which moves as the anchor does, or takes it as it is. `copied` takes the
    parameters of which copies are taken after every step: those with the late anchors that are applied there, without
    others.
    `fragments` are the tensor index ranges [begin, end) that anchors name (default: one fragment of everything);
    `groups` is the parameter group of each tensor (default: all in group 0).
    """
    names = [name for name, _ in tensors_of(start)]
    fragments = fragments or [(0, len(names))]
    groups = groups or [0] * len(names)
    check_chain([header for header, _ in log])
    parameters = start
    anchors = start
    copied = {} if copied is None else copied
    rule = {"transform": transform, "base_update": base_update, "beta2": beta2, "adam": {}}
    for header, arrays in log:
        if header["kind"] == "start":
            digest = parameters_digest([parameters[name] for name in names])
            assert digest == header["parameters"], "the start is not the one that the log names"
        elif header["kind"] == "step":
            parameters = replay_step(parameters, header, arrays, chunk, groups, rule)
            copied[header["step"]] = parameters
        elif header["kind"] == "anchor":
            if header["fragment"] == len(fragments):
                continue  # buffers, which are no parameters
            begin, end = fragments[header["fragment"]]
            anchor = replay_anchor(parameters, names[begin:end], header["digest"], blobs)
            taken = copied.get(header["taken_after"])
            becomes = dict(anchor)
            for name, value in anchor.items():
                if header.get("before") is not None:
                    flat = [tensors[name].ravel() for tensors in (parameters, anchor, anchors)]
                    becomes[name] = shifted(*flat).reshape(value.shape)
                elif "before" not in header and header["taken_after"] < header["step"] and taken is not None:
                    flat = [tensors[name].ravel() for tensors in (anchor, parameters, taken)]
                    becomes[name] = delayed_anchor(*flat, mix).reshape(value.shape)
            parameters, anchors = parameters | becomes, anchors | anchor
            if header["taken_after"] < header["step"]:
                copied[header["step"]] = parameters
        else:
            assert header["kind"] == "change", f"entry of unknown kind {header['kind']!r}"
    return parameters


def check_chain(headers: list[dict]) -> None:
    previous = "0" * 64
    for seq, header in enumerate(headers):
        assert header["seq"] == seq, f"entry {seq} says seq {header['seq']}"
        assert header["previous"] == previous, f"entry {seq} does not follow the one before"
        previous = entry_hash(header)


def replay_step(
    parameters: dict[str, np.ndarray], header: dict, arrays: Arrays | None, chunk: int, groups: list[int], rule: dict
) -> dict[str, np.ndarray]:
    if not header["parts"]:
        assert not arrays, "an empty entry has no arrays"
        return parameters
    assert arrays is not None, "the arrays of a step entry are missing"
    assert header["parts"] == [digest_arrays(arrays)], "these are not the arrays that the entry names"
    update = unpack_update(arrays, tensors_of(parameters), chunk)
    lr = [header["lr"][group] for group in groups]
    decay = [header["decay"][group] for group in groups]
    return apply(parameters, update, chunk, lr, decay, step=header["step"], **rule)


def replay_anchor(
    parameters: dict[str, np.ndarray], names: list[str], digest: str, blobs: Callable[[str], bytes]
) -> dict[str, np.ndarray]:
    """The tensors of one fragment, cut from its blob."""
    blob = blobs(digest)
    assert hashlib.sha256(blob).hexdigest() == digest, "the blob is not the one that the anchor names"
    values = np.frombuffer(blob, dtype="<f4").astype(np.float32)
    ends = np.cumsum([parameters[name].size for name in names])
    assert len(values) == ends[-1], "the blob has not the fragment's size"
    pieces = np.split(values, ends[:-1])
    return {name: piece.reshape(parameters[name].shape) for name, piece in zip(names, pieces, strict=True)}
