"""Train a small ResNet whose images are cut into bands of rows, beside the same model on one device.

    python examples/resnet.py [--ranks 2] [--steps 6]

A pin asks for the cut: each rank holds half of the rows of every image, and neighbours exchange the rows that the
filters reach over. Batch norm counts the whole batch, so its statistics are those of one device too.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from local_ranks import compare, launch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar

BANDS = {"input:images": "S2", "*/convolution#*": "S2"}  # dim 2 of an image is its height


class Block(nn.Module):
    """Two convolutions with batch norm, around a shortcut."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.second, self.norm2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.shortcut = nn.Identity() if channels == out else nn.Conv2d(channels, out, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.second(torch.relu(self.norm1(self.first(x)))))
        return torch.relu(y + self.shortcut(x))


class SmallResNet(nn.Module):
    """Three blocks; `forward(images, labels)` is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 1, 1)
        self.blocks = nn.Sequential(Block(16, 16, 1), Block(16, 32, 2), Block(32, 32, 1))
        self.head = nn.Linear(32, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        features = self.blocks(self.stem(images)).mean((2, 3))
        return nn.functional.cross_entropy(self.head(features), labels)


def batches(steps: int) -> list[dict[str, torch.Tensor]]:
    random = torch.Generator().manual_seed(0)
    return [
        {"images": torch.randn(8, 3, 32, 32, generator=random), "labels": torch.randint(10, (8,), generator=random)}
        for _ in range(steps)
    ]


def make_model() -> SmallResNet:
    torch.manual_seed(0)
    return SmallResNet()


def train(model: nn.Module, steps: int) -> tuple[list[float], torch.Tensor]:
    """Losses, and the running variance of the last norm."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for batch in batches(steps):
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, dict(model.named_buffers())["blocks.2.norm2.running_var"].clone()


def run(ranks: int, steps: int) -> tuple[str, list[float], torch.Tensor]:
    """On each rank."""
    mesh = init_device_mesh("cpu", (ranks,))
    pmodel = autopar.compile(make_model(), mesh, example_inputs=batches(1)[0], constraints=BANDS)
    losses, variance = train(pmodel, steps)
    return pmodel.plan.explain("input:images"), losses, variance


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train a ResNet cut in space.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    chosen = parser.parse_args(arguments)
    layout, together, variance = launch(run, chosen.ranks, chosen.ranks, chosen.steps)
    print(layout)
    alone, expected = train(make_model(), chosen.steps)
    compare(alone, together, limit=1e-4)
    print(f"running variance, largest difference: {(variance - expected).abs().max():.1e}")


if __name__ == "__main__":
    main()
