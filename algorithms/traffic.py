"""Bytes by formula, without packing anything: ours, and those of data-parallel training. numpy only.

All counts are of arrays, one way; a message adds a header of its own.
"""

from algorithms.bits import packed_size
from algorithms.indices import index_sizes
from algorithms.layout import ParameterLayout, kept
from algorithms.updates import CODEC_BITS, Codec, Indices

__all__ = ["coefficients", "contribution_bytes", "ddp_bytes", "parameters_bytes"]


def contribution_bytes(layout: ParameterLayout, k: int, codec: Codec, indices: Indices = "packed") -> int:
    """Bytes of the packed arrays of one contribution in which no tensor is absent."""
    total = 0
    for (rows, cols), blocks in layout.shapes.items():
        elements = rows * cols
        chunks = sum(map(len, blocks))
        count = kept(k, elements, layout.chunk)
        values = packed_size(chunks * count, CODEC_BITS[codec])
        total += sum(index_sizes(elements, chunks * count, chunks, indices).values()) + values + 2 * chunks
    return total


def coefficients(layout: ParameterLayout, k: int) -> int:
    """Coefficients of one contribution in which no tensor is absent."""
    return sum(len(block) * kept(k, block.elements, layout.chunk) for block in layout.blocks)


def ddp_bytes(layout: ParameterLayout) -> int:
    """Bytes that data-parallel training sends per step: bfloat16 gradients (rule C5)."""
    return 2 * layout.parameter_count


def parameters_bytes(layout: ParameterLayout) -> int:
    """Bytes of all parameters in float32."""
    return 4 * layout.parameter_count
