"""The algorithms of Isthmus: pure functions over arrays and tensors, and `DeMo`, a torch optimizer made of them.

Importing the package does not import torch; asking it for `DeMo` or `StepEntry` does.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from algorithms.demo import DeMo
    from algorithms.settings import Settings, preset
    from algorithms.step_entry import StepEntry

__all__ = ["DeMo", "Settings", "StepEntry", "preset"]

_MODULES = {
    "DeMo": "algorithms.demo",
    "Settings": "algorithms.settings",
    "StepEntry": "algorithms.step_entry",
    "preset": "algorithms.settings",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
