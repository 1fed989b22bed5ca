"""Torch functions replaced as while capturing, but on real tensors; and captured graphs beside the eager model."""

from __future__ import annotations

import copy
import itertools
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopar.capture.intercept import Interceptor
from autopar.capture.observer import without_override_check
from autopar.capture.program import InputKind, OutputKind, Program
from autopar.capture.trace import capture, tensor_leaves


class Intercepted(TorchFunctionMode):
    """Torch functions inside run as their replacements; keys of random ops count from 1."""

    def __init__(self, seed: int = 3) -> None:
        super().__init__()
        numbers = itertools.count(1)
        self.interceptor = Interceptor(torch.tensor(seed), lambda: next(numbers))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:
            result = self.interceptor.replace(func, args, kwargs)
            inner = without_override_check(func) if isinstance(func, FunctionType) else None
            if result is NotImplemented and inner is not None:
                result = inner(*args, **kwargs)
        return func(*args, **kwargs) if result is NotImplemented else result


class Calling(nn.Module):
    """A function of one parameter and the inputs, as a model."""

    def __init__(self, function: Any, *shape: int) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.randn(*shape))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.weight, *args, **kwargs)


def targets_of(gm: fx.GraphModule) -> set[str]:
    """The names of the ops that a graph calls."""
    return {str(node.target) for node in gm.graph.nodes if node.op == "call_function"}


def assert_capture_matches_eager(
    model: nn.Module, args: tuple[Any, ...], *, tolerance: float = 1e-10, **kwargs: Any
) -> Program:
    """The captured graph of the model in float64 gives the eager model's outputs, gradients and buffers."""
    model = model.double()
    args = pytree.tree_map_only(Tensor, _widened, args)
    program = capture(copy.deepcopy(model), args, kwargs)
    eager = copy.deepcopy(model)
    outputs = [leaf for leaf in pytree.tree_leaves(eager(*args, **kwargs)) if isinstance(leaf, Tensor)]
    named = [item for item in program.outputs if item.kind in (OutputKind.OUTPUT, OutputKind.LOSS)]
    tangents = {item.name: torch.randn_like(value) for item, value in zip(named, outputs, strict=True)}
    expected = {(item.kind, item.name): value for item, value in zip(named, outputs, strict=True)}
    expected |= {(OutputKind.BUFFER, name): value for name, value in eager.named_buffers()}
    roots = [(value, tangents[item.name]) for item, value in zip(named, outputs, strict=True) if value.requires_grad]
    parameters = dict(eager.named_parameters())
    values, grads = zip(*roots, strict=True)
    gradients = torch.autograd.grad(values, list(parameters.values()), grads, allow_unused=True)
    expected |= {
        (OutputKind.GRADIENT, name): value
        for name, value in zip(parameters, gradients, strict=True)
        if value is not None
    }
    inputs = tensor_leaves(args, kwargs)
    for item, value in zip(program.outputs, run_program(program, model, inputs, tangents), strict=True):
        reference = expected[item.kind, item.name]
        note = partial("{}: {}".format, item)
        torch.testing.assert_close(value, reference, rtol=tolerance, atol=tolerance, msg=note)
    return program


def _widened(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value


def run_program(
    program: Program, model: nn.Module, inputs: dict[str, Tensor], tangents: dict[str, Tensor], seed: int = 5
) -> list[Tensor]:
    """The flat outputs of a captured graph on real values."""
    sources: dict[InputKind, Any] = {
        InputKind.PARAMETER: dict(model.named_parameters(remove_duplicate=False)),
        InputKind.BUFFER: dict(model.named_buffers(remove_duplicate=False)),
        InputKind.INPUT: inputs,
        InputKind.CONSTANT: program.constants,
        InputKind.TANGENT: tangents,
        InputKind.SEED: {"seed": torch.tensor(seed)},
    }
    values = [sources[item.kind][item.name].detach().clone() for item in program.inputs]
    return list(program.graph_module(*values))
