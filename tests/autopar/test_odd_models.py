"""Models of the promised kinds as strangers write them: each computes what PyTorch computes, or is refused by name."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autopar
from autopar.capture.trace import capture
from autopar.errors import CaptureError, MutatedInputError
from autopar.mesh import Mesh
from autopar.planner.build import build_problem
from autopar.planner.decisions import NO_OPTIMIZER, DecisionList
from autopar.planner.prices import Prices
from autopar.runtime.virtual_run import run_virtual_step
from autopar.verification import Report, Values, compare, eager_values
from tests.autopar.random_programs import random_choice


def under_random_plans(model: nn.Module, *inputs: Tensor, mesh_shape: tuple[int, ...] = (2,), plans: int = 2) -> Report:
    """The worst of some random plans, against the model as PyTorch runs it."""
    program = capture(model, inputs, {})
    prices = Prices(Mesh(mesh_shape, hardware="cpu"))
    decisions = DecisionList(program, prices, NO_OPTIMIZER).build()
    planning = build_problem(program, decisions, prices, usage_limit=None)
    expected = eager_values(model, program, inputs, {})
    reports = []
    for seed in range(plans):
        assignment = planning.assignment(random_choice(planning, random.Random(seed)))
        run = run_virtual_step(model, program, assignment, mesh_shape, inputs, {}, seed=0)
        reports.append(compare(Values(run.outputs, run.gradients, run.buffers), expected, reference="eager"))
    return max(reports, key=lambda report: report.worst_relative_error / report.worst.tolerance)


class Function(nn.Module):
    """`function(self, *inputs)` as a forward, over the modules and parameters given by name."""

    def __init__(self, function: Any, **members: Any) -> None:
        super().__init__()
        self.function = function
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


def sequential_checkpoints(self: Any, x: Tensor) -> Tensor:
    hidden = checkpoint(self.first, x, use_reentrant=False)
    return checkpoint(self.second, self.between(hidden), use_reentrant=False).square().mean()


def nested_checkpoints(self: Any, x: Tensor) -> Tensor:
    def inner(hidden: Tensor) -> Tensor:
        return self.second(checkpoint(self.first, hidden, use_reentrant=False)) + self.between(hidden)

    return checkpoint(inner, x, use_reentrant=False).square().mean()


@pytest.mark.parametrize("function", [sequential_checkpoints, nested_checkpoints])
def test_what_is_recomputed_in_backward_is_recomputed_from_the_parameters(function: Any) -> None:
    """They are inputs of the program in backward too, no constants of the day on which it was captured."""
    first, second = (nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2))
    model, x = Function(function, first=first, second=second, between=nn.Linear(8, 8)), torch.randn(8, 8)
    assert not capture(model, (x,), {}).constants
    report = under_random_plans(model, x)
    assert report.ok, report.table


def test_unregistered_tensors_used_in_turns_keep_their_identities() -> None:
    one, other = torch.full((8,), 2.0), torch.full((8,), 3.0)
    model = Function(lambda self, x: self.layer(x * one + other) * one - other, layer=nn.Linear(8, 8))
    report = under_random_plans(model, torch.randn(8, 8))
    assert report.ok, report.table


def test_complex_numbers_move_conjugated_and_in_any_strides() -> None:
    def spectrum(self: Any, x: Tensor) -> Tensor:
        weight = torch.view_as_complex(self.weight)
        return torch.fft.irfft(torch.fft.rfft(self.layer(x), dim=1) * weight, n=8, dim=1).square().mean()

    model = Function(spectrum, layer=nn.Linear(8, 8), weight=nn.Parameter(torch.randn(5, 2)))
    report = under_random_plans(model, torch.randn(8, 8), mesh_shape=(2, 2), plans=3)
    assert report.ok, report.table


def test_a_float32_result_of_bfloat16_ops_is_held_to_bfloat16() -> None:
    def mixed(self: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.layer(x)
        return hidden.float().square().mean()

    model = Function(mixed, layer=nn.Linear(8, 8))
    report = autopar.verify(model, (2,), example_inputs=torch.randn(8, 8), search="ddp")
    assert report.ok, report.table
    assert {item.tolerance for item in report.comparisons} == {2e-2, 5e-2}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")  # PyTorch's forward mode
def test_jacobians_in_forward_mode_are_planned_with_weights_cut() -> None:
    body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def compute(self: Any, x: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.hessian(lambda row: self.body(row).sum()))(x).square().sum()

    report = autopar.verify(
        Function(compute, body=body), (2, 2), example_inputs=torch.randn(4, 4), search="megatron", hardware="cpu"
    )
    assert report.ok, report.table


def test_norms_of_bfloat16_with_float32_weights_under_autocast() -> None:
    def compute(self: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.between(self.first(x))
            return self.second(self.over_groups(hidden.transpose(1, 2)).transpose(1, 2)).float()

    members = {"first": nn.Linear(8, 16), "between": nn.LayerNorm(16), "over_groups": nn.GroupNorm(4, 16)}
    report = under_random_plans(Function(compute, **members, second=nn.Linear(16, 4)), torch.randn(4, 4, 8), plans=8)
    assert report.ok, report.table


def test_a_parameter_without_elements_and_one_without_dims() -> None:
    members = {"empty": nn.Parameter(torch.zeros(0)), "scale": nn.Parameter(torch.tensor(2.0))}
    model = Function(lambda self, x: self.layer(x) * self.scale + self.empty.sum(), layer=nn.Linear(8, 8), **members)
    report = under_random_plans(model, torch.randn(8, 8))
    assert report.ok, report.table


class Views(nn.Module):
    """A buffer that is a view of another one, and is written."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("base", torch.zeros(4, 8))
        self.register_buffer("row", self.base[1])

    def forward(self, x: Tensor) -> Tensor:
        self.row.add_(1)
        return (self.layer(x) + self.base.sum(0)).mean()


