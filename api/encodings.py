"""What a site uploads of a copy in an outer round in fewer bits, as bytes: for the site that writes and whoever reads.

Source: docs/decisions/0005-outer.md, section 4.
"""

import numpy as np
from numpy.typing import NDArray

from algorithms.codec import pack_contribution, unpack_contribution
from algorithms.coefficients import write_values
from algorithms.compression import PICKED, OuterCodec, decode
from algorithms.layout import ParameterLayout
from algorithms.updates import SparseUpdate
from api.payload import decode_message, encode_message

__all__ = ["coefficients_message", "read_coefficients", "read_encoding", "write_coefficients"]

_KIND = "coefficients"


def coefficients_message(picked: SparseUpdate | None, layout: ParameterLayout, k: int) -> bytes:
    """The k largest coefficients of each chunk of a fragment, whose layout this is; None: of values not finite."""
    header = {"k": k, "finite": picked is not None}
    arrays = {} if picked is None else pack_contribution(picked, layout, PICKED, "compact")
    return encode_message(_KIND, header, arrays)


def read_coefficients(body: bytes, k: int, layout: ParameterLayout) -> SparseUpdate | None:
    """The inverse, from an untrusted source. Raises ValueError, with the reason."""
    header, arrays = decode_message(_KIND, body)
    if header == {"k": k, "finite": True}:
        return unpack_contribution(arrays, layout, codec=PICKED, k=k, absent=(), indices="compact")
    if header != {"k": k, "finite": False} or arrays:
        raise ValueError(f"it says {header} and has {len(arrays)} arrays, the run has k = {k}")
    return None


def write_coefficients(picked: SparseUpdate | None, layout: ParameterLayout, values: NDArray[np.float32]) -> None:
    """Sets flat values, which may be mapped from a file, to what coefficients say; all to NaN, if they say nothing."""
    if picked is None:
        values[:] = np.nan
    else:
        write_values(picked, layout, values)


def read_encoding(body: bytes, codec: OuterCodec, k: int, layout: ParameterLayout) -> NDArray[np.float32]:
    """The pseudo-gradient that an encoding stands for, flat; it may be not finite.

    Raises ValueError, with the reason, if it is no encoding by that codec of a fragment of this layout.
    """
    if codec == "fp32":
        raise ValueError("with fp32 a copy is uploaded as it is")
    if codec != "topk":
        return decode(codec, np.frombuffer(body, np.uint8), layout.parameter_count)
    values = np.empty(layout.parameter_count, np.float32)
    write_coefficients(read_coefficients(body, k, layout), layout, values)
    return values
