"""A language model of transformer blocks for the examples that plan: `forward(ids, labels)` is its loss."""

from __future__ import annotations

import torch
from torch import nn


class Block(nn.Module):
    """Causal self-attention and a feed-forward network."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class TinyGPT(nn.Module):
    """As large as you say."""

    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4, vocabulary: int = 256) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.blocks(self.tokens(ids)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def gpt() -> tuple[TinyGPT, tuple[torch.Tensor, torch.Tensor]]:
    """A model and a batch, for `autopar plan tiny_gpt:gpt --mesh 2x2`."""
    ids = torch.randint(256, (8, 33), generator=torch.Generator().manual_seed(0))
    return TinyGPT(), (ids[:, :-1], ids[:, 1:])
