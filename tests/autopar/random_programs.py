"""Random small models, and random valid plans for them: every plan must compute what the model does."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from autopar.planner.build import PlanningProblem
from autopar.search import FORBIDDEN

WIDTH, HEADS, BATCH, SEQUENCE = 8, 4, 4, 6
Layer = Callable[[], nn.Module]


class Attention(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.qkv, self.causal = nn.Linear(WIDTH, 3 * WIDTH), causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(x).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(*parts, is_causal=self.causal).transpose(1, 2).flatten(-2)


class Function(nn.Module):
    def __init__(self, name: str, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.name, self.function = name, function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)

    def extra_repr(self) -> str:
        return self.name


class ChannelNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Convolution(nn.Module):
    def __init__(self, groups: int) -> None:
        super().__init__()
        self.filter = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=groups)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.filter(x.transpose(1, 2)).transpose(1, 2)


class Pyramid(nn.Module):
    """Down and up again along the sequence, as a U-Net does."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv1d(WIDTH, WIDTH, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(2, WIDTH)
        self.up = nn.ConvTranspose1d(WIDTH, WIDTH, 4, stride=2, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = self.norm(self.down(F.pad(x.transpose(1, 2), (2, 2), mode="reflect")))[..., 1:4]
        return (self.up(low) + F.interpolate(low, scale_factor=2, mode="linear")).transpose(1, 2)


class Pools(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.transpose(1, 2)
        return (F.max_pool1d(rows, 3, 1, 1) - F.avg_pool1d(rows, 3, 1, 1)).transpose(1, 2)


def function(name: str, body: Callable[[torch.Tensor], torch.Tensor]) -> Layer:
    return lambda: Function(name, body)


LAYERS: dict[str, Layer] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "mlp": lambda: nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "rms norm": lambda: nn.RMSNorm(WIDTH),
    "attention": lambda: Attention(False),
    "causal attention": lambda: Attention(True),
    "batch norm": ChannelNorm,
    "convolution": lambda: Convolution(1),
    "grouped convolution": lambda: Convolution(4),
    "pyramid": Pyramid,
    "pools": Pools,
    "dropout": lambda: nn.Dropout(0.3),
    "softmax": lambda: nn.Softmax(-1),
    "softmax over the sequence": lambda: nn.Softmax(1),
    "silu": nn.SiLU,
    "flatten and back": function("view", lambda x: x.flatten(1).unflatten(1, (SEQUENCE, WIDTH)) * 2),
    "heads": function(
        "heads", lambda x: x.unflatten(-1, (2, 4)).transpose(1, 2).softmax(-2).transpose(1, 2).flatten(-2)
    ),
    "centre": function("centre", lambda x: x - x.mean(-1, keepdim=True)),
    "centre over the batch": function("centre0", lambda x: x - x.mean(0, keepdim=True)),
    "scale by maximum": function("max", lambda x: x / (1 + x.abs().amax(1, keepdim=True))),
    "split and join": function("cat", lambda x: torch.cat(tuple(reversed(x.chunk(2, -1))), -1)),
    "shift": function("shift", lambda x: F.pad(x, (0, 0, 1, 0))[:, :-1]),
    "gram": function("gram", lambda x: (x @ x.transpose(1, 2)) @ x / 8),
    "einsum": function("einsum", lambda x: torch.einsum("bsw,btw->bst", x, x).tanh() @ x),
    "cumulative sum": function("cumsum", lambda x: x.cumsum(1) / 4),
    "where": function("where", lambda x: torch.where(x > 0, x, 0.1 * x)),
}


class RandomModel(nn.Module):
    """Embedding, layers with residuals, tied or separate head, cross-entropy."""

    def __init__(self, names: list[str], residual: bool, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList(LAYERS[name]() for name in names)
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.residual = residual
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x) if self.residual else layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def random_choice(planning: PlanningProblem, source: random.Random) -> tuple[int, ...]:
    """A uniformly drawn strategy for every decision, among those that its inputs can be moved to."""
    incoming: list[list[tuple[int, int]]] = [[] for _ in planning.decisions]
    for edge, (first, second) in enumerate(planning.problem.edges):
        incoming[second].append((first, edge))
    choice: list[int] = []
    for index, decision in enumerate(planning.decisions):
        open_ = [
            pick
            for pick in range(len(decision.strategies))
            if planning.problem.costs[index][pick] < FORBIDDEN
            and all(
                planning.problem.edge_costs[edge][choice[first], pick] < FORBIDDEN for first, edge in incoming[index]
            )
        ]
        choice.append(source.choice(open_))
    return tuple(choice)
