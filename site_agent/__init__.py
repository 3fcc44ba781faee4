"""What runs at a site: the agent, and the session that a training script joins; and sites without a coordinator."""

from importlib import import_module
from typing import Any

__all__ = ["AllGather", "join"]

_MODULES = {"AllGather": "site_agent.all_gather", "join": "site_agent.session"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:  # on demand, so that the agent does not import torch
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
