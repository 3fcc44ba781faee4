"""The compiled inner loops, where they could be built: without a C compiler numpy does the same, in twice the time."""

from contextlib import suppress
from importlib import import_module
from types import ModuleType

__all__ = ["compiled"]

compiled: ModuleType | None = None
with suppress(ImportError):
    compiled = import_module("algorithms._compiled")
