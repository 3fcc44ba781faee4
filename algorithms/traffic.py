"""Bytes by formula, without packing anything: ours, and those of data-parallel training. numpy only."""

from algorithms.bits import packed_size
from algorithms.codec import index_bits
from algorithms.layout import ParameterLayout, kept
from algorithms.updates import Codec

__all__ = ["contribution_bytes", "ddp_bytes", "parameters_bytes"]


def contribution_bytes(layout: ParameterLayout, k: int, codec: Codec) -> int:
    """Bytes of the packed arrays of one contribution in which no tensor is absent."""
    total = 0
    for (rows, cols), blocks in layout.shapes.items():
        elements = rows * cols
        chunks = sum(map(len, blocks))
        values = chunks * kept(k, elements, layout.chunk)
        total += (
            packed_size(values, index_bits(elements)) + packed_size(values, 1 if codec == "sign" else 8) + 2 * chunks
        )
    return total


def ddp_bytes(layout: ParameterLayout) -> int:
    """Bytes that data-parallel training sends per step: bfloat16 gradients, one way (rule C5)."""
    return 2 * layout.parameter_count


def parameters_bytes(layout: ParameterLayout) -> int:
    """Bytes of all parameters in float32."""
    return 4 * layout.parameter_count
