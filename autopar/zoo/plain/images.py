"""Pictures, videos, waves and points: convolution, pooling, resampling, transforms."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.zoo.plain.computed import BATCH, Computed, Made, normal, weight


def conv_net() -> Made:
    """Depthwise, grouped, dilated and strided convolutions; batch, group and instance norm; every pooling."""
    body = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU6(),
        nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.Conv2d(16, 32, 1), nn.GroupNorm(4, 32), nn.Hardswish(),
        nn.Conv2d(32, 32, 3, padding=2, dilation=2, groups=4), nn.InstanceNorm2d(32, affine=True), nn.LeakyReLU(0.1),
        nn.MaxPool2d(2), nn.Conv2d(32, 32, 5, stride=2, padding=2, padding_mode="reflect"), nn.AvgPool2d(3, 1, 1),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip
    return body, (normal(BATCH, 3, 16, 16),)


def unet() -> Made:
    """Skip connections over pooling, transposed convolution and bilinear upsampling."""

    def compute(self: Any, x: Tensor) -> Any:
        first = self.down(x).relu()
        second = self.deep(F.max_pool2d(first, 2)).relu()
        third = self.deepest(F.max_pool2d(second, 2)).relu()
        up = torch.cat([self.up(third), second], 1)
        up = F.interpolate(self.merge(up).relu(), scale_factor=2, mode="bilinear", align_corners=False)
        return F.mse_loss(self.out(torch.cat([up, first], 1)), x)

    model = Computed(
        compute, down=nn.Conv2d(3, 8, 3, padding=1), deep=nn.Conv2d(8, 16, 3, padding=1), out=nn.Conv2d(16, 3, 1),
        deepest=nn.Conv2d(16, 32, 3, padding=1), up=nn.ConvTranspose2d(32, 16, 2, 2),
        merge=nn.Conv2d(32, 8, 3, padding=1),
    )  # fmt: skip
    return model, (normal(BATCH, 3, 16, 16),)


def upscaler() -> Made:
    """Pixel shuffle and nearest upsampling, PReLU, an L1 loss, reflection and replication padding."""

    def compute(self: Any, x: Tensor, target: Tensor) -> Any:
        hidden = self.act(self.first(F.pad(x, (1, 1, 1, 1), mode="reflect")))
        fine = F.pixel_shuffle(self.last(F.pad(hidden, (1, 1, 1, 1), mode="replicate")), 2)
        return F.l1_loss(fine + F.interpolate(x, scale_factor=2, mode="nearest"), target)

    model = Computed(compute, first=nn.Conv2d(3, 8, 3), last=nn.Conv2d(8, 12, 3), act=nn.PReLU(8))
    return model, (normal(BATCH, 3, 8, 8), normal(BATCH, 3, 16, 16, seed=1))


def wavenet() -> Made:
    """Causal dilated convolutions in one dim with gates and weight norm."""

    def compute(self: Any, x: Tensor) -> Any:
        skip = torch.zeros(())
        for index, layer in enumerate(self.layers):
            wide = F.pad(x, (2 * 2**index, 0))
            value, gate = layer(wide).chunk(2, 1)
            x = x + value.tanh() * gate.sigmoid()
            skip = skip + x
        return self.head(skip.relu())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        layers = [nn.utils.weight_norm(nn.Conv1d(8, 16, 3, dilation=2**index)) for index in range(3)]
    return Computed(compute, layers=nn.ModuleList(layers), head=nn.Conv1d(8, 4, 1)), (normal(BATCH, 8, 32),)


def video_net() -> Made:
    """Three-dimensional convolution and pooling, max over time."""
    body = nn.Sequential(
        nn.Conv3d(3, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ELU(), nn.MaxPool3d(2), nn.Conv3d(8, 8, 3, padding=1),
        nn.AdaptiveMaxPool3d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip
    return body, (normal(BATCH, 3, 4, 8, 8),)


def diffusion_transformer() -> Made:
    """Patches, a sinusoidal time embedding, adaptive layer norm with gates, attention, a weighted squared error."""

    def compute(self: Any, image: Tensor, time: Tensor, noise: Tensor) -> Any:
        angle = time[:, None] * torch.exp(-math.log(1e4) * torch.arange(8) / 8)
        condition = self.time(torch.cat([angle.cos(), angle.sin()], -1))
        noisy = image * time.view(-1, 1, 1, 1) + noise * (1 - time.view(-1, 1, 1, 1))
        patches = noisy.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
        x = self.patch(patches) + self.position
        shift, scale, gate = self.modulate(F.silu(condition)).unsqueeze(1).chunk(3, -1)
        hidden = F.layer_norm(x, (32,)) * (1 + scale) + shift
        q, k, v = self.qkv(hidden).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        x = x + gate * self.merge(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        found = self.out(x).view(-1, 4, 4, 3, 4, 4).permute(0, 3, 1, 4, 2, 5).reshape(image.shape)
        return ((found - (image - noise)).square().mean((1, 2, 3)) * (1 + time)).mean()

    members = {
        "patch": nn.Linear(48, 32), "position": weight(1, 16, 32), "time": nn.Linear(16, 32), "qkv": nn.Linear(32, 96),
        "modulate": nn.Linear(32, 96), "merge": nn.Linear(32, 32), "out": nn.Linear(32, 48),
    }  # fmt: skip
    inputs = (normal(BATCH, 3, 16, 16), torch.linspace(0.1, 0.9, BATCH), normal(BATCH, 3, 16, 16, seed=1))
    return Computed(compute, **members), inputs


def fourier_operator() -> Made:
    """A Fourier neural operator: real transforms in two dims, complex weights on the lowest frequencies."""

    def compute(self: Any, x: Tensor) -> Any:
        hidden = self.lift(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        spectrum = torch.fft.rfft2(hidden)
        low = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :4, :3], torch.view_as_complex(self.modes))
        filtered = F.pad(low, (0, spectrum.shape[-1] - 3, 0, spectrum.shape[-2] - 4))
        hidden = F.gelu(torch.fft.irfft2(filtered, s=hidden.shape[-2:]) + self.skip(hidden))
        return (torch.fft.fft(hidden, dim=1).abs() ** 2).mean() + hidden.square().mean()

    members = {"lift": nn.Linear(3, 8), "modes": weight(8, 8, 4, 3, 2), "skip": nn.Conv2d(8, 8, 1)}
    return Computed(compute, **members), (normal(BATCH, 3, 8, 8),)


def spatial_transformer() -> Made:
    """An affine grid that the model predicts, sampled bilinearly; unfold and fold."""

    def compute(self: Any, x: Tensor) -> Any:
        matrix = self.locate(x.flatten(1)).view(-1, 2, 3) * 0.1 + torch.eye(2, 3)
        seen = F.grid_sample(x, F.affine_grid(matrix, list(x.shape), align_corners=False), align_corners=False)
        columns = F.unfold(seen, 3, padding=1) * self.scale[:, None]
        return self.head(F.fold(columns, (8, 8), 3, padding=1).flatten(1))

    members = {"locate": nn.Linear(192, 6), "scale": weight(27), "head": nn.Linear(192, 4)}
    return Computed(compute, **members), (normal(BATCH, 3, 8, 8),)


def neighbours() -> Made:
    """A point net: the nearest neighbours by distance, gathered edges, a max over them; spectral norm."""

    def compute(self: Any, points: Tensor) -> Any:
        near = torch.cdist(points, points).topk(3, -1, largest=False).indices
        batch = torch.arange(points.shape[0])[:, None, None]
        edges = torch.cat([points.unsqueeze(2).expand(-1, -1, 3, -1), points[batch, near] - points.unsqueeze(2)], -1)
        return self.head(self.edge(edges).relu().amax(2)).mean(1)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        edge = nn.utils.spectral_norm(nn.Linear(6, 16))
    return Computed(compute, edge=edge, head=nn.Linear(16, 4)), (normal(BATCH, 10, 3),)
