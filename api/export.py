"""The trained model as a safetensors file."""

import hashlib
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

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
    layout = ParameterLayout.from_json(model.layout)
    data = b"".join(client.get_blob(digest) for digest in model.blobs)
    if hashlib.sha256(data).hexdigest() != model.digest:
        raise IsthmusError(f"the stored parameters of run {run} are not those that its sites ended with")
    flat = np.frombuffer(data, "<f4")
    tensors = {
        tensor.name: flat[offset : offset + tensor.elements].reshape(tensor.shape)
        for tensor, offset in zip(layout.tensors, layout.offsets, strict=False)
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.draft")
    save_file(tensors, draft, metadata={"run": run, "step": str(model.step), "digest": model.digest})
    draft.replace(path)
    return model.digest


def file_digest(path: Path) -> str:
    """The parameters digest of an exported file, computed from what is in it."""
    tensors = load_file(path)
    return parameters_digest(tensors[name] for name in sorted(tensors))
