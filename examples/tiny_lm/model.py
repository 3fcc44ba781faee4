"""A decoder-only transformer over bytes: pre-norm, learned positions, the head tied to the embedding."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BYTES = 256


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (batch, context, width)
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))

    def attention(self, x: Tensor) -> Tensor:
        batch, context, width = x.shape
        parts = self.query_key_value(x).view(batch, context, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # each (batch, heads, context, width / heads)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.attention_out(mixed.transpose(1, 2).reshape(batch, context, width))


class TinyLM(nn.Module):
    def __init__(self, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, sequences: Tensor) -> Tensor:
        """The mean loss in nats per byte of predicting `sequences[:, 1:]`; sequences is (batch, up to context + 1)."""
        logits = self.logits(sequences[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), sequences[:, 1:].flatten())

    def logits(self, inputs: Tensor) -> Tensor:
        x = self.embedding(inputs) + self.positions.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embedding.weight)


def build_model(seed: int, *, context: int, width: int, layers: int, heads: int) -> TinyLM:
    """The same weights for the same seed; the global random state stays as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = TinyLM(context, width, layers, heads)
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                residual = name.endswith(("attention_out.weight", "mlp_out.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if residual else 0.02)
    return model
