"""Base updates: how the decoded update of a step moves the parameters."""

from torch import Tensor

__all__ = ["signum"]


def signum(parameters: Tensor, signs: Tensor, lr: float, decay: float) -> None:
    """`X <- X * decay - signs * lr` in place, two roundings, no fused operation (rule B8).

    float32, equal shapes, `parameters` of any strides. `signs` is -1, 0 or 1, so that its product with `lr` is exact.
    """
    parameters.mul_(decay)
    parameters.sub_(signs * lr)
