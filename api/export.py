"""A model as a safetensors file: parameters as float32 and buffers in their own types, by canonical name."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from safetensors import safe_open

from algorithms.codec import parameters_digest
from algorithms.layout import ParameterLayout
from algorithms.tensor_file import ITEM_BYTES, StoredTensor, file_header, read_header
from api.client import CoordinatorClient
from api.errors import IsthmusError, NotFoundError
from api.output_file import output_file, require_writable
from api.schemas import Manifest

__all__ = ["export_model", "file_digest", "manifest_of"]


@dataclass(frozen=True)
class _Source:
    """Where a model is: blobs. `digest`: of all parameters, if it is known."""

    facts: dict[str, str]
    layout: ParameterLayout
    blobs: list[str]
    buffers: str | None
    digest: str | None


_BUFFERS = "buffers"
_PARAMETER_BYTES = 4


def export_model(client: CoordinatorClient, run: str, path: Path, snapshot: int | None = None) -> str:
    """Writes the model of a run that succeeded, or a snapshot; returns the digest of its parameters.

    Raises:
        ProblemError: the run has not succeeded, or has no such snapshot.
        IsthmusError: `path` is a folder, in one that is not there, or cannot be written; or the coordinator's blobs
            are not the parameters that the sites ended with.
    """
    require_writable(path)
    model = _trained(client, run) if snapshot is None else _of_snapshot(client, run, snapshot)
    buffers = b"" if model.buffers is None else client.get_blob(model.buffers)
    with output_file(path) as file:
        digest = _write(file, client, model, buffers)
        if model.digest not in (None, digest):
            raise IsthmusError(f"the stored parameters of run {run} are not those that its sites ended with")
    return digest


def manifest_of(client: CoordinatorClient, run: str, number: int) -> Manifest:
    """Of one of the run's registered snapshots.

    Raises:
        NotFoundError: there is none of that number.
    """
    there = {made.number: made for made in client.snapshots(run).items}
    if number not in there:
        listed = ", ".join(map(str, there)) or "none"
        raise NotFoundError("snapshot_not_found", f"run {run} has no snapshot {number}; its snapshots: {listed}")
    return Manifest.model_validate_json(client.get_blob(there[number].manifest))


def _trained(client: CoordinatorClient, run: str) -> _Source:
    model = client.model(run)
    facts = {"run": run, "step": str(model.step), "digest": model.digest}
    return _Source(facts, ParameterLayout.from_json(model.layout), model.blobs, model.buffers, model.digest)


def _of_snapshot(client: CoordinatorClient, run: str, number: int) -> _Source:
    manifest = manifest_of(client, run, number)
    layout = ParameterLayout.from_json(json.loads(client.get_blob(manifest.layout["blob"])))
    facts = {"run": run, "step": str(manifest.step), "snapshot": str(number)}
    return _Source(facts, layout, manifest.parameters, manifest.buffers, None)


def _write(file: BinaryIO, client: CoordinatorClient, model: _Source, buffers: bytes) -> str:
    """Larger items come first, so that all are aligned; returns the digest of the parameters."""
    stored = read_header(lambda start, stop: buffers[start:stop], len(buffers)).tensors if buffers else {}
    by_size = sorted(stored.items(), key=lambda item: -ITEM_BYTES[item[1].dtype])
    first = [item for item in by_size if ITEM_BYTES[item[1].dtype] > _PARAMETER_BYTES]
    last = by_size[len(first) :]
    metadata = {**model.facts, _BUFFERS: json.dumps([name for name, _ in by_size])}
    parameters = [(tensor.name, "F32", tensor.shape) for tensor in model.layout.tensors]
    file.write(file_header([*_listed(first), *parameters, *_listed(last)], metadata))
    sha256 = hashlib.sha256()
    file.writelines(_values(first, buffers))
    for block in (block for digest in model.blobs for block in client.read_blob(digest)):
        sha256.update(block)
        file.write(block)
    file.writelines(_values(last, buffers))
    return sha256.hexdigest()


def _listed(tensors: Iterable[tuple[str, StoredTensor]]) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(name, tensor.dtype, tensor.shape) for name, tensor in tensors]


def _values(tensors: Iterable[tuple[str, StoredTensor]], buffers: bytes) -> Iterator[bytes]:
    return (buffers[tensor.start : tensor.stop] for _, tensor in tensors)


def file_digest(path: Path) -> str:
    """The parameters digest of an exported file, computed from what is in it."""
    with safe_open(path, "numpy") as file:
        buffers = set(json.loads((file.metadata() or {}).get(_BUFFERS, "[]")))
        names = sorted(name for name in file.keys() if name not in buffers)  # noqa: SIM118  # not a dict
        return parameters_digest(file.get_tensor(name) for name in names)
