"""What `torch.compile` leaves alone, and that nobody pays for the compiler who does not use it."""

import subprocess
import sys

import torch

from algorithms.eager import eager
from tests.conftest import ROOT

SCRIPT = """
import sys
import torch
from torch import nn
import site_agent.session
from algorithms import DeMo

model = nn.Linear(24, 16)
optimizer = DeMo(model.parameters(), lr=1e-3)
before = model.weight.detach().clone()
for _ in range(2):
    model(torch.ones(4, 24)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
assert not torch.equal(model.weight, before)
assert model.weight.grad is None
assert "torch._dynamo" not in sys.modules
"""


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


def test_training_imports_no_compiler():
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
