"""Base updates: how the decoded update u of a step moves a tensor X, `X <- X * decay - direction * lr`.

Every operation is rounded once to float32, by an operation of its own: no fused ones (rule B8). Only `muon`, whose
products are of floating-point numbers, may give other bits on another device. Source:
docs/decisions/0002-algorithms.md, section 6.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from algorithms.grid import matrices
from algorithms.tensor_update import TensorUpdate

__all__ = ["ADAM_EPSILON", "BASE_UPDATES", "BaseUpdate", "orthogonal", "signum"]

ADAM_EPSILON = 1e-8
"""As float32."""

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of x, x^3 and x^5; five iterations take singular values from 0.01 to 1 to about 0.7 to 1.2."""

ITERATIONS = 5


@dataclass(frozen=True)
class BaseUpdate:
    """A rule that moves one tensor."""

    apply: Callable[[TensorUpdate], None]
    exact: bool
    """Whether it gives the same bits on every device. A run with one that does not needs outer steps (rule B11)."""


def _signum(tensor: TensorUpdate) -> None:
    """The direction is sign(u)."""
    for strip in tensor.strips():
        signum(strip.of(tensor.parameters), strip.signs(), tensor.lr, tensor.decay)


def _sgd(tensor: TensorUpdate) -> None:
    """The direction is u."""
    for strip in tensor.strips():
        _descend(strip.of(tensor.parameters), strip.values(), tensor)


def _adam(tensor: TensorUpdate) -> None:
    """`v <- beta2 * v + (1 - beta2) * u * u`; the direction is `u / (sqrt(v / (1 - beta2^t)) + epsilon)`.

    beta2 is a float32 number, and so is `1 - beta2`. State: `second_moment` v, float32 (elements,), and `unseen`,
    beta2^t after the t entries in which the tensor was present, a running product in float64.
    """
    state, flat = tensor.state, tensor.parameters
    if "second_moment" not in state:
        state["second_moment"] = torch.zeros_like(flat)
        state["unseen"] = torch.ones((), dtype=torch.float64)
    beta2 = np.float32(tensor.beta2)
    state["unseen"] = state["unseen"] * float(beta2)
    seen = np.float32(1 - state["unseen"].item())
    # where float32 quotients are not correctly rounded, those of float64 are, once rounded
    wide = torch.float64 if tensor.inverse.method == "float64" else torch.float32
    divisor = torch.tensor(seen, dtype=wide, device=flat.device)  # CUDA multiplies by the reciprocal of a number
    for strip in tensor.strips():
        u = strip.values()
        moment = strip.of(state["second_moment"])
        moment.mul_(float(beta2)).add_((u * float(1 - beta2)).mul_(u))
        mean_square = (moment.to(wide) / divisor).float()
        denominator = _square_root(mean_square).add_(ADAM_EPSILON)
        _descend(strip.of(flat), (u.to(wide) / denominator).float(), tensor)


def _square_root(x: Tensor) -> Tensor:
    """The correctly rounded root of float32 x. `torch.sqrt` of float32 may be off by one bit: on CPUs it is, for 0.7 %.

    The root of a float32 number is at least 4 units of float64 from the middle of two float32 numbers, so that a
    float64 root need not be correctly rounded itself.
    """
    return torch.sqrt(x.double()).float()


def _muon(tensor: TensorUpdate) -> None:
    """The direction of a matrix is orthogonal(u), of a tensor that is not made of matrices sign(u)."""
    batch, rows, cols = matrices(tensor.shape)
    if min(rows, cols) < 2:
        _signum(tensor)
        return
    parameters = tensor.parameters.view(batch, rows, cols)
    for item in range(batch):
        u = torch.empty(rows * cols, dtype=torch.float32, device=tensor.parameters.device)
        for strip in tensor.strips(item):
            strip.of(u, item * rows * cols).copy_(strip.values())
        _descend(parameters[item], orthogonal(u.view(rows, cols)), tensor)


def orthogonal(matrix: Tensor) -> Tensor:
    """A float32 matrix with the singular vectors of `matrix`, equal singular values, and root mean square 1.

    Nearly equal: five Newton-Schulz iterations, in bfloat16 on CUDA, else in float32. A zero matrix stays zero.
    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks".
    """
    a, b, c = NEWTON_SCHULZ
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    tiny = torch.finfo(torch.float32).tiny
    norm = torch.linalg.vector_norm(wide, dtype=torch.float64).clamp_min(tiny)
    x: Tensor = (wide / norm).to(torch.bfloat16 if matrix.is_cuda else torch.float32)
    with torch.autocast(matrix.device.type, enabled=False):
        for _ in range(ITERATIONS):
            gram = x @ x.T
            x = a * x + (b * gram + c * (gram @ gram)) @ x
    x = x.float()
    x.div_(x.square().mean().sqrt().clamp_min(tiny))
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def signum(parameters: Tensor, signs: Tensor, lr: float, decay: float) -> None:
    """`X <- X * decay - signs * lr` in place; float32 of equal shapes, `signs` is -1, +0 or 1.

    The product with `signs` is exact, so that `alpha=`, which may fuse it with the difference, changes no bit here.
    """
    _decay(parameters, decay)
    parameters.sub_(signs, alpha=lr)


def _descend(parameters: Tensor, direction: Tensor, tensor: TensorUpdate) -> None:
    """`X <- X * decay - direction * lr` in place; `direction` is overwritten."""
    _decay(parameters, tensor.decay)
    parameters.sub_(direction.mul_(tensor.lr))


def _decay(parameters: Tensor, decay: float) -> None:
    if decay != 1:
        parameters.mul_(decay)


BASE_UPDATES: Mapping[str, BaseUpdate] = MappingProxyType(
    {
        "signum": BaseUpdate(_signum, exact=True),
        "sgd": BaseUpdate(_sgd, exact=True),
        "adam": BaseUpdate(_adam, exact=True),
        "muon": BaseUpdate(_muon, exact=False),
    }
)
