"""The trained model as a safetensors file, in the memory of one block."""

import hashlib
import json
import secrets
from pathlib import Path

from safetensors.numpy import load_file

from algorithms.codec import parameters_digest
from algorithms.layout import ParameterLayout
from api.client import CoordinatorClient
from api.errors import IsthmusError

__all__ = ["export_model", "file_digest"]


def export_model(client: CoordinatorClient, run: str, path: Path) -> str:
    """Writes the parameters of a run that succeeded, fp32 by canonical name; returns their digest.

    Raises:
        ProblemError: the run has not succeeded.
        IsthmusError: the coordinator's blobs are not the parameters that the sites ended with.
    """
    model = client.model(run)
    metadata = {"run": run, "step": str(model.step), "digest": model.digest}
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        sha256 = hashlib.sha256()
        with draft.open("wb") as file:
            file.write(_header(ParameterLayout.from_json(model.layout), metadata))
            for digest in model.blobs:
                for block in client.read_blob(digest):
                    sha256.update(block)
                    file.write(block)
        if sha256.hexdigest() != model.digest:
            raise IsthmusError(f"the stored parameters of run {run} are not those that its sites ended with")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return model.digest


def _header(layout: ParameterLayout, metadata: dict[str, str]) -> bytes:
    """What is before the parameters in a safetensors file; they follow in the order of the layout."""
    header: dict[str, object] = {"__metadata__": metadata}
    for tensor, offset in zip(layout.tensors, layout.offsets, strict=False):
        place = [4 * offset, 4 * (offset + tensor.elements)]
        header[tensor.name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": place}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def file_digest(path: Path) -> str:
    """The parameters digest of an exported file, computed from what is in it."""
    tensors = load_file(path)
    return parameters_digest(tensors[name] for name in sorted(tensors))