def test_a_written_buffer_that_shares_memory_is_refused() -> None:
    with pytest.raises(MutatedInputError, match="'base', 'row', which share their memory"):
        capture(Views(), (torch.randn(8, 8),), {})


def test_a_sparse_gradient_is_refused() -> None:
    model = Function(lambda self, x: self.table(x).sum(), table=nn.Embedding(13, 6, sparse=True))
    with pytest.raises(CaptureError, match=r"gradient of 'table.weight' is a sparse tensor"):
        capture(model, (torch.zeros(8, 2, dtype=torch.int64),), {})


def test_a_tensor_that_forward_caches_is_not_left_fake() -> None:
    def cached(self: Any, x: Tensor) -> Tensor:
        if self.cache is None:
            self.cache = torch.ones(8)
        return self.layer(x) + self.cache

    model, x = Function(cached, layer=nn.Linear(8, 8), cache=None), torch.randn(8, 8)
    capture(model, (x,), {})
    assert model.cache is None
    assert type(model(x)) is Tensor


class Recomputing(torch.autograd.Function):
    """Runs a module again in its backward, which leaves the gradients of the module's weights in `.grad` itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        with torch.no_grad():
            return x + module(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.module(x), grad)
        return grad + x.grad, None


def test_gradients_that_a_backward_of_the_users_own_accumulates_are_there() -> None:
    def twice(self: Any, x: Tensor) -> Tensor:
        hidden = Recomputing.apply(self.enter(x), self.block)
        return Recomputing.apply(hidden, self.block).square().mean() + self.block(x).mean()

    torch.manual_seed(0)
    model = Function(twice, enter=nn.Linear(8, 8), block=nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    report = under_random_plans(model, torch.randn(4, 8))
    assert report.ok, report.table
    gradients = {item.name for item in report.comparisons if item.kind == "gradient"}
    assert {"block.0.weight", "enter.weight"} <= gradients
