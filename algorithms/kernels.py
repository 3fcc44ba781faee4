"""The compiled inner loops, or nothing where there was no C compiler: numpy does the same, more slowly."""

from contextlib import suppress
from importlib import import_module
from types import ModuleType

__all__ = ["compiled"]

compiled: ModuleType | None = None
with suppress(ImportError):
    compiled = import_module("algorithms._compiled")
