"""Entry 0 of a run that begins with a snapshot or a file: from ranges of blobs to drafts of blobs. Blocks."""

from collections.abc import Iterator

from algorithms.layout import ParameterLayout, canonical_name
from algorithms.tensor_file import StoredTensor, TensorFile, as_floats, file_header, read_header
from api.errors import ConflictError, InvalidError
from coordinator.blobs import Blobs
from coordinator.drafts import Draft
from coordinator.records import Origin

__all__ = ["concatenated", "file_tensors", "other_tensors", "parameters_of", "require_same_tensors", "start_drafts"]

BLOCK = 4 << 20
"""Bytes of a tensor that are in memory at once: a multiple of every item's."""

Shapes = dict[str, tuple[int, ...]]


def start_drafts(origin: Origin, layout: ParameterLayout, blobs: Blobs, size: int, what: str) -> list[Draft]:
    """The parameters of entry 0 and then, if they come from a file, which has so many bytes, buffers if there are any.

    `what`: what the run begins with, in words. For the caller to commit or to discard.
    """
    if origin.file is None:
        return [concatenated(blobs, origin.parameters)]
    file = file_tensors(blobs, origin.file, size, what)
    parameters = parameters_of(blobs, origin.file, file, layout, what)
    others = other_tensors(blobs, origin.file, file, layout)
    return [parameters] if others is None else [parameters, others]


def concatenated(blobs: Blobs, digests: tuple[str, ...]) -> Draft:
    """One blob of several, for the caller to commit or to discard."""
    return _written(blobs, (block for digest in digests for block in _blocks(blobs, digest)))


def _blocks(blobs: Blobs, digest: str, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
    while stop is None or start < stop:
        block = blobs.read(digest, start, start + BLOCK if stop is None else min(start + BLOCK, stop))
        if not block:
            return
        yield block
        start += len(block)


def _written(blobs: Blobs, blocks: Iterator[bytes]) -> Draft:
    draft = blobs.draft()
    try:
        for block in blocks:
            draft.write(block)
    except BaseException:
        draft.discard()
        raise
    return draft


# --- from a file ------------------------------------------------------------------------------------------------------


def file_tensors(blobs: Blobs, digest: str, size: int, what: str) -> TensorFile:
    """What the file holds, by canonical name.

    Raises:
        InvalidError: it is not a safetensors file, or names a tensor twice.
    """
    try:
        file = read_header(lambda start, stop: blobs.read(digest, start, stop), size)
        tensors = {canonical_name(name): tensor for name, tensor in file.tensors.items()}
        if len(tensors) < len(file.tensors):
            raise ValueError("two tensors have the same canonical name")
    except ValueError as error:
        raise InvalidError("bad_file", f"the run begins with {what}: {error}") from None
    return TensorFile(tensors, file.metadata)


def require_same_tensors(layout: ParameterLayout, there: Shapes, what: str, *, more: bool = False) -> None:
    """Names the parameters that differ. `more`: there may be others, too.

    Raises:
        ConflictError: it is not the same model.
    """
    wanted = {tensor.name: tensor.shape for tensor in layout.tensors}
    names = wanted.keys() if more else wanted.keys() | there.keys()
    differing = sorted(name for name in names if wanted.get(name) != there.get(name))
    if differing:
        listed = "; ".join(
            f"{name}: {_shape(wanted, name)} in the model, {_shape(there, name)} in {what}" for name in differing[:5]
        )
        raise ConflictError(
            "layout_differs",
            f"the run begins with {what}, which has other parameters than the model, {len(differing)} differ "
            f"({listed}): begin with another one, or train the model that it was made of",
        )


def _shape(shapes: Shapes, name: str) -> str:
    return str(list(shapes[name])) if name in shapes else "missing"


def parameters_of(blobs: Blobs, digest: str, file: TensorFile, layout: ParameterLayout, what: str) -> Draft:
    """The model's tensors, as float32 in layout order.

    Raises:
        InvalidError: one of them is not in floating point.
    """
    return _written(blobs, _parameters(blobs, digest, file, layout, what))


def _parameters(blobs: Blobs, digest: str, file: TensorFile, layout: ParameterLayout, what: str) -> Iterator[bytes]:
    for spec in layout.tensors:
        tensor = file.tensors[spec.name]
        for block in _blocks(blobs, digest, tensor.start, tensor.stop):
            try:
                yield as_floats(block, tensor.dtype).astype("<f4", copy=False).tobytes()
            except ValueError as error:
                raise InvalidError("bad_file", f"the run begins with {what}, tensor {spec.name}: {error}") from None


def other_tensors(blobs: Blobs, digest: str, file: TensorFile, layout: ParameterLayout) -> Draft | None:
    """What is in the file besides the model's parameters: its buffers, in their own types. None if there is nothing."""
    others = {name: tensor for name, tensor in file.tensors.items() if name not in layout.index}
    if not others:
        return None
    return _written(blobs, _tensors(blobs, digest, others))


def _tensors(blobs: Blobs, digest: str, tensors: dict[str, StoredTensor]) -> Iterator[bytes]:
    yield file_header([(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()], {})
    for tensor in tensors.values():
        yield from _blocks(blobs, digest, tensor.start, tensor.stop)
