"""Branches that data decides are taken where they can only write rows, and refused where they could do more."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture.rows.plain_code import is_plain
from autopar.capture.trace import capture, tensor_leaves
from autopar.errors import DataDependentError
from autopar.verification import compare, eager_values, traced_values

PLAIN = [
    "y = f(x[i])\nout.index_add_(0, i, y)",
    "y: Tensor = f(x)\nout[i] += y",
    "y = x[i]\ny *= 2\nout[i] = y",
    "a, b = f(x)\nif training:\n    a = drop(a)\nelse:\n    a *= 0.5\nout[a] = b",
    "with no_grad():\n    i = g(x)\nout[i] = 1.0",
    "if last:\n    continue\ny = f(x)\nout[y] = 0",
]
NOT_PLAIN = [
    "total += 1",  # what it was before the branch
    "kept = f(x)",  # read after the loop
    "y = f(x) + y",  # of the last turn
    "if training:\n    y = f(x)\nout[i] = y",
    "self.seen = 1",
    "rows.append(f(x))",
    "print(x)",
    "break",
    "return x",
    "raise ValueError",
    "while x:\n    pass",
    "for j in x:\n    out[j] = 1",
    "y = (n := f(x))",
    "y = lambda: x",
    "del x",
    "global y\ny = 1",
    "import os",
    "yield x",
]


def parts(block: str) -> tuple[list[ast.stmt], ast.AST, ast.expr]:
    lines = "\n".join(f"        {line}" for line in block.split("\n"))
    tree = ast.parse(f"def forward(self, x, out):\n    total = 0\n    for i in hits:\n{lines}\n    return out, kept")
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    loop = function.body[1]
    assert isinstance(loop, ast.For)
    return loop.body, function, loop.target


@pytest.mark.parametrize("block", PLAIN)
def test_a_block_that_only_writes_into_tensors_is_plain(block: str) -> None:
    body, function, target = parts(block)
    assert is_plain(body, function, given=target)


@pytest.mark.parametrize("block", NOT_PLAIN)
def test_a_block_that_could_do_more_is_not_plain(block: str) -> None:
    body, function, target = parts(block)
    assert not is_plain(body, function, given=target)


Branch = Callable[[Any, Tensor, Tensor, Tensor], Tensor]


class Branching(nn.Module):
    def __init__(self, branch: Branch) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.branch = nn.Linear(6, 6).double(), branch
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        (token,) = torch.where(x[:, 0] > 0)
        found: Tensor = self.layer(x) + self.branch(self, x, token, torch.zeros_like(x))
        return found


def entered(self: Any, x: Tensor, token: Tensor, out: Tensor) -> Tensor:
    if x.sum() > 0:
        out.index_add_(0, token, self.layer(x[token]))
    return out


def not_entered(self: Any, x: Tensor, token: Tensor, out: Tensor) -> Tensor:
    if not x.sum() > 0:
        out.index_add_(0, token, self.layer(x[token]))
    return out


def skipped(self: Any, x: Tensor, token: Tensor, out: Tensor) -> Tensor:
    for factor in (1.0, 2.0):
        if x.sum() * factor > 0:
            continue
        out[token] += self.layer(x[token]) * factor
    return out


def nested(self: Any, x: Tensor, token: Tensor, out: Tensor) -> Tensor:
    for place in range(2):
        if not token.shape[0]:
            continue
        if x[place].sum() > 0:
            rows = self.layer(x[token])
            out[token] += rows
    return out


def hits(self: Any, x: Tensor, token: Tensor, out: Tensor) -> Tensor:
    for place in (x[:, 1] > 0.5).nonzero():
        out[token] += self.layer(x[token]) * place
    return out


ALLOWED: list[Branch] = [entered, not_entered, skipped, nested, hits]


@pytest.mark.parametrize("branch", ALLOWED)
def test_a_branch_computes_what_it_computes_on_one_device_either_way(branch: Branch) -> None:
    model = Branching(branch)
    for sign in (1, -1):
        x = torch.linspace(-1, 1.5, 30, dtype=torch.float64).view(5, 6) * sign
        program = capture(model, (x,), {})
        actual = traced_values(model, program, tensor_leaves((x,), {}), seed=0)
        report = compare(actual, eager_values(model, program, (x,), {}), reference="eager")
        assert report.ok, report.table


def with_an_else(self: Any, x: Tensor, token: Tensor, out: Tensor) -> Tensor:
    if x.sum() > 0:
        out.index_add_(0, token, self.layer(x[token]))
    else:
        out.index_add_(0, token, x[token])
    return out


def two_questions(self: Any, x: Tensor, token: Tensor, out: Tensor) -> Tensor:
    if x.sum() > 0 and x[0].sum() > 0:
        out.index_add_(0, token, self.layer(x[token]))
    return out


def as_a_number(self: Any, x: Tensor, token: Tensor, out: Tensor) -> Tensor:
    if bool(x.sum() > 0) is False:
        out.index_add_(0, token, self.layer(x[token]))
    return out


def counted(self: Any, x: Tensor, token: Tensor, out: Tensor) -> Tensor:
    count = 0
    for _ in (x[:, 1] > 0).nonzero():
        count += 1
    return out + count


def whole_write(self: Any, x: Tensor, token: Tensor, out: Tensor) -> Tensor:
    if x.sum() > 0:
        out.add_(1)
    return out


def buffer_write(self: Any, x: Tensor, token: Tensor, out: Tensor) -> Tensor:
    if x.sum() > 0:
        self.calls.add_(1)
    return x.abs()


class Counting(nn.Linear):
    calls: Tensor

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.register_buffer("calls", torch.zeros(()))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return super().forward(x)


class CountingInBranch(nn.Module):
    """One device counts only where the branch is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Counting()

    def forward(self, x: Tensor) -> Tensor:
        out, (token,) = torch.zeros_like(x), torch.where(x[:, 0] > 0)
        if x.sum() > 0:
            out.index_add_(0, token, self.layer(x[token]))
        return out


