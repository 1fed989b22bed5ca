"""Train a mixture of experts whose tokens travel to the ranks that hold their experts, beside one device.

    python examples/moe.py [--ranks 2] [--steps 6]

Afterwards: how many tokens each expert got, and where the experts would stand best.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from local_ranks import compare, launch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.nn import Experts, MixtureOfExperts, TopKGate

WIDTH, EXPERTS = 32, 8
BY_ALL_TO_ALL = {"*/autopar.experts*": "A"}  # leave it out, and the search decides by price


class ExpertModel(nn.Module):
    """A layer of experts around a residual connection; `forward(ids, labels)` is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(64, WIDTH), nn.Linear(WIDTH, 64)
        self.mixture = MixtureOfExperts(TopKGate(WIDTH, EXPERTS), Experts(EXPERTS, WIDTH, 2 * WIDTH))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        moved, balance = self.mixture(x)
        return nn.functional.cross_entropy(self.head(x + moved).flatten(0, 1), labels.flatten()) + 0.01 * balance


def batches(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The label of a token is the next number."""
    random = torch.Generator().manual_seed(0)
    ids = [torch.randint(64, (16, 8), generator=random) for _ in range(steps)]
    return [(item, (item + 1) % 64) for item in ids]


def make_model() -> ExpertModel:
    torch.manual_seed(0)
    return ExpertModel()


def train(model: nn.Module, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for ids, labels in batches(steps):
        loss = model(ids, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def run(ranks: int, steps: int) -> tuple[list[float], list[int]]:
    """On each rank."""
    mesh = init_device_mesh("cpu", (ranks,))
    inputs = batches(1)[0]
    pmodel = autopar.compile(make_model(), mesh, example_inputs=inputs, constraints=BY_ALL_TO_ALL)
    losses = train(pmodel, steps)
    return losses, pmodel.expert_load.matrix[0].tolist()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train a mixture of experts.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    chosen = parser.parse_args(arguments)
    together, load = launch(run, chosen.ranks, chosen.ranks, chosen.steps)
    compare(train(make_model(), chosen.steps), together)
    print(f"tokens by expert: {load}")
    print(autopar.search.place_experts([load], (1, chosen.ranks), time_limit_s=2.0))


if __name__ == "__main__":
    main()
