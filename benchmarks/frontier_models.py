"""The models of `memory_frontier.py`, without weights: a batch and a depth make a model and its inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Made = tuple[nn.Module, Any]


def vgg16(batch: int, depth: int = 1) -> Made:
    return _vgg(batch, tuple(depth * count for count in (2, 2, 3, 3, 3)))


def vgg19(batch: int, depth: int = 1) -> Made:
    return _vgg(batch, tuple(depth * count for count in (2, 2, 4, 4, 4)))


def _vgg(batch: int, counts: tuple[int, ...]) -> Made:
    """A block for every size of images."""
    blocks: list[nn.Module] = []
    width = 3
    for out, count in zip((64, 128, 256, 512, 512), counts, strict=True):
        layers: list[nn.Module] = []
        for _ in range(count):
            layers += [nn.Conv2d(width, out, 3, padding=1), nn.ReLU()]
            width = out
        blocks.append(nn.Sequential(*layers, nn.MaxPool2d(2)))
    head = [nn.Flatten(), nn.Linear(512 * 49, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000)]
    return nn.Sequential(*blocks, nn.Sequential(*head)), torch.empty(batch, 3, 224, 224, device="meta")


class Bottleneck(nn.Module):
    def __init__(self, width: int, inner: int, stride: int) -> None:
        super().__init__()
        out = 4 * inner
        self.body = nn.Sequential(
            nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(),
            nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(),
            nn.Conv2d(inner, out, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        plain = width == out and stride == 1
        down = [nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out)]
        self.shortcut = nn.Identity() if plain else nn.Sequential(*down)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet50(batch: int, depth: int = 1) -> Made:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    width = 64
    for inner, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for place in range(depth * count):
            layers.append(Bottleneck(width, inner, stride if place == 0 else 1))
            width = 4 * inner
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000))
    return model, torch.empty(batch, 3, 224, 224, device="meta")


def mobilenet(batch: int, depth: int = 1) -> Made:
    """The depthwise separable layers of MobileNet v1, a block for each two convolutions."""
    first = [nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    blocks: list[nn.Module] = [nn.Sequential(*first)]
    width = 32
    same = [(512, 1)] * 5
    for out, stride in ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *same, (1024, 2), (1024, 1)):
        for place in range(depth):
            blocks.append(_separable(width, out, stride if place == 0 else 1))
            width = out
    model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000))
    return model, torch.empty(batch, 3, 224, 224, device="meta")


def _separable(width: int, out: int, stride: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(width, width, 3, stride, 1, groups=width, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
        nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU(),
    )  # fmt: skip


class UNet(nn.Module):
    """Two convolutions at each size of images, or `depth` times as many."""

    def __init__(self, depth: int = 1, widths: tuple[int, ...] = (64, 128, 256, 512)) -> None:
        super().__init__()
        pairs = zip((3, *widths[:-1]), widths, strict=True)
        self.down = nn.ModuleList(self._convolutions(width, out, 2 * depth) for width, out in pairs)
        self.middle = self._convolutions(widths[-1], 2 * widths[-1], 2 * depth)
        ups = tuple(reversed(widths))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * width, width, 2, 2) for width in ups)
        self.merge = nn.ModuleList(self._convolutions(2 * width, width, 2 * depth) for width in ups)
        self.head = nn.Conv2d(widths[0], 2, 1)

    @staticmethod
    def _convolutions(width: int, out: int, count: int) -> nn.Module:
        layers: list[nn.Module] = []
        for place in range(count):
            layers += [nn.Conv2d(width if place == 0 else out, out, 3, padding=1), nn.ReLU()]
        return nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for layer in self.down:
            x = layer(x)
            skips.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = self.middle(x)
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], dim=1))
        found: Tensor = self.head(x)
        return found


def unet(batch: int, depth: int = 1) -> Made:
    return UNet(depth), torch.empty(batch, 3, 416, 608, device="meta")


def gpt2(batch: int, depth: int = 1) -> Made:
    import transformers

    model = transformers.GPT2Model(transformers.GPT2Config(use_cache=False, n_layer=6 * depth))
    return model, {"input_ids": torch.zeros(batch, 512, dtype=torch.long, device="meta")}


def llama(batch: int, depth: int = 1) -> Made:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=32_000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=6 * depth,
        num_attention_heads=16, num_key_value_heads=8, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaModel(config), {"input_ids": torch.zeros(batch, 512, dtype=torch.long, device="meta")}


MODELS: dict[str, tuple[Callable[..., Made], int]] = {
    "vgg16": (vgg16, 32),
    "vgg19": (vgg19, 32),
    "resnet50": (resnet50, 32),
    "unet": (unet, 8),
    "mobilenet": (mobilenet, 64),
    "gpt2": (gpt2, 8),
    "llama": (llama, 8),
}
"""By name: how to make the model, and a batch."""
