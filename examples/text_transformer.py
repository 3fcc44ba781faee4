"""A small transformer on the text that comes with Python, trained with DeMo and with AdamW.

    python -m examples.text_transformer

Prints the held-out loss of both, in nats per byte, and those of two simple models of the same text.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from algorithms import DeMo
from algorithms.schedule import learning_rate
from examples.tiny_lm.data import Corpus, bigram_loss, even_crops, load_corpus, random_crops, unigram_loss
from examples.tiny_lm.model import build_model

STEPS = 400
WARMUP = 20
BATCH = 16
CONTEXT = 64
HELD_OUT_SEQUENCES = 128
GRADIENT_NORM = 1.0

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def train(corpus: Corpus, held_out: Tensor, make_optimizer: MakeOptimizer, steps: int = STEPS) -> float:
    """The held-out loss after training; the rate rises for a few steps and then falls to a tenth."""
    model = build_model(0, context=CONTEXT, width=64, layers=2, heads=4)
    optimizer = make_optimizer(model)
    schedule = LambdaLR(
        optimizer, lambda done: learning_rate(done + 1, lr=1, steps=steps, warmup=WARMUP, schedule="linear")
    )
    for _, batch in zip(range(steps), random_crops(corpus.training, BATCH, CONTEXT, seed=0), strict=False):
        loss = model(torch.from_numpy(batch))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM)
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return model(held_out).item()


# Each with the better of a few rates: 3e-3 and 5e-3, 3e-3 and 4e-3.
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.95)),
    "DeMo": lambda model: DeMo(model.named_parameters(), lr=4e-3, k=512, beta=0.9),
}


def main() -> None:
    torch.set_num_threads(1)
    corpus = load_corpus(None, CONTEXT)
    sequences = even_crops(corpus.held_out, HELD_OUT_SEQUENCES, CONTEXT)
    simple = unigram_loss(corpus.training, sequences), bigram_loss(corpus.training, sequences)
    print("unigrams {:.3f}, bigrams {:.3f}".format(*simple))
    losses = {}
    for name, make_optimizer in OPTIMIZERS.items():
        losses[name] = train(corpus, torch.from_numpy(sequences), make_optimizer)
        print(f"{name:6} held-out loss {losses[name]:.3f} nats per byte")
    print(f"margin {losses['DeMo'] / losses['AdamW'] - 1:+.1%}, {STEPS} steps")


if __name__ == "__main__":
    main()
