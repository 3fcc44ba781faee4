"""The layouts of known models that the bench measures; every size is a multiple of 64, or a norm's."""

from algorithms.layout import ParameterLayout, TensorSpec

__all__ = ["gpt2", "olmo"]


def gpt2(layers: int, width: int, vocabulary: int) -> ParameterLayout:
    """The matrices and norms of a GPT-2, small with 12 layers of 768 and 50,304 tokens; no embedding with 0 tokens."""
    shapes: dict[str, tuple[int, ...]] = {"norm": (width,)}
    if vocabulary:
        shapes["embedding"] = (vocabulary, width)
    for layer in range(layers):
        shapes |= {
            f"{layer}.attention.norm": (width,),
            f"{layer}.attention.qkv": (3 * width, width),
            f"{layer}.attention.out": (width, width),
            f"{layer}.mlp.norm": (width,),
            f"{layer}.mlp.in": (4 * width, width),
            f"{layer}.mlp.out": (width, 4 * width),
        }
    return _layout(shapes)


def olmo(layers: int, width: int, vocabulary: int) -> ParameterLayout:
    """The matrices of an OLMo; 16 layers of 1,024 with 50,304 tokens have 320 million parameters."""
    shapes: dict[str, tuple[int, ...]] = {"embedding": (vocabulary, width)}
    for layer in range(layers):
        shapes |= {
            f"{layer}.attention.qkv": (width, 3 * width),
            f"{layer}.attention.out": (width, width),
            f"{layer}.mlp.in": (width, 8 * width),
            f"{layer}.mlp.out": (4 * width, width),
        }
    return _layout(shapes)


def _layout(shapes: dict[str, tuple[int, ...]]) -> ParameterLayout:
    return ParameterLayout([TensorSpec(name, shape, 0) for name, shape in shapes.items()])
