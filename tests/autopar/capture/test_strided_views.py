"""`as_strided` reads what it read on one device, however the tensors of each rank lie in memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.capture.trace import capture
from autopar.errors import CaptureError
from tests.autopar.test_odd_models import Function, under_random_plans

Read = Callable[[Tensor], Tensor]


def reordered(hidden: Tensor) -> Tensor:
    return hidden.transpose(1, 2).tanh().as_strided((8, 4, 6), (24, 6, 1))


def at_an_offset(hidden: Tensor) -> Tensor:
    return hidden.tanh().transpose(0, 1).as_strided((4, 6), (24, 2), 3)


def overlapping(hidden: Tensor) -> Tensor:
    return hidden.sin().transpose(1, 2).tanh().as_strided((8, 5, 8), (24, 4, 1))


def beyond_its_own_view(hidden: Tensor) -> Tensor:
    part = hidden.tanh()[:, 1:].transpose(1, 2).split(3, 1)[1]
    return part.as_strided((8, 4, 2), (24, 3, 2))


def written_through(hidden: Tensor) -> Tensor:
    whole = hidden.transpose(1, 2).sin() * 1.0
    whole.as_strided((8, 3), (24, 5), 2).mul_(3)
    return whole.square()


def as_a_copy(hidden: Tensor) -> Tensor:
    return torch.as_strided_copy(hidden.transpose(0, 1).tanh(), (6, 8), (8, 3), 1)


@pytest.mark.parametrize(
    "read", [reordered, at_an_offset, overlapping, beyond_its_own_view, written_through, as_a_copy]
)
def test_positions_in_memory_are_those_of_one_device(read: Read) -> None:
    torch.manual_seed(0)
    model = Function(lambda self, x: read(self.layer(x)), layer=nn.Linear(4, 6))
    report = under_random_plans(model, torch.randn(8, 4, 4), mesh_shape=(2, 2), plans=4)
    assert report.ok, report.table


def test_a_contiguous_tensor_is_read_as_it_is() -> None:
    model = Function(lambda self, x: self.layer(x).as_strided((8, 2), (24, 1)), layer=nn.Linear(4, 6))
    program = capture(model, (torch.ones(8, 4, 4),), {})
    assert not program.graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)


def test_memory_that_a_tensor_does_not_fill_is_refused() -> None:
    def gaps(self: Function, x: Tensor) -> Tensor:
        wide = torch.empty_strided((8, 6), (8, 1)).copy_(self.layer(x))
        return wide.as_strided((8, 8), (8, 1))

    with pytest.raises(CaptureError, match="does not fill") as caught:
        capture(Function(gaps, layer=nn.Linear(4, 6)), (torch.ones(8, 4),), {})
    assert "wide.as_strided" in caught.value.where


@pytest.mark.parametrize("is_parameter", [True, False])
def test_an_input_that_lies_in_another_order_is_refused(is_parameter: bool) -> None:
    """Its fake is contiguous: read by positions, it would give other numbers than on one device."""
    layer = nn.Linear(4, 6)
    if is_parameter:
        layer.weight = nn.Parameter(torch.randn(4, 6).t())
    model = Function(
        lambda self, x: (self.layer.weight if is_parameter else x).as_strided((5,), (2,)) * self.layer(x).sum(),
        layer=layer,
    )
    contiguous, transposed = torch.ones(8, 4), torch.ones(4, 8).t()
    with pytest.raises(CaptureError, match="does not fill it in order") as caught:
        capture(model, (contiguous if is_parameter else transposed,), {})
    assert "as_strided" in caught.value.where
    if not is_parameter:
        capture(model, (contiguous,), {})
