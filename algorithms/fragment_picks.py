"""The largest DCT coefficients of what a site wants to say about a fragment, by the code of momentum. Private to a site
(rule B10): whoever needs the same bits takes those of the site that uploaded.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from algorithms.compression import PICKED
from algorithms.layout import ParameterLayout
from algorithms.momentum import Ownership, encode
from algorithms.updates import SparseUpdate

__all__ = ["pick_largest"]


def pick_largest(values: NDArray[np.float32], layout: ParameterLayout, k: int) -> SparseUpdate:
    """The k largest coefficients of each chunk of finite flat values (parameter_count,), and all of small chunks."""
    ownership = Ownership(layout, range(layout.chunk_count))
    gradients = {
        index: torch.from_numpy(values[offset : offset + tensor.elements]).view(tensor.shape)
        for index, (offset, tensor) in enumerate(zip(layout.offsets, layout.tensors, strict=True))
    }
    momentum = {index: torch.zeros(size) for index, size in enumerate(ownership.sizes)}
    return encode(ownership, momentum, gradients, beta=0.0, k=k, codec=PICKED)
