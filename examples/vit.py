"""Train a small vision transformer on two local ranks, beside the same model on one device.

    python examples/vit.py [--ranks 2] [--steps 8]

The images are made here: a stripe, upright or lying, in noise. The model is plain PyTorch (`nn.TransformerEncoder`),
and knows nothing of ranks.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from local_ranks import compare, launch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar

SIZE, PATCH, WIDTH = 32, 8, 64


class VisionTransformer(nn.Module):
    """Patches, two encoder layers, the mean of all tokens; `forward(images, labels)` is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, stride=PATCH)
        self.positions = nn.Parameter(0.02 * torch.randn((SIZE // PATCH) ** 2, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        return nn.functional.cross_entropy(self.head(self.encoder(tokens).mean(1)), labels)


def batches(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A batch of 32 for each step, the same on every rank."""
    random = torch.Generator().manual_seed(0)
    made = []
    for _ in range(steps):
        labels = torch.randint(2, (32,), generator=random)
        images = 0.3 * torch.randn(32, 3, SIZE, SIZE, generator=random)
        images[labels == 0, :, :, 12:20] += 1
        images[labels == 1, :, 12:20, :] += 1
        made.append((images, labels))
    return made


def make_model() -> VisionTransformer:
    torch.manual_seed(0)
    return VisionTransformer()


def train(model: nn.Module, steps: int) -> list[float]:
    """The loop that a user already has."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for images, labels in batches(steps):
        loss = model(images, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def run(ranks: int, steps: int) -> tuple[str, list[float]]:
    """On each rank."""
    mesh = init_device_mesh("cpu", (ranks,))
    # Something to see: so small a model the search would rather run whole on every rank, and rightly so.
    pmodel = autopar.compile(make_model(), mesh, example_inputs=batches(1)[0], search="fsdp")
    return str(pmodel.plan), train(pmodel, steps)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train a vision transformer on local ranks.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    chosen = parser.parse_args(arguments)
    plan, together = launch(run, chosen.ranks, chosen.ranks, chosen.steps)
    print(plan)
    compare(train(make_model(), chosen.steps), together)


if __name__ == "__main__":
    main()
