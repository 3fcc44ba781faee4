"""Trains the tiny language model as one site of an Isthmus run: what a user's own script looks like."""

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from site_agent import join

from .data import bigram_loss, even_crops, load_corpus, random_crops, unigram_loss
from .model import build_model
from .params import Params

HELD_OUT_SEQUENCES = 32
GRADIENT_NORM = 1.0


def held_out_loss(model: nn.Module, sequences: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        loss = model(sequences).item()
    model.train()
    return loss


def main() -> None:
    with join() as site:
        params = Params.from_dict(site.spec.params)
        torch.set_num_threads(params.threads)
        corpus = load_corpus(params.data, params.context)
        held_out = even_crops(corpus.held_out, HELD_OUT_SEQUENCES, params.context)

        shape = {"context": params.context, "width": params.width, "layers": params.layers, "heads": params.heads}
        plain = build_model(site.spec.seed, **shape).to(site.device)
        model = DistributedDataParallel(plain) if site.ranks > 1 else plain
        optimizer = site.optimizer(model)  # loads the weights that the run has reached

        held_out_on_device = torch.from_numpy(held_out).to(site.device)
        site.evaluate(lambda: held_out_loss(plain, held_out_on_device), every=site.spec.evaluate_every)
        site.log(
            unigram_loss=unigram_loss(corpus.training, held_out),
            bigram_loss=bigram_loss(corpus.training, held_out),
        )

        for batch in site.batches(random_crops(corpus.training, params.batch, params.context, site.seed)):
            loss = model(torch.from_numpy(batch).to(site.device))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM)
            optimizer.step()
            optimizer.zero_grad()
            site.log(loss=loss.item())


if __name__ == "__main__":
    main()
