"""The inverse transform in exact integers: the same bits on any device, with any number of threads (rules B2, B9).

With q the coefficients of a chunk (rows x cols, |q| <= 127) and B the integer bases (|b| <= 126), the inverse is
X = Br' q Bc. float32 holds integers up to 2^24 = 16,777,216, so a sum is exact in any order while the sum of the
magnitudes of its terms stays below that. For at most 128 columns the first pass t = q Bc always is:
|t| <= 127 * 126 * 128 = 2,048,256. The second pass has two forms:

- single: |X| <= sum|q| * 126^2, so it is exact if the chunk's L1 norm is at most 1,040: 16,511,040.
- split: t = R*hi + lo with hi = rint(t/R), so |lo| <= R/2, and both halves go through the second pass:
  up to 64 x 64, R = 1,024: |hi| <= 1,001, |H| <= 64 * 126 * 1,001 = 8,072,064, |L| <= 64 * 126 * 512 = 4,128,768;
  up to 128 x 128, R = 2,048: |hi| <= 1,001, |H| <= 16,144,128, |L| <= 128 * 126 * 1,024 = 16,515,072.
  X = R*H + L has the sign of H + L/R: the division by a power of two is exact, and a correctly rounded sum is zero
  only if the exact one is.

float64 is exact for both passes: |X| <= 128 * 128 * 127 * 126^2 < 2^35.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from algorithms.transforms import basis

__all__ = ["SINGLE_PASS_L1", "Method", "decode", "known_answer", "signs"]

Method = Literal["auto", "single", "split", "float64"]

SINGLE_PASS_L1 = 1040
"""Largest L1 norm of a chunk for which the single pass is exact."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def decode(values: Tensor, method: Method = "auto") -> Tensor:
    """The integer inverse transform, exact, float64 (m, rows, cols), of integers in float32 (m, rows, cols).

    Divide by the product of the scales of both bases for real values. `auto` picks `single` or `split` by the L1 norm.
    """
    high, low, radix = _passes(values, method)
    return high.double() if low is None else high.double() * radix + low.double()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def signs(values: Tensor, method: Method = "auto") -> Tensor:
    """The exact sign of `decode(values)`, float32 (m, rows, cols): -1, +0 or 1."""
    high, low, radix = _passes(values, method)
    total = high if low is None else high + low / radix
    return torch.sign(total).float().add_(0.0)  # adding makes -0 a +0


def known_answer(device: torch.device, shapes: Iterable[tuple[int, int]] = ((32, 32), (64, 64), (128, 128))) -> bool:
    """Whether both float32 forms decode worst-case chunks of each shape exactly on a device (rule B9)."""
    return all(_is_exact(device, rows, cols) for rows, cols in shapes)


def _passes(values: Tensor, method: Method) -> tuple[Tensor, Tensor | None, int]:
    """The two halves (high, low) and the radix R of the inverse `R*high + low`; without a low half R does not count."""
    count, rows, cols = values.shape
    if method == "auto":
        single = count == 0 or bool(values.abs().sum(dim=(1, 2)).max() <= SINGLE_PASS_L1)
        method = "single" if single else "split"
    dtype = torch.float64 if method == "float64" else torch.float32
    left, right = _basis(rows, values.device, dtype).T, _basis(cols, values.device, dtype)
    radix = 1024 if max(rows, cols) <= 64 else 2048
    with torch.autocast(values.device.type, enabled=False):
        first = (values.to(dtype).reshape(count * rows, cols) @ right).view(count, rows, cols)
        if method != "split":
            return torch.matmul(left, first), None, radix
        high = torch.round(first / radix)
        low = first - high * radix
        return torch.matmul(left, high), torch.matmul(left, low), radix


@lru_cache(maxsize=1024)
def _basis(length: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(basis("dct", length).integers.copy()).to(device=device, dtype=dtype)


@lru_cache(maxsize=256)
def _question(rows: int, cols: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Worst-case chunks (2, rows, cols), the second one for the single pass, and their inverse in int64.

    Column 0 of a basis is positive, so equal signs give the largest value at position (0, 0).
    """
    position = np.arange(rows * cols)
    dense = np.where(position % 3, 127, 127 - position % 255)
    sparse = np.where(position < SINGLE_PASS_L1 // 127, 127, 0)
    chunks = np.stack([dense, sparse]).reshape(2, rows, cols).astype(np.int64)
    left, right = (basis("dct", length).integers.astype(np.int64) for length in (rows, cols))
    return chunks, left.T @ chunks @ right


def _is_exact(device: torch.device, rows: int, cols: int) -> bool:
    chunks, answer = _question(rows, cols)
    values = torch.from_numpy(chunks).to(device=device, dtype=torch.float32)
    methods: tuple[Method, Method] = ("split", "single")
    for number, method in enumerate(methods):
        chunk, right = values[number : number + 1], answer[number : number + 1]
        if not np.array_equal(decode(chunk, method).cpu().numpy(), right):
            return False
        if not np.array_equal(signs(chunk, method).cpu().numpy(), np.sign(right)):
            return False
    return True
