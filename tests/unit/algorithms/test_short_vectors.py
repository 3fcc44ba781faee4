"""Dense chunks (64 elements at most) are not transformed: biases and gains must follow their gradients."""

import pytest
import torch
from torch import nn

from algorithms import DeMo


def agreement(shape: tuple[int, ...], steps: int) -> torch.Tensor:
    """Per element, the share of steps that went against a nearly constant gradient, with one sign per element."""
    generator = torch.Generator().manual_seed(len(shape))
    parameter = nn.Parameter(torch.zeros(shape))
    optimizer = DeMo([("bias", parameter)], lr=2.0**-10, codec="sign")
    against = torch.zeros(shape)
    for _ in range(steps):
        before = parameter.detach().clone()
        parameter.grad = 1 + 0.3 * torch.randn(shape, generator=generator)
        optimizer.step()
        against += (parameter.detach() - before).sign() == -parameter.grad.sign()
    return against / steps


@pytest.mark.parametrize("shape", [(), (7,), (32,), (64,), (8, 8), (1, 60), (4, 4, 3)])
def test_every_element_moves_against_a_nearly_constant_gradient(shape: tuple[int, ...]) -> None:
    assert agreement(shape, 10).mean() > 0.9
    shares = agreement(shape, 80)
    assert shares.mean() > 0.9
    assert shares.min() > 0.8


def test_so_does_the_short_last_row_of_a_long_vector() -> None:
    """Only the tail is dense: the 128 elements before it are one transformed chunk."""
    assert agreement((128 + 32,), 50)[128:].mean() > 0.9
