"""Headers of safetensors files, against safetensors itself."""

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from algorithms.tensor_file import as_floats, file_header, read_header

TENSORS = {
    "b": torch.arange(3, dtype=torch.int64),
    "a": torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16),
    "f": torch.tensor([0.5, 7.0], dtype=torch.float16),
    "d": torch.tensor(3.25, dtype=torch.float64),
    "e": torch.zeros(0, 4),
    "g": torch.tensor([True, False]),
}


def read(body):
    return read_header(lambda start, stop: body[start:stop], len(body))


def test_reads_what_safetensors_wrote():
    body = save(TENSORS, metadata={"who": "us"})
    file = read(body)
    assert file.metadata == {"who": "us"}
    assert {name: tensor.shape for name, tensor in file.tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in TENSORS.items()
    }
    for name in ("a", "f", "d", "e"):
        found = file.tensors[name]
        values = as_floats(body[found.start : found.stop], found.dtype)
        np.testing.assert_array_equal(values.astype(np.float64), TENSORS[name].double().numpy().reshape(-1))
    with pytest.raises(ValueError, match="I64 is not read as floating point"):
        as_floats(b"", "I64")


def test_safetensors_reads_what_is_written():
    body = save(TENSORS)
    file = read(body)
    order = [(name, tensor.dtype, tensor.shape) for name, tensor in file.tensors.items()]
    again = file_header(order, {}) + b"".join(body[one.start : one.stop] for one in file.tensors.values())
    assert {name: tensor.tolist() for name, tensor in load(again).items()} == {
        name: tensor.tolist() for name, tensor in TENSORS.items()
    }


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "length is out of range"),
        (b"\xff" * 8 + b"{}", "length is out of range"),
        ((2).to_bytes(8, "little") + b"[]", "header is damaged"),
        ((3).to_bytes(8, "little") + b"{x}", "header is damaged"),
        (file_header([("w", "F32", (2,))], {}) + bytes(7), "'w' has not the bytes"),
        (file_header([("w", "F32", (2,))], {}).replace(b"F32", b"F99") + bytes(8), "type 'F99', which is not known"),
        (file_header([("w", "F32", (2,))], {}).replace(b"[2]", b"[3]") + bytes(8), "'w' has not the bytes"),
        (file_header([("w", "F32", (2,))], {}).replace(b'"shape"', b'"shapo"') + bytes(8), "header is damaged"),
    ],
)
def test_what_is_no_such_file_is_a_value_error(body, message):
    with pytest.raises(ValueError, match=message):
        read(body)
