"""The recorder: the graph of a run on fake tensors makes the calls that were made."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.capture.recorder import Recorder
from autopar.capture.trace import capture
from autopar.errors import CaptureError
from autopar.passes.storages import storages_of
from autopar.torch_compat import FakeTensorMode

REAL = torch.arange(4.0)


def views_and_writes(x: Tensor) -> list[Tensor]:
    y = x.clone()
    y.transpose_(0, 1)
    z = y.t().view(-1)
    z.add_(1)
    y.mul_(2)
    return [y, z]


def several_results(x: Tensor) -> list[Tensor]:
    values, indices = x.sort(dim=1, descending=True)
    left, right = x.chunk(2, dim=1)
    return [values, indices, torch.cat([right, left], 1)]


def constants(x: Tensor) -> list[Tensor]:
    scale = torch.tensor([1.0, 2.0, 3.0, 4.0]).mul_(2)
    times = int(torch.tensor(3)) + 1
    return [x * scale * times, x + REAL, x - REAL]


def functions_of_functions(x: Tensor) -> list[Tensor]:
    return [torch.func.vmap(torch.func.grad(lambda row: row.sin().sum()))(x)]


def whole_composites(x: Tensor) -> list[Tensor]:
    with torch.inference_mode():
        return [torch.nn.functional.linear(x, x).softmax(-1)]


def lists(x: Tensor) -> list[Tensor]:
    parts = torch._foreach_add([x.clone(), x.clone()], 1.0)
    torch._foreach_mul_(parts, 2.0)
    return list(parts)


PROGRAMS = (
    views_and_writes,
    several_results,
    constants,
    functions_of_functions,
    whole_composites,
    lists,
)


@pytest.mark.parametrize("program", PROGRAMS)
def test_running_the_graph_gives_what_the_program_gives(program: Callable[[Tensor], list[Tensor]]) -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    x = torch.arange(12.0).reshape(3, 4).sin()
    graph_module = Recorder(mode).record(program, [mode.from_tensor(x)])
    for actual, expected in zip(graph_module(x.clone()), program(x.clone()), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
        assert actual.stride() == expected.stride()
    for node in graph_module.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            assert not value.requires_grad


def test_a_repeated_call_is_not_worked_out_again_but_makes_a_tensor_of_its_own() -> None:
    mode = FakeTensorMode()
    graph = Recorder(mode).record(lambda x: [x + 1, x + 1, x.t(), x.t()], [mode.from_tensor(torch.ones(2, 3))]).graph
    x, first, second, view, other_view = (node for node in graph.nodes if node.op != "output")
    assert not storages_of(first).keys() & storages_of(second).keys()
    assert storages_of(view) == storages_of(other_view) == storages_of(x)


def test_a_call_is_worked_out_again_under_another_default_dtype() -> None:
    def program(x: Tensor) -> list[Tensor]:
        torch.set_default_dtype(torch.float64)
        try:
            wide = x / 3
        finally:
            torch.set_default_dtype(torch.float32)
        return [wide, x / 3]

    mode = FakeTensorMode()
    graph = Recorder(mode).record(program, [mode.from_tensor(torch.arange(4))]).graph
    dtypes = [node.meta["val"].dtype for node in graph.nodes if node.op == "call_function"]
    assert dtypes == [torch.float64, torch.float32]


def test_metadata_is_of_the_time_when_the_value_was_made() -> None:
    mode = FakeTensorMode()
    graph = Recorder(mode).record(lambda x: [x.clone().unsqueeze_(0)], [mode.from_tensor(torch.ones(2, 3))]).graph
    shapes = [tuple(node.meta["val"].shape) for node in graph.nodes if node.op == "call_function"]
    assert shapes == [(2, 3), (1, 2, 3)]


def test_constants_are_kept_once() -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    recorder = Recorder(mode)
    recorder.record(lambda x: [x + REAL, x * REAL], [mode.from_tensor(torch.ones(4))])
    assert [value is REAL for value in recorder.constants.values()] == [True]


def test_values_that_nobody_holds_are_freed_while_recording() -> None:
    mode = FakeTensorMode()
    held: list[weakref.ref[Tensor]] = []

    def program(x: Tensor) -> list[Tensor]:
        held.append(weakref.ref(x + 1))
        gc.collect()
        return [x]

    Recorder(mode).record(program, [mode.from_tensor(torch.ones(4))])
    assert held[0]() is None


class Branching(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        cond: Callable[..., Tensor] = torch.cond
        return cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (super().forward(x),))


def test_an_op_that_takes_functions_is_refused_at_the_users_line() -> None:
    with pytest.raises(CaptureError, match="calls cond") as caught:
        capture(Branching(4, 4), (torch.ones(2, 4),), {})
    assert "return cond(" in caught.value.where


class Compiled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.compile(super().forward, backend="eager")(x).sin()


def test_a_compiled_part_is_captured_as_the_code_it_was_compiled_from() -> None:
    counts = [len(capture(kind(4, 4), (torch.ones(2, 4),), {}).graph_module.graph.nodes) for kind in (Compiled, Plain)]
    assert counts[0] == counts[1]


class Plain(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sin()
