"""Rows that data selects are refused, with the line and with advice, where anything could depend on which they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture.trace import capture, tensor_leaves
from autopar.errors import CaptureError, DataDependentError
from autopar.torch_compat import apply_function
from autopar.verification import compare, eager_values, traced_values


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Selecting(nn.Module):
    """`change` is between the rows of x that are taken and what is added to x where they were."""

    def __init__(self, change: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer, self.change = nn.Linear(8, 8), change

    def forward(self, x: Tensor) -> Tensor:
        (token,) = torch.where(x[:, 0] > 0)
        return torch.zeros_like(x).index_add_(0, token, self.change(self.layer(x[token]), token, x))


def count(r: Tensor, t: Tensor, x: Tensor) -> Tensor:
    return r / max(len(t), 1)


def size(r: Tensor, t: Tensor, x: Tensor) -> Tensor:
    return r / r.shape[0]


def repeat(r: Tensor, t: Tensor, x: Tensor) -> Tensor:
    for step in range(t.size(0)):
        r = r + step
    return r


def numbers(r: Tensor, t: Tensor, x: Tensor) -> Tensor:
    return x[t.tolist()]


def loop(r: Tensor, t: Tensor, x: Tensor) -> Tensor:
    return torch.stack([row * 2 for row in r])


def of_another(r: Tensor, t: Tensor, x: Tensor) -> Tensor:
    return r + x[x[:, 1] > 0]


def again(r: Tensor, t: Tensor, x: Tensor) -> Tensor:
    return r[r[:, 0] > 0]


def ternary(r: Tensor, t: Tensor, x: Tensor) -> Tensor:
    return r if t.numel() > 0 else r * 2


def fill(r: Tensor, t: Tensor, x: Tensor) -> Tensor:
    r[:, 0] = 0
    return r


def through_a_view(r: Tensor, t: Tensor, x: Tensor) -> Tensor:
    half = r[:, :4]
    half += 1
    return r


ODD: dict[str, Callable[..., Tensor]] = {
    "cumsum": lambda r, t, x: r.cumsum(0),
    "softmax": lambda r, t, x: r.softmax(0),
    "mean": lambda r, t, x: r - r.mean(0),
    "all": lambda r, t, x: r * r.sum(),
    "batch norm": lambda r, t, x: F.batch_norm(r, None, None, training=True),
    "flip": lambda r, t, x: r.flip(0),
    "roll": lambda r, t, x: r.roll(1, 0),
    "sort": lambda r, t, x: r.sort(0).values,
    "first": lambda r, t, x: r + r[0],
    "head": lambda r, t, x: r[:3],
    "flat": lambda r, t, x: r.reshape(-1, 4),
    "attention": lambda r, t, x: F.scaled_dot_product_attention(r[None], r[None], r[None])[0],
    "product": lambda r, t, x: r @ r.T @ r,
    "with all": lambda r, t, x: r + x,
    "arc": lambda r, t, x: r.tanh().acos(),
    "item": lambda r, t, x: r * r[:, 0].max().item(),
    "numbers of numbers": lambda r, t, x: r * float(x.sum().item()),
    "function": lambda r, t, x: apply_function(Doubled, r),
    "elements": lambda r, t, x: r / r.nelement(),
    "bytes": lambda r, t, x: r / r.nbytes,
    "size of a function": lambda r, t, x: r / torch.numel(r),
    "count": count,
    "size": size,
    "repeat": repeat,
    "numbers": numbers,
    "loop": loop,
    "of another": of_another,
    "again": again,
    "ternary": ternary,
    "fill": fill,
    "through a view": through_a_view,
}


def refused(model: nn.Module) -> CaptureError:
    x = torch.randn(6, 8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(DataDependentError) as caught:
        capture(model, (x,), {})
    assert "test_selection.py" in caught.value.where and caught.value.fix
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return caught.value


@pytest.mark.parametrize("name", ODD)
def test_what_could_tell_which_rows_are_selected_is_refused(name: str) -> None:
    refused(Selecting(ODD[name]))


def test_the_same_program_without_such_an_op_is_captured() -> None:
    changes: list[Callable[..., Tensor]] = [
        lambda r, t, x: r,
        lambda r, t, x: r.view(r.shape[0], 2, 4).transpose(1, 2).flatten(1).softmax(-1),
        lambda r, t, x: F.scaled_dot_product_attention(r[None], x[None], x[None])[0],  # each row looks at all of x
    ]
    for change in changes:
        capture(Selecting(change), (torch.randn(6, 8),), {})


class Leaking(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        rows = super().forward(x)[x[:, 0] > 0]
        return rows.relu()


class Misplacing(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        out[x[:, 1] > 0] = super().forward(x[x[:, 0] > 0])
        return out


class Repeating(nn.Linear):
    """Of two rows for one place, the last counts on one device."""

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        token, _ = torch.where(x > 0)
        out[token] = super().forward(x[token])
        return out


class AddingToRepeated(nn.Linear):
    """Of two sums for one place, the last counts on one device."""

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        token, _ = torch.where(x > 0)
        out[token] += super().forward(x[token])
        return out


class WritingInBetween(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y, (token,) = super().forward(x), torch.where(x[:, 0] > 0)
        rows = y[token]
        y.mul_(2)
        return torch.zeros_like(x).index_add_(0, token, rows)


class ChangingTheMask(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        mask = x[:, 0] > 0
        rows = super().forward(x)[mask]
        mask[0] = False
        out = torch.zeros_like(x)
        out[mask] = rows
        return out


class WritingWhatWaits(nn.Module):
    """The tokens are written to between what experts computed of them and where it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y, out = x * 2, torch.zeros_like(x)
        (token,) = torch.where(x[:, 0] > 0)
        out.index_add_(0, token, self.down(self.up(y[token]).relu()))
        y.mul_(3)
        return out + y


