"""The algorithms of Isthmus: pure functions over arrays and tensors, and `DeMo`, a torch optimizer made of them.

Importing the package does not import torch; asking it for one of the names below does.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from algorithms.demo import DeMo, StepEntry

__all__ = ["DeMo", "StepEntry"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("algorithms.demo"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
