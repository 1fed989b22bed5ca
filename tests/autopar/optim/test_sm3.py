"""SM3 against its paper, element by element."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from autopar.errors import UnsupportedOptionError
from autopar.optim import SM3


def as_in_the_paper(weight: torch.Tensor, gradients: list[torch.Tensor], lr: float, momentum: float) -> torch.Tensor:
    """Algorithm SM3-II with the cover of all slices, in Python numbers."""
    indices = list(itertools.product(*map(range, weight.shape)))
    values = {index: float(weight[index]) for index in indices}
    averages = dict.fromkeys(indices, 0.0)
    before: dict[tuple[int, int], float] = {}
    for gradient in gradients:
        after: dict[tuple[int, int], float] = {}
        for index in indices:
            slices = list(enumerate(index)) if len(index) > 1 else [(0, hash(index))]
            nu = min(before.get(item, 0.0) for item in slices) + float(gradient[index]) ** 2
            update = float(gradient[index]) / math.sqrt(nu) if nu else 0.0
            averages[index] = momentum * averages[index] + (1 - momentum) * update
            values[index] -= lr * averages[index]
            for item in slices:
                after[item] = max(after.get(item, 0.0), nu)
        before = after
    result = torch.zeros(weight.shape, dtype=torch.float64)
    for index, value in values.items():
        result[index] = value
    return result


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("shape", [(5,), (4, 3), (2, 3, 4)])
def test_sm3_computes_what_its_paper_says(shape: tuple[int, ...], momentum: float) -> None:
    weight = torch.randn(shape, dtype=torch.float64)
    gradients = [torch.randn(shape, dtype=torch.float64) for _ in range(4)]
    gradients[0][0] = 0.0  # 0/0 is 0
    parameter = torch.nn.Parameter(weight.clone())
    optimizer = SM3([parameter], lr=0.1, momentum=momentum)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    torch.testing.assert_close(parameter.detach(), as_in_the_paper(weight, gradients, 0.1, momentum))


def test_sm3_on_vectors_is_adagrad() -> None:
    ours, theirs = (torch.nn.Parameter(torch.ones(6, dtype=torch.float64)) for _ in range(2))
    first, second = SM3([ours], lr=0.1, momentum=0.0), torch.optim.Adagrad([theirs], lr=0.1, eps=0.0)
    for gradient in torch.randn(3, 6, dtype=torch.float64):
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        first.step()
        second.step()
    torch.testing.assert_close(ours, theirs)


def test_a_matrix_holds_one_number_per_row_and_column_and_a_momentum() -> None:
    parameter = torch.nn.Parameter(torch.zeros(30, 20))
    parameter.grad = torch.ones(30, 20)
    for momentum, wanted in ((0.0, 50), (0.9, 650)):
        optimizer = SM3([parameter], momentum=momentum)
        optimizer.step()
        assert sum(value.numel() for value in optimizer.state[parameter].values()) == wanted


def test_sm3_refuses_what_it_is_not_defined_for() -> None:
    with pytest.raises(UnsupportedOptionError, match=r"momentum=1\.5"):
        SM3([torch.nn.Parameter(torch.zeros(1))], momentum=1.5)
    table = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = SM3(table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(UnsupportedOptionError, match="sparse"):
        optimizer.step()
