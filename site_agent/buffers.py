"""A model's buffers, as safetensors and back."""

from collections.abc import Collection

from safetensors.torch import load, save
from torch import Tensor, nn

from algorithms.layout import canonical_name
from api.errors import IsthmusError

__all__ = ["buffer_bytes", "load_buffers", "save_buffers"]


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    """Those that a checkpoint of the model has, too; others are made of nothing but its code."""
    kept = model.state_dict(keep_vars=True).keys()
    return {canonical_name(name): buffer for name, buffer in model.named_buffers() if name in kept}


def save_buffers(model: nn.Module) -> bytes | None:
    """All persistent buffers as safetensors, in their own dtypes; None if there is none."""
    buffers = {name: buffer.detach().cpu().contiguous().clone() for name, buffer in _buffers(model).items()}
    return save(buffers) if buffers else None


def buffer_bytes(model: nn.Module) -> int:
    return sum(buffer.numel() * buffer.element_size() for buffer in _buffers(model).values())


def load_buffers(model: nn.Module, data: bytes) -> None:
    saved, own = load(data), _buffers(model)
    _require_same("buffers", saved.keys(), own.keys())
    for name, buffer in own.items():
        buffer.copy_(saved[name])


def _require_same(what: str, theirs: Collection[str], ours: Collection[str]) -> None:
    differing = sorted(set(theirs) ^ set(ours))
    if differing:
        raise IsthmusError(f"the {what} of entry 0 and of this site's model differ: {', '.join(differing[:10])}")
