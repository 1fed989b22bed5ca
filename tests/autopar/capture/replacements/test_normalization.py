"""Batch norm and instance norm in training equal PyTorch's: outputs, gradients, running statistics."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from autopar.capture.replacements.normalization import traceable_batch_norms
from tests.interception import Intercepted, assert_capture_matches_eager, targets_of

NORMS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "2d": (nn.BatchNorm2d(4), (6, 4, 5, 3)),
    "1d of features": (nn.BatchNorm1d(4), (6, 4)),
    "1d of sequences": (nn.BatchNorm1d(4), (6, 4, 5)),
    "3d": (nn.BatchNorm3d(4), (3, 4, 2, 3, 2)),
    "without weights": (nn.BatchNorm2d(4, affine=False), (6, 4, 5, 3)),
    "without running statistics": (nn.BatchNorm2d(4, track_running_stats=False), (6, 4, 5, 3)),
    "cumulative averages": (nn.BatchNorm2d(4, momentum=None), (6, 4, 5, 3)),
    "synchronized": (nn.SyncBatchNorm(4), (6, 4, 5, 3)),
    "instance": (nn.InstanceNorm2d(4), (6, 4, 5, 3)),
    "instance with weights and statistics": (nn.InstanceNorm1d(4, affine=True, track_running_stats=True), (6, 4, 5)),
}
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


class Scaled(nn.Module):
    """A norm behind a parameter, so that there is something to train."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.scale = norm, nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = self.norm(x * self.scale)
        return value


def gradients(model: nn.Module, x: Tensor, value: Tensor, grad: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(value, [x, *model.parameters()], grad))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", NORMS)
def test_two_steps_equal_pytorchs(name: str, dtype: torch.dtype, memory_format: torch.memory_format) -> None:
    module, shape = NORMS[name]
    x = torch.randn(shape, dtype=dtype) * 2 + 3
    if len(shape) == 4:
        x = x.contiguous(memory_format=memory_format)
    x.requires_grad_()
    eager, replaced = copy.deepcopy(module).to(dtype), copy.deepcopy(module).to(dtype)
    for _ in range(2):
        expected = eager(x)
        with Intercepted(), traceable_batch_norms(replaced):
            actual = replaced(x)
    grad = torch.randn_like(expected)
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype] * 10}
    torch.testing.assert_close(actual, expected, **close)
    assert actual.stride() == expected.stride()
    torch.testing.assert_close(gradients(replaced, x, actual, grad), gradients(eager, x, expected, grad), **close)
    torch.testing.assert_close(replaced.state_dict(), eager.state_dict(), **close)


@pytest.mark.parametrize("name", NORMS)
def test_captured_they_equal_pytorchs(name: str) -> None:
    module, shape = NORMS[name]
    program = assert_capture_matches_eager(Scaled(copy.deepcopy(module)), (torch.randn(shape),))
    assert "autopar.batch_norm_apply.default" in targets_of(program.graph_module)


def test_in_eval_mode_it_stays_an_aten_op() -> None:
    program = assert_capture_matches_eager(nn.BatchNorm2d(4).eval(), (torch.randn(6, 4, 5, 3),))
    assert not any("autopar" in name for name in targets_of(program.graph_module))


def test_gradients_are_those_of_finite_differences() -> None:
    module = nn.BatchNorm1d(2, track_running_stats=False).double()
    x = torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True)
    with Intercepted():
        torch.autograd.gradcheck(module, (x,))


def test_frozen_weights_get_no_gradient() -> None:
    module = nn.BatchNorm1d(2)
    module.weight.requires_grad_(False)
    with Intercepted():
        module(torch.randn(4, 2)).sum().backward()
    assert module.weight.grad is None and module.bias.grad is not None


def test_low_precision_inputs_keep_statistics_in_float32() -> None:
    x = torch.randn(6, 4, 5, 3) * 2 + 3
    module, low = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
    expected = module(x)
    with Intercepted():
        value = low(x.bfloat16())
    assert value.dtype == torch.bfloat16
    torch.testing.assert_close(value.float(), expected, rtol=2e-2, atol=3e-2)
    torch.testing.assert_close(low.running_mean, module.running_mean, rtol=1e-2, atol=1e-2)


def test_one_value_per_channel_is_refused_as_by_pytorch() -> None:
    with Intercepted(), pytest.raises(ValueError, match="more than 1 value per channel"):
        nn.BatchNorm1d(2)(torch.randn(1, 2))


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2, momentum=None), nn.SyncBatchNorm(2))
    with traceable_batch_norms(model):
        assert all("forward" in module.__dict__ for module in model)
    assert not any("forward" in module.__dict__ for module in model)


@pytest.mark.parametrize("dim", [0, 1, 2, None])
def test_weight_norm_is_captured_in_ordinary_ops_whatever_its_dim(dim: int | None) -> None:
    model = nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 6, 3), dim=dim)
    program = assert_capture_matches_eager(model, (torch.randn(5, 4, 8),))
    assert not any("weight_norm" in name for name in targets_of(program.graph_module))


def test_gradients_of_weight_norm_are_those_of_pytorch() -> None:
    v, g = (torch.randn(size, dtype=torch.float64, requires_grad=True) for size in ((6, 4, 3), (6, 1, 1)))
    grad = torch.randn(6, 4, 3, dtype=torch.float64)
    expected = torch.autograd.grad(torch._weight_norm(v, g, 0), (v, g), grad)
    with Intercepted():
        actual = torch.autograd.grad(torch._weight_norm(v, g, 0), (v, g), grad)
    torch.testing.assert_close(actual, expected)
