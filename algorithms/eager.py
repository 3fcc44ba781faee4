"""Functions that `torch.compile` is to leave alone. Importing the compiler takes as long as importing torch itself."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

__all__ = ["eager"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


def eager(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """As `torch.compiler.disable`, but the compiler is imported only by whoever compiles something."""
    disabled: Callable[_P, _T] | None = None

    @wraps(function)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        nonlocal disabled
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if disabled is None:
            disabled = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        return disabled(*args, **kwargs)

    return called
