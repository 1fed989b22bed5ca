"""Small models that between them hold every kind of value that phases pass to each other."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture.program import Program
from autopar.capture.trace import capture


class TinyMlp(nn.Module):
    """Two products and a loss inside."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))).square().mean()


class TinyTransformer(nn.Module):
    """Embedding, attention by hand, layer norm, tied head, cross-entropy."""

    def __init__(self, vocabulary: int = 14, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.embedding = nn.Embedding(vocabulary, width)
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(ids)
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5).softmax(-1)
        x = x + self.out((scores @ v).transpose(1, 2).reshape(batch, length, width))
        logits = x @ self.embedding.weight.t()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class TinyConvNet(nn.Module):
    """Convolution and batch norm, whose buffers change; returns logits, the loss is outside."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm, self.head = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.convolution(x))).mean((2, 3)))


def model_and_inputs(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model in double precision, and one batch."""
    generator = torch.Generator().manual_seed(0)
    if name == "mlp":
        return TinyMlp().double(), (torch.randn(8, 6, generator=generator, dtype=torch.float64),)
    if name == "transformer":
        ids, labels = torch.randint(0, 14, (2, 4, 6), generator=generator)
        return TinyTransformer().double(), (ids, labels)
    return TinyConvNet().double(), (torch.randn(4, 2, 6, 6, generator=generator, dtype=torch.float64),)


@cache
def captured(name: str) -> tuple[nn.Module, tuple[Tensor, ...], Program]:
    """A model, its batch, and the program that they make."""
    model, inputs = model_and_inputs(name)
    return model, inputs, capture(model, inputs, {})
