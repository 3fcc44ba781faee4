"""What is measured: sites, bytes, rounds; and a made-up model whose contribution has as many bytes as asked."""

from dataclasses import dataclass

from algorithms.layout import ParameterLayout, TensorSpec, kept
from algorithms.traffic import contribution_bytes
from api.specs import OptimizerSpec

__all__ = ["FULL", "OPTIMIZER", "QUICK", "Case", "Plan", "layout_of"]

OPTIMIZER = OptimizerSpec()
"""Of every run here: the defaults."""
_TALL, _WIDE = 4096, 1024
KIB = 1 << 10


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    sites: int
    payload: int
    """Bytes of one site's contribution, but for its headers."""
    blocks: int
    """Each with `rounds` of every way and every setting of Redis, in turn."""
    rounds: int

    @property
    def memory(self) -> int:
        """Bytes, roughly: every site has what all send, and makes its own contribution of larger numbers."""
        return self.sites * self.payload * (self.sites + 16)

    @property
    def name(self) -> str:
        size = f"{self.payload >> 20}mib" if self.payload >= KIB * KIB else f"{self.payload >> 10}kib"
        return f"n{self.sites}_{size}"


@dataclass(frozen=True)
class Plan:
    cases: tuple[Case, ...]
    upload: int
    """Bytes of the blob that is uploaded."""


FULL = Plan(
    cases=(
        *(Case(sites, 100 * KIB, blocks=4, rounds=25) for sites in (2, 4, 8, 16)),
        *(Case(sites, KIB * KIB, blocks=3, rounds=10) for sites in (2, 4, 8, 16)),
        *(Case(sites, 8 * KIB * KIB, blocks=1, rounds=4) for sites in (2, 4, 8, 16)),
        *(Case(sites, 64 * KIB * KIB, blocks=1, rounds=2) for sites in (2, 4, 8, 16)),
    ),
    upload=400 * KIB * KIB,
)
QUICK = Plan(
    cases=tuple(Case(sites, size, blocks=1, rounds=5) for size in (100 * KIB, KIB * KIB) for sites in (2, 4)),
    upload=400 * KIB * KIB,
)


def layout_of(payload: int) -> ParameterLayout:
    """Matrices of which a contribution takes `payload` bytes, or up to one chunk less."""
    side = OPTIMIZER.chunk
    one = ParameterLayout([TensorSpec("chunk", (side, side), 0)], chunk=side)
    assert kept(OPTIMIZER.k, side * side, side) == OPTIMIZER.k
    chunks = payload // contribution_bytes(one, OPTIMIZER.k, OPTIMIZER.codec, OPTIMIZER.indices)
    whole, rest = divmod(chunks, _TALL * _WIDE // side**2)
    shapes = [(_TALL, _WIDE)] * whole + ([(side, side * rest)] if rest else [])
    return ParameterLayout([TensorSpec(f"{number:05}", shape, 0) for number, shape in enumerate(shapes)], chunk=side)
