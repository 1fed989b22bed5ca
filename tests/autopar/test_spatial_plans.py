"""Images cut in space: models under plans that shard rows and columns, and the search that chooses such plans."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import autopar
from autopar.sharding.discovery.book import RuleBook
from autopar.sharding.op_call import OpCall
from autopar.sharding.rule import Rule
from autopar.sharding.rules.spatial import HALO
from tests.autopar.models import MODELS, Made
from tests.autopar.parity import Gaps, adam, train_beside
from tests.gloo import run_on_ranks


class Block(nn.Sequential):
    def __init__(self, inside: int, outside: int, stride: int = 1) -> None:
        convolution = nn.Conv2d(inside, outside, 3, stride, 1, padding_mode="reflect" if stride == 1 else "zeros")
        super().__init__(convolution, nn.GroupNorm(2, outside), nn.SiLU())


class UNet(nn.Module):
    """Three levels with skip connections, every way down and up, and every norm of images."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.enter, self.across = Block(3, width), Block(width, width)
        self.down, self.lower = Block(width, 2 * width, 2), nn.Conv2d(2 * width, 2 * width, 3, padding=2, dilation=2)
        self.batch, self.instance = nn.BatchNorm2d(2 * width), nn.InstanceNorm2d(2 * width, affine=True)
        self.depthwise = nn.Conv2d(2 * width, 2 * width, 5, padding=2, groups=2 * width, bias=False)
        self.up = nn.ConvTranspose2d(2 * width, width, 4, 2, 1)
        self.leave = nn.Conv2d(4 * width, 3, 3, padding=1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        top = self.across(self.enter(image))
        middle = self.batch(self.lower(self.down(top)))
        low = self.instance(self.depthwise(F.max_pool2d(middle, 3, 2, 1)))
        middle = middle + F.interpolate(low, scale_factor=2, mode="bilinear")
        up = F.interpolate(middle, scale_factor=2, mode="nearest")
        wide = torch.cat([self.up(middle), up, F.avg_pool2d(top, 3, 1, 1)], 1)
        return F.mse_loss(self.leave(wide), image)


def u_net() -> Made:
    torch.manual_seed(0)
    return UNet().train(), {"image": torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))}


def cut_in(made: Made, mesh_shape: tuple[int, ...], layout: str) -> autopar.Plan:
    """The plan with every image and every convolution of `layout`, verified; its memory, held against what is used."""
    model, inputs = made
    mesh = autopar.Mesh(mesh_shape, hardware="cpu")
    pins = {"input:image" if "image" in inputs else "input:pixel_values": layout, "*/convolution#*": layout}
    plan = autopar.make_plan(model, mesh, example_inputs=inputs, constraints=pins)
    report = autopar.verify(model, mesh, example_inputs=inputs, plan=plan)
    assert report.ok, report.table
    run = autopar.run_virtual(model, mesh, example_inputs=inputs, plan=plan)
    assert max(run.peak_bytes) <= plan.peak_bytes
    return plan


@pytest.mark.parametrize(
    "mesh_shape, layout",
    [
        pytest.param((2,), "S2", marks=pytest.mark.slow),
        pytest.param((4,), "S3", marks=pytest.mark.slow),
        ((2, 2), "S2,S3"),
    ],
)
def test_a_u_net_cut_in_space_computes_what_one_device_computes(mesh_shape: tuple[int, ...], layout: str) -> None:
    cut_in(u_net(), mesh_shape, layout)


@pytest.mark.slow
@pytest.mark.parametrize("mesh_shape, layout", [((2,), "S3"), ((4,), "S2"), ((2, 2), "S0,S2")])
def test_a_residual_network_cut_in_space_computes_what_one_device_computes(
    mesh_shape: tuple[int, ...], layout: str
) -> None:
    cut_in(MODELS["resnet"](), mesh_shape, layout)


def train() -> tuple[str, Gaps]:
    """On real ranks: the halos travel through gloo."""
    model, inputs = u_net()
    pins = {"input:image": "S2", "*/convolution#*": "S2"}
    pmodel = autopar.compile(model, init_device_mesh("cpu", (2,)), example_inputs=inputs, constraints=pins)
    assert isinstance(pmodel.plan, autopar.Plan)
    return pmodel.plan.hash, train_beside(pmodel, adam(pmodel), (model, inputs), steps=2)


@pytest.mark.slow
def test_a_u_net_cut_in_space_trains_on_real_ranks_as_on_one_device() -> None:
    first, second = run_on_ranks(train, 2)
    assert first == second
    gaps = first[1]
    assert max(gaps.losses) <= 1e-5, gaps
    assert gaps.gradient <= 1e-4, gaps


EVERY_RULE = RuleBook.rules_of


def without_halos(self: RuleBook, call: OpCall) -> tuple[Rule, ...]:
    return tuple(rule for rule in EVERY_RULE(self, call) if rule.form != HALO)


def test_for_one_large_image_the_search_cuts_space_and_is_faster_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model, image = UNet(64), torch.empty(1, 3, 1024, 1024)
    mesh = autopar.Mesh((4,), hardware="h100")
    plan = autopar.make_plan(model, mesh, example_inputs=(image,))
    layouts = {entry.outputs[0] for entry in plan.entries if "/convolution#" in entry.key}
    assert layouts & {(torch.distributed.tensor.Shard(dim),) for dim in (2, 3)}
    monkeypatch.setattr(RuleBook, "rules_of", without_halos)
    channels = autopar.make_plan(model, mesh, example_inputs=(image,))
    assert plan.step_s < channels.step_s
