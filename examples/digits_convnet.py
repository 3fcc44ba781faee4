"""A small convolutional network with BatchNorm on scikit-learn's digits, trained with DeMo and with AdamW.

    python -m examples.digits_convnet

Prints the accuracy of both on digits that neither has seen; it needs scikit-learn (`pip install -e '.[dev]'`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LinearLR

from algorithms import DeMo

STEPS = 500
BATCH = 64
SEEDS = (0, 1)

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


@dataclass(frozen=True)
class Digits:
    """1,797 images of 8 x 8, a quarter of them held out."""

    training: Tensor  # (1347, 1, 8, 8) float32, 0 to 1
    training_labels: Tensor  # (1347,) int64
    held_out: Tensor
    held_out_labels: Tensor


def load() -> Digits:
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    parts = train_test_split(images, labels, test_size=0.25, stratify=labels, random_state=0)
    training, held_out, training_labels, held_out_labels = map(torch.from_numpy, parts)
    return Digits(training, training_labels, held_out, held_out_labels)


def build_model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        *_normalised(1, 16),
        *_normalised(16, 32),
        nn.MaxPool2d(2),
        *_normalised(32, 32),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def _normalised(before: int, after: int) -> tuple[nn.Module, ...]:
    """Their running statistics are buffers: no gradient moves them, and the model is not whole without them."""
    return nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()


def train(digits: Digits, make_optimizer: MakeOptimizer, seed: int, steps: int = STEPS) -> float:
    """The accuracy on the held-out digits after training on random batches, the rate falling to zero."""
    model = build_model(seed)
    optimizer = make_optimizer(model)
    schedule = LinearLR(optimizer, 1.0, 0.0, steps)
    order = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        batch = torch.randint(len(digits.training), (BATCH,), generator=order)
        loss = F.cross_entropy(model(digits.training[batch]), digits.training_labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.eval()
    with torch.no_grad():
        right = model(digits.held_out).argmax(1) == digits.held_out_labels
    return right.float().mean().item()


# Each with a rate as good as the best of a few, by the accuracy on a fifth of the training digits.
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=5e-3),
    "DeMo": lambda model: DeMo(model.named_parameters(), lr=1e-2, k=128, beta=0.9),
}


def main() -> None:
    torch.set_num_threads(1)
    digits = load()
    accuracy = {}
    for name, make_optimizer in OPTIMIZERS.items():
        accuracy[name] = float(np.mean([train(digits, make_optimizer, seed) for seed in SEEDS]))
        print(f"{name:6} held-out accuracy {accuracy[name]:.2%}")
    print(f"margin {100 * (accuracy['DeMo'] - accuracy['AdamW']):+.2f} points, {STEPS} steps, {len(SEEDS)} seeds each")


if __name__ == "__main__":
    main()
