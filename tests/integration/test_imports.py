"""A process of its own: nobody pays for the compiler who does not use it."""

import subprocess
import sys

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


def test_training_imports_no_compiler():
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