def test_a_buffer_that_is_set_anew_in_a_branch_is_refused() -> None:
    with pytest.raises(DataDependentError, match="buffer is set anew") as caught:
        capture(CountingInBranch(), (torch.randn(5, 6, dtype=torch.float64),), {})
    assert "out.index_add_(0, token, self.layer(x[token]))" in caught.value.where


def dictionary(self: Any, x: Tensor, token: Tensor, out: Tensor) -> Tensor:
    found: dict[int, Tensor] = {}
    if x.sum() > 0:
        found[0] = self.layer(x)
    return out + sum(found.values())


def comprehension(self: Any, x: Tensor, token: Tensor, out: Tensor) -> Tensor:
    return torch.stack([x, *(x * 2 for _ in (x[:, 1] > 0).nonzero())]).sum(0)


def while_loop(self: Any, x: Tensor, token: Tensor, out: Tensor) -> Tensor:
    while token.shape[0] > 0:
        out.index_add_(0, token, self.layer(x[token]))
    return out


REFUSED: list[Branch] = [
    *(with_an_else, two_questions, as_a_number, counted, whole_write, buffer_write, dictionary, comprehension),
    while_loop,
]


@pytest.mark.parametrize("branch", REFUSED)
def test_a_branch_that_could_do_more_than_write_rows_is_refused(branch: Branch) -> None:
    with pytest.raises(DataDependentError) as caught:
        capture(Branching(branch), (torch.randn(5, 6, dtype=torch.float64),), {})
    assert "test_branches.py" in caught.value.where and caught.value.fix


def test_no_branch_outlives_its_turn() -> None:
    """What is written after a loop over hits is written whatever was hit."""

    def after(self: Any, x: Tensor, token: Tensor, out: Tensor) -> Tensor:
        for place in (x[:, 1] > 100).nonzero():
            out[token] += self.layer(x[token]) * place
        out[token] += x[token]
        return out

    model, x = Branching(after), torch.randn(5, 6, dtype=torch.float64)
    program = capture(model, (x,), {})
    actual = traced_values(model, program, tensor_leaves((x,), {}), seed=0)
    assert compare(actual, eager_values(model, program, (x,), {}), reference="eager").ok
    assert float(actual.outputs["output"].abs().max()) > 0
