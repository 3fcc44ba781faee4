"""What runs at a site: the agent, and the session that a training script joins."""

from typing import Any

__all__ = ["join"]


def __getattr__(name: str) -> Any:
    if name == "join":  # on demand, so that the agent does not import torch
        from site_agent.session import join

        return join
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
