"""What verify compares: gradients that do not vanish by themselves, of models that can be copied or not."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.capture.trace import capture, tensor_leaves
from autopar.verification import Values, compare, eager_values, traced_values


class Shares(nn.Module):
    """Rows that sum to one, and what is left of each share: neither sum has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 6, dtype=torch.float64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        share = self.body(x).softmax(-1)
        return share, 1 - share, torch.complex(share, share.square())


def test_an_output_whose_sum_is_constant_has_gradients_the_same_on_both_sides() -> None:
    model, x = Shares(), torch.randn(4, 6, dtype=torch.float64)
    program = capture(model, (x,), {})
    eager = eager_values(model, program, (x,), {})
    traced = traced_values(model, program, tensor_leaves((x,), {}), seed=0)
    for name, gradient in eager.gradients.items():
        assert float(gradient.abs().max()) > 1e-3
        torch.testing.assert_close(traced.gradients[name], gradient)
    assert autopar.verify(model, (2,), example_inputs=x, search="ddp").ok


class Counting(nn.Module):
    """Holds a lock, so that it cannot be copied; counts its calls, and keeps what it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.lock, self.body, self.calls, self.kept = threading.Lock(), nn.Linear(4, 4), 0, [torch.zeros(1)]
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = self.body(x)
        self.kept.append(self.last)
        self.seen = self.seen + 1
        return self.last.relu()


def with_norm(norm: Callable[..., nn.Module]) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.Sequential(norm(nn.Linear(4, 8)), nn.Tanh(), norm(nn.Linear(8, 4)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "weight norm": lambda: with_norm(nn.utils.weight_norm),
    "spectral norm": lambda: with_norm(nn.utils.spectral_norm),
    "parametrized weight norm": lambda: with_norm(nn.utils.parametrizations.weight_norm),
    "a lock": Counting,
}


def snapshot(model: nn.Module) -> dict[str, Any]:
    tensors = {name: item.detach().clone() for name, item in model.state_dict().items()}
    return {**tensors, **{name: item.grad for name, item in model.named_parameters()}}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_model_that_cannot_simply_be_copied_is_verified_and_left_alone(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = make(), torch.randn(8, 4)
    if isinstance(model, nn.Sequential):
        model(x)  # as after some training: what the hooks computed is held in attributes
    before = snapshot(model)
    for search in ("ddp", "fsdp"):
        report = autopar.verify(model, (2,), example_inputs=x, search=search)
        assert report.ok, report.table
        assert {item.kind for item in report.comparisons} >= {"output", "gradient"}
    after = snapshot(model)
    assert before.keys() == after.keys()
    assert all(
        torch.equal(before[name], item) if item is not None else before[name] is None for name, item in after.items()
    )
    if isinstance(model, Counting):
        assert len(model.kept) == 1 and not hasattr(model, "last")


class Widened(nn.Module):
    """float32 weights, a result in float64: it is known to float32's precision."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).double().var(1)


def test_a_result_is_not_held_to_more_digits_than_the_weights_have() -> None:
    report = autopar.verify(Widened(), (2,), example_inputs=torch.randn(8, 64), search="megatron")
    (output,) = (item for item in report.comparisons if item.kind == "output")
    assert report.ok and output.tolerance == 1e-5 and output.relative_error > 1e-10
    double = autopar.verify(Widened().double(), (2,), example_inputs=torch.randn(8, 64).double(), search="megatron")
    assert double.ok and {item.tolerance for item in double.comparisons} == {1e-10}


def test_a_gradient_that_eager_does_not_have_is_zero_in_every_element() -> None:
    weight = torch.zeros(2, 3)
    without, zero = Values({}, {}, {}), Values({}, {"weight": weight}, {})
    almost = Values({}, {"weight": weight.index_fill(0, torch.tensor(1), 1e-30)}, {})
    assert compare(zero, without, reference="eager").ok
    assert not compare(almost, without, reference="eager").ok
    assert not compare(without, zero, reference="eager").ok
