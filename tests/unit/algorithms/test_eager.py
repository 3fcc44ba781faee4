"""What `torch.compile` leaves alone."""

import torch

from algorithms.eager import eager


def test_a_compiled_function_runs_it_as_it_is():
    seen = []

    @eager
    def inner(x):
        seen.append((torch.compiler.is_compiling(), type(x)))
        return x + 1

    outer = torch.compile(lambda x: inner(x * 2) * 3, backend="eager")
    for _ in range(3):
        assert torch.equal(outer(torch.ones(3)), torch.full((3,), 9.0))
    assert seen == [(False, torch.Tensor)] * 3
    assert inner.__name__ == "inner"
