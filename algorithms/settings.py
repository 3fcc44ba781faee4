"""The settings of the algorithms, checked: the same in `DeMo(...)` and in a run's `optimizer`. No torch.

Source: docs/decisions/0002-algorithms.md, section 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, get_args

from algorithms.layout import CHUNKS, kept
from algorithms.transforms import Transform
from algorithms.updates import Codec, Indices

__all__ = [
    "INEXACT_BASE_UPDATES",
    "PRESETS",
    "STATEFUL_BASE_UPDATES",
    "Average",
    "BaseUpdateName",
    "Outliers",
    "Settings",
    "SettingsDict",
    "Subtract",
    "preset",
]

Subtract = Literal["local", "aggregate"]
Average = Literal["contributors", "sites", "tokens", "median"]
Outliers = Literal["halve", "keep"]
BaseUpdateName = Literal["signum", "sgd", "adam", "muon"]

INEXACT_BASE_UPDATES: frozenset[BaseUpdateName] = frozenset({"muon"})
"""Those that may give other bits on another device: sites drift apart unless outer steps re-anchor them (rule B11)."""

STATEFUL_BASE_UPDATES: frozenset[BaseUpdateName] = frozenset({"adam"})
"""Those that keep state from entry to entry: whoever joins late must apply them all."""

_CHOICES: Mapping[str, tuple[Any, ...]] = {
    "transform": get_args(Transform),
    "chunk": CHUNKS,
    "codec": get_args(Codec),
    "indices": get_args(Indices),
    "subtract": get_args(Subtract),
    "average": get_args(Average),
    "outliers": get_args(Outliers),
    "base_update": get_args(BaseUpdateName),
}


class SettingsDict(TypedDict, total=False):
    """Some of the settings, as keyword arguments; `Settings` says what they mean."""

    transform: Transform
    chunk: int
    k: int
    codec: Codec
    indices: Indices
    beta: float
    alpha: float
    subtract: Subtract
    average: Average
    largest: int | None
    outliers: Outliers
    base_update: BaseUpdateName
    beta2: float


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings. Raises ValueError on a value out of range, naming the setting, the range and the value."""

    transform: Transform = "dct"
    """The basis in which the largest coefficients are picked; part of the layout."""
    chunk: int = 64
    """Side of a chunk; part of the layout."""
    k: int = 32
    """Coefficients sent per chunk of chunk x chunk elements; smaller chunks send fewer in proportion."""
    codec: Codec = "sign"
    """How a sent value is coded."""
    indices: Indices = "packed"
    """How a sent position is coded."""
    beta: float = 0.99
    """Decay of the momentum."""
    alpha: float = 1.0
    """Share of what is subtracted from the momentum."""
    subtract: Subtract = "local"
    """What is subtracted: what the site sent and the entry lists, or the update."""
    average: Average = "contributors"
    """How the values that sites sent for one coefficient become one."""
    largest: int | None = None
    """Coefficients kept of each chunk of the aggregate; None keeps all."""
    outliers: Outliers = "halve"
    """Whether a contribution far larger than the others is scaled down."""
    base_update: BaseUpdateName = "signum"
    """How the decoded update moves the parameters."""
    beta2: float = 0.99
    """Decay of the second moment of the update; `adam` only."""

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if type(value) is not type(choices[0]) or value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, got {value!r}")
        for name in ("beta", "beta2"):
            if not (_is_number(getattr(self, name)) and 0 <= getattr(self, name) < 1):
                raise ValueError(f"{name} must be at least 0 and below 1, got {getattr(self, name)!r}")
        if not (_is_number(self.alpha) and 0 <= self.alpha <= 1):
            raise ValueError(f"alpha must be 0 to 1, got {self.alpha!r}")
        if not isinstance(self.k, int):
            raise ValueError(f"k must be an integer, got {self.k!r}")
        kept(self.k, self.chunk**2, self.chunk)
        if self.largest is not None and not (isinstance(self.largest, int) and self.largest >= 1):
            raise ValueError(f"largest must be an integer from 1, or None to keep all, got {self.largest!r}")


PRESETS: Mapping[str, SettingsDict] = {
    "paper": {"subtract": "aggregate", "alpha": 0.2, "beta": 0.999},
    "reference": {"subtract": "local", "alpha": 1.0, "beta": 0.999},
    "default": {"subtract": "local", "alpha": 1.0, "beta": 0.99},
}
"""`paper`: as the text of Peng et al. has it; `reference`: as their code does; `default`: what works best for us."""


def preset(name: str) -> SettingsDict:
    """The settings that a preset fixes, to be passed on with others. Raises ValueError on an unknown name."""
    if name not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {name!r}")
    return PRESETS[name].copy()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)