class WritingTokens(nn.Module):
    """The tokens are written to after experts have computed, and before what they computed is written back."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        y, out, (token,) = x * 2, torch.zeros_like(x), torch.where(x[:, 0] > 0)
        rows = self.down(self.up(y[token]).relu())
        y.mul_(3)
        return y + out.index_add_(0, token, rows)


class WritingScores(WritingTokens):
    def forward(self, x: Tensor) -> Tensor:
        y, out, (token,) = x[:, :1] * 2, torch.zeros_like(x), torch.where(x[:, 0] > 0)
        rows = self.down(self.up(x[token]).relu()) * y[token]
        y.mul_(3)
        return y + out.index_add_(0, token, rows)


@pytest.mark.parametrize("kind", [WritingTokens, WritingScores])
def test_what_experts_have_read_counts_as_it_was_then(kind: type[WritingTokens]) -> None:
    model, x = kind(8, 4).double(), torch.randn(6, 8, dtype=torch.float64)
    with torch.no_grad():  # with gradients, autograd refuses it
        program = capture(model, (x,), {})
        actual = traced_values(model, program, tensor_leaves((x,), {}), seed=0)
        report = compare(actual, eager_values(model, program, (x,), {}), reference="eager")
    assert report.ok, report.table


@pytest.mark.parametrize("kind", [Leaking, Misplacing, Repeating, AddingToRepeated, WritingInBetween, ChangingTheMask])
def test_rows_that_go_elsewhere_are_refused(kind: type[nn.Linear]) -> None:
    refused(kind(8, 8))


class WritingRowsWhileInUse(nn.Linear):
    """On one device the layer keeps rows of its own; here it keeps the tokens, which the backward then misses."""

    def forward(self, x: Tensor) -> Tensor:
        y, (token,) = x * 2, torch.where(x[:, 0] > 0)
        rows = super().forward(y[token]).cos()
        y.mul_(3)
        return y.index_add(0, token, rows)


def test_tokens_that_experts_have_read_may_be_written_to() -> None:
    model, x = WritingWhatWaits().double(), torch.randn(6, 8, dtype=torch.float64)
    program = capture(model, (x,), {})
    actual = traced_values(model, program, tensor_leaves((x,), {}), seed=0)
    assert compare(actual, eager_values(model, program, (x,), {}), reference="eager").ok
    with pytest.raises(CaptureError, match="modified by an inplace operation"):
        capture(WritingRowsWhileInUse(8, 8), (torch.randn(6, 8),), {})
