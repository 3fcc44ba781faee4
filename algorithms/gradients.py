"""The gradients that a step takes in, and whether they may enter the momentum."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from algorithms.layout import ParameterLayout

__all__ = ["LIMIT", "all_finite", "trainable_gradients"]

LIMIT = 2.0**100
"""Gradients beyond this count as not finite: their transform could overflow float32."""


def trainable_gradients(layout: ParameterLayout, parameters: Sequence[Tensor]) -> dict[int, Tensor]:
    """Tensor position -> gradient, of the parameters, in layout order, that have one and are not frozen.

    Raises ValueError on a sparse gradient.
    """
    gradients = {}
    for index, parameter in enumerate(parameters):
        gradient = parameter.grad
        if gradient is None or not parameter.requires_grad:
            continue
        if gradient.layout != torch.strided:
            name = layout.tensors[index].name
            raise ValueError(f"parameter {name!r} has a sparse gradient, make it dense (an embedding: sparse=False)")
        gradients[index] = gradient
    return gradients


def all_finite(gradients: Iterable[Tensor]) -> bool:
    """Whether all elements are finite and not absurdly large; one answer is fetched per device."""
    bounds: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        if gradient.numel():
            bounds.setdefault(gradient.device, []).extend(bound.float() for bound in gradient.aminmax())
    return all(bool((torch.stack(values).abs() <= LIMIT).all()) for values in bounds.values())
