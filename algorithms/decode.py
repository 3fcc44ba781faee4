"""The inverse transform in exact integers: the same bits on any device, with any number of threads (rules B2, B9).

With q the coefficients of a chunk of r x c (|q| <= 127) and L, C its integer bases, the inverse is X = L' q C. float32
holds integers up to 2^24 = 16,777,216, so a sum of integers is exact in any order, fused or not, while the sum of the
magnitudes of its terms stays below that. No entry of a basis is above `limit`, which is 126 or less. So the first pass
t = q C is always exact: |t| <= 127 * 126 * 128 = 2,048,256. The second pass L' t has two forms:

- single: |X| <= sum|q| * limit_r * limit_c, so it is exact if that is below 2^24. With limits of 126 it is so up to an
  L1 norm of 1,056 (148 coefficients of 4 bits: at most 1,036). With limits of 1 (Hadamard, identity) it always is,
  since sum|q| <= 127 * 128^2 < 2^21.
- split: t = R (hi + lo) with hi = rint(t / R), so that lo is a multiple of 1/R and at most 1/2; both go through the
  second pass. Up to 64 x 64, R = 1,024: |hi| <= 1,001, so |L' hi| <= 64 * 126 * 1,001 = 8,072,064, and
  R |L' lo| <= 64 * 126 * 512 = 4,128,768. Up to 128 x 128, R = 2,048: |hi| <= 1,001, |L' hi| <= 16,144,128,
  R |L' lo| <= 128 * 126 * 1,024 = 16,515,072. R is a power of two, which changes no digit, so both are exact. Their
  float32 sum has the sign of X: it is correctly rounded, so it is zero only if the exact one is.

float64 is exact for both passes: |X| <= 127 * 128^2 * 126^2 < 2^35. Neither dense chunks nor those of `identity` are
transformed.

Products and memory: the first pass is sparse, row i of t being the sum of those rows of C that the coefficients of row
i name, times their values. The chunks lie side by side, (r, m, c), so that the second pass is one product, and its
result is ordered like a strip of the parameters.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import embedding_bag

from algorithms.eager import eager
from algorithms.layout import is_dense
from algorithms.transforms import Transform, basis
from algorithms.updates import Shape, UpdateCoefficients

__all__ = ["Inverse", "Method", "decode", "known_answer", "signs", "values"]

Method = Literal["auto", "single", "split", "float64"]

EXACT_LIMIT = 2**24
"""Integers below this are exact in float32."""

VALUE_LIMIT = 127
"""Largest magnitude of an integer of an update."""

QUESTION_CHUNKS = 8
"""Chunks of a known-answer question: small products may be computed in another way than those of a tile."""


class Inverse(NamedTuple):
    """Which inverse transform, and how it is computed."""

    transform: Transform = "dct"
    step: int = 0
    """Of the entry; only `random` depends on it."""
    device: torch.device = torch.device("cpu")
    method: Method = "auto"
    """`auto`: `single` where a bound on the L1 norm allows it, else `split`."""

    def transforms(self, shape: Shape) -> bool:
        """Whether chunks of this shape are transformed at all."""
        return self.transform != "identity" and not is_dense(shape[0] * shape[1])


@eager
def decode(part: UpdateCoefficients, shape: Shape, inverse: Inverse) -> Tensor:
    """The integer inverse of m chunks, exact, without their exponents: float64 (rows, m, cols), no -0."""
    high, low, radix = _passes(part, shape, inverse)
    total = high.double().add_(0.0)  # makes -0 a +0
    return total if low is None else total.add_(low).mul_(radix)


@eager
def signs(part: UpdateCoefficients, shape: Shape, inverse: Inverse) -> Tensor:
    """The exact sign of `decode`, float32 (rows, m, cols): -1, +0 or 1."""
    high, low, _ = _passes(part, shape, inverse)
    total = high if low is None else high.add_(low)
    return torch.sign(total, out=total).float()


@eager
def values(part: UpdateCoefficients, shape: Shape, inverse: Inverse) -> Tensor:
    """The update u of m chunks, float32 (rows, m, cols): in float64 `decode * (unit * 2^exponent)`, then rounded."""
    factors = torch.from_numpy(np.ldexp(_unit(shape, inverse), part.exponents.astype(np.int32)))
    integers: Tensor = decode(part, shape, inverse)
    return integers.mul_(factors.to(inverse.device)[:, None]).float()


def known_answer(device: torch.device, shapes: Iterable[Shape], transform: Transform = "dct") -> bool:
    """Whether a device computes in float32 what we rely on (rule B9).

    Worst-case chunks of each shape in both forms of the inverse, and correctly rounded quotients.
    """
    return _divides_exactly(device) and all(_is_exact(device, shape, transform) for shape in shapes)


def _unit(shape: Shape, inverse: Inverse) -> float:
    """What 1 in the integer inverse stands for: the float32 number nearest to `1 / (scale_r * scale_c)`."""
    if not inverse.transforms(shape):
        return 1.0
    left, right = (basis(inverse.transform, length, inverse.step) for length in shape)
    return float(np.float32(1 / (left.scale * right.scale)))


def _passes(part: UpdateCoefficients, shape: Shape, inverse: Inverse) -> tuple[Tensor, Tensor | None, int]:
    """Two halves (rows, m, cols) and the radix R of the inverse `R * (high + low)`; a single pass has no low half."""
    rows, cols = shape
    if not inverse.transforms(shape):
        return _scatter(part, shape, inverse.device), None, 1
    method = inverse.method
    if method == "auto":
        limits = [basis(inverse.transform, length, inverse.step).limit for length in shape]
        method = "single" if _largest_norm(part) * limits[0] * limits[1] < EXACT_LIMIT else "split"
    dtype = torch.float64 if method == "float64" else torch.float32
    left, right = _matrix(inverse, rows, dtype).T, _matrix(inverse, cols, dtype)
    with torch.autocast(inverse.device.type, enabled=False):
        if method != "split":
            first = _first_pass(part, shape, right, 1)
            return torch.mm(left, first).view(rows, -1, cols), None, 1
        radix = 1024 if max(shape) <= 64 else 2048
        low = _first_pass(part, shape, right, radix)
        high = torch.round(low)
        low.sub_(high)
        return torch.mm(left, high).view(rows, -1, cols), torch.mm(left, low).view(rows, -1, cols), radix


def _first_pass(part: UpdateCoefficients, shape: Shape, right: Tensor, radix: int) -> Tensor:
    """`q C / radix`, (rows, m * cols): of each row of each chunk the rows of C in a bag, weighted by q / radix."""
    places, columns = _places(part, shape)
    count = len(part.counts)
    ends = np.zeros(shape[0] * count + 1, np.int64)
    np.cumsum(np.bincount(places, minlength=shape[0] * count), out=ends[1:])
    order = np.argsort((part.indices // np.uint16(shape[1])).astype(np.uint8), kind="stable")  # a radix sort
    weights = torch.from_numpy(part.values[order]).to(right.device, right.dtype)
    sums = embedding_bag(
        torch.from_numpy(columns[order].astype(np.int64)).to(right.device),
        right,
        torch.from_numpy(ends).to(right.device),
        mode="sum",
        per_sample_weights=weights.mul_(1 / radix),
        include_last_offset=True,
    )
    return sums.view(shape[0], -1)


def _scatter(part: UpdateCoefficients, shape: Shape, device: torch.device) -> Tensor:
    """The coefficients themselves, float32 (rows, m, cols)."""
    places, columns = _places(part, shape)
    rows, cols = shape
    chunks = torch.zeros(rows * len(part.counts) * cols, dtype=torch.float32, device=device)
    amounts = torch.from_numpy(part.values).to(device, torch.float32)
    return chunks.scatter_(0, torch.from_numpy(places * cols + columns).to(device), amounts).view(rows, -1, cols)


def _places(part: UpdateCoefficients, shape: Shape) -> tuple[NDArray[np.int64], NDArray[np.uint16]]:
    """For each coefficient the number `row * m + chunk` of its row among those of all chunks, and its column."""
    cols = np.uint16(shape[1])
    rows = part.indices // cols
    count = len(part.counts)
    return rows * np.int64(count) + np.repeat(np.arange(count), part.counts), part.indices - rows * cols


def _largest_norm(part: UpdateCoefficients) -> int:
    """A bound on the L1 norm of every chunk: the most coefficients times the largest magnitude."""
    peak = max(int(part.values.max(initial=0)), -int(part.values.min(initial=0)))
    return int(part.counts.max(initial=0)) * peak


def _matrix(inverse: Inverse, length: int, dtype: torch.dtype) -> Tensor:
    """The integer basis as a tensor (length, length)."""
    if inverse.transform == "random":
        return _random_matrix(length, inverse.step, inverse.device, dtype)
    return _fixed_matrix(inverse.transform, length, inverse.device, dtype)


@lru_cache(maxsize=1024)
def _fixed_matrix(transform: Transform, length: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(basis(transform, length).integers.copy()).to(device, dtype)


@lru_cache(maxsize=8)  # the few lengths of most layouts; those of older steps go
def _random_matrix(length: int, step: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(basis("random", length, step).integers.copy()).to(device, dtype)


def _is_exact(device: torch.device, shape: Shape, transform: Transform) -> bool:
    methods: tuple[Method, Method] = ("split", "single")
    for method in methods:
        part, answer = _question(shape, transform, method)
        inverse = Inverse(transform, 0, device, method)
        if not np.array_equal(decode(part, shape, inverse).cpu().numpy(), answer):
            return False
        found = signs(part, shape, inverse).cpu().numpy()
        if not np.array_equal(found, np.sign(answer)) or np.signbit(found[answer == 0]).any():
            return False
    return True


@lru_cache(maxsize=16)  # up to 1.5 MiB each
def _question(shape: Shape, transform: Transform, method: Method) -> tuple[UpdateCoefficients, NDArray[np.int64]]:
    """Chunks with the largest norm that a method allows, and their inverse in int64 (rows, m, cols).

    The first one makes the largest sum: its signs are those of the terms of element (0, 0) of the inverse, and its
    largest coefficients meet the largest of these. The last one is zero, the others are the first in random order.
    """
    left, right = (basis(transform, length).integers.astype(np.int64) for length in shape)
    terms = np.outer(left[:, 0], right[:, 0]).reshape(-1)
    magnitudes = VALUE_LIMIT - np.arange(terms.size) // 3 % 2
    if method == "single":
        limits = [basis(transform, length).limit for length in shape]
        norm = (EXACT_LIMIT - 1) // (limits[0] * limits[1])
        magnitudes = np.clip(norm - VALUE_LIMIT * np.arange(terms.size), 0, VALUE_LIMIT)
    random = np.random.default_rng(0)
    chunks = random.permuted(np.tile(magnitudes, (QUESTION_CHUNKS, 1)), axis=1).astype(np.int8)
    chunks *= random.choice(np.array([-1, 1], np.int8), chunks.shape)
    order = np.argsort(-np.abs(terms), kind="stable")
    chunks[0, order] = magnitudes * np.where(terms < 0, -1, 1)[order]
    chunks[-1] = 0
    part = UpdateCoefficients(
        chunks=np.arange(QUESTION_CHUNKS),
        counts=np.full(QUESTION_CHUNKS, terms.size),
        indices=np.tile(np.arange(terms.size, dtype=np.uint16), QUESTION_CHUNKS),
        values=chunks.reshape(-1),
        exponents=np.zeros(QUESTION_CHUNKS, np.int16),
        bits=np.full(QUESTION_CHUNKS, 8, np.uint8),
    )
    answer = chunks.reshape(-1, *shape).astype(np.int64)
    if Inverse(transform).transforms(shape):
        answer = left.T @ answer @ right
    return part, answer.transpose(1, 0, 2)


def _divides_exactly(device: torch.device) -> bool:
    """Whether float32 quotients are correctly rounded: those of float64, rounded, are."""
    dividends = np.ldexp(np.linspace(1, 2, 1000), np.arange(1000) % 250 - 140).astype(np.float32)
    divisors = dividends[::-1].copy()
    with np.errstate(over="ignore"):
        answer = (dividends.astype(np.float64) / divisors).astype(np.float32)
    quotients = torch.from_numpy(dividends).to(device) / torch.from_numpy(divisors).to(device)
    return np.array_equal(quotients.cpu().numpy(), answer)
