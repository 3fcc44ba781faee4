"""The parameters that a run may give to this task."""

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Params:
    data: str | None = None  # a text file or a folder of them; None: the texts that come with Python
    batch: int = 8  # sequences per step and rank
    context: int = 128  # bytes per sequence
    width: int = 192
    layers: int = 2
    heads: int = 4
    threads: int = 1  # more only helps a site that has a machine of its own

    def __post_init__(self) -> None:
        for name in ("batch", "context", "width", "layers", "heads", "threads"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"parameter {name!r} must be a whole number of at least 1, not {value!r}")
        if self.data is not None and not isinstance(self.data, str):
            raise ValueError(f"parameter 'data' must be a path or null, not {self.data!r}")
        if self.width % self.heads:
            raise ValueError(f"parameter 'width' ({self.width}) must be a multiple of 'heads' ({self.heads})")

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> "Params":
        known = [field.name for field in fields(cls)]
        unknown = sorted(given.keys() - set(known))
        if unknown:
            raise ValueError(f"unknown parameters {', '.join(unknown)}; tiny_lm knows {', '.join(known)}")
        return cls(**given)
