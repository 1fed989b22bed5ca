"""Elementwise functions as text: what an op of fixed schema takes as its activation.

A program over tensors `x0, x1, ...` of one shape is a line per op and the names of the results, as
`y0 = aten.silu.default(x0); y1 = aten.mul.Tensor(y0, x1); y1`. Equal functions have equal texts.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from autopar.torch_compat import DispatchMode

FILLED_LIKE = frozenset(getattr(torch.ops.aten, name).default for name in ("zeros_like", "ones_like", "full_like"))
UNTAGGED = frozenset(  # elementwise, but not tagged so
    getattr(torch.ops.aten, name).default
    for name in (
        "_to_copy", "clone", "hardswish", "hardtanh_backward", "hardswish_backward", "hardsigmoid_backward",
        "elu_backward", "leaky_relu_backward", "mish_backward", "softplus_backward", "softshrink_backward",
    )
)  # fmt: skip
SAME_DTYPE = frozenset(  # of tensors of one floating dtype, a result of that dtype
    getattr(getattr(torch.ops.aten, name), overload)
    for name, overload in (
        ("mul", "Tensor"), ("add", "Tensor"), ("sub", "Tensor"), ("div", "Tensor"), ("silu", "default"),
        ("silu_backward", "default"), ("gelu", "default"), ("gelu_backward", "default"), ("sigmoid", "default"),
        ("sigmoid_backward", "default"), ("tanh", "default"), ("tanh_backward", "default"),
        ("threshold_backward", "default"),
    )
)  # fmt: skip
IDENTITIES = frozenset((torch.ops.aten.alias.default, torch.ops.aten.detach.default))
SAMPLE_SHAPE = (2, 3)


class NotPointwiseError(ValueError):
    """A function that cannot be written as a pointwise program."""


@dataclass(frozen=True, slots=True)
class _Value:
    """The name of a value of the program."""

    name: str


@dataclass(frozen=True, slots=True)
class _Line:
    name: str
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    writing: tuple[Callable[..., Any], str] | None  # the op that writes into a given tensor, and what that is called


@dataclass(frozen=True, slots=True)
class PointwiseProgram:
    """A parsed text; calling it runs it on tensors of one shape and gives the list of results."""

    lines: tuple[_Line, ...]
    results: tuple[str, ...]

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        results = self._run(inputs, {})  # some may be numbers
        return [item if item.dim() else item.expand_as(inputs[0]) for item in results]

    def into(self, places: Sequence[Tensor | None], *inputs: Tensor) -> list[Tensor]:
        """The results, those that have a place written there; no place may share memory with an input."""
        pairs = zip(self.results, places, strict=True)
        wanted = {name: place for name, place in pairs if place is not None and self.results.count(name) == 1}
        results = self._run(inputs, wanted)
        return [item if place is None or item is place else place.copy_(item)
                for item, place in zip(results, places, strict=True)]  # fmt: skip

    def _run(self, inputs: Sequence[Tensor], places: Mapping[str, Tensor]) -> list[Tensor]:
        values: dict[str, Tensor] = {f"x{index}": item for index, item in enumerate(inputs)}
        for line in self.lines:
            args = [_filled(item, values) for item in line.args]
            kwargs = {name: _filled(item, values) for name, item in line.kwargs}
            place, writing = places.get(line.name), line.writing
            if place is not None and writing is not None and place.dtype == _result_dtype(args):
                target, name = writing
                values[line.name] = target(*args, **kwargs, **{name: place})
            else:
                values[line.name] = line.target(*args, **kwargs)
        return [values[name] for name in self.results]


def _filled(item: Any, values: dict[str, Tensor]) -> Any:
    return values[item.name] if isinstance(item, _Value) else item


def _result_dtype(args: Sequence[Any]) -> torch.dtype | None:
    """The dtype of the tensors among the arguments, if they have one shape and one dtype."""
    found = {(item.dtype, item.shape) for item in args if isinstance(item, Tensor)}
    return found.pop()[0] if len(found) == 1 else None


def _writing(target: torch._ops.OpOverload) -> tuple[Callable[..., Any], str] | None:
    """The overload that writes its one result into a tensor that it is given by name; None where there is none, or
    where the result may have another dtype than the arguments."""
    own = [(item.name, str(item.type)) for item in target._schema.arguments]
    if target not in SAME_DTYPE:
        return None
    for name in target.overloadpacket.overloads():
        other = getattr(target.overloadpacket, name)
        arguments = [(item.name, str(item.type)) for item in other._schema.arguments if not item.is_out]
        places = [item.name for item in other._schema.arguments if item.is_out]
        if len(places) == 1 and arguments == own:
            return other, places[0]
    return None


@lru_cache(maxsize=256)
def parse(text: str) -> PointwiseProgram:
    """The program of a text. Raises NotPointwiseError for anything else."""
    try:
        *steps, end = ast.parse(text.replace("; ", "\n")).body
        lines = tuple(_parse_line(step) for step in steps)
        assert isinstance(end, ast.Expr)
        names = end.value.elts if isinstance(end.value, ast.Tuple) else [end.value]
        return PointwiseProgram(lines, tuple(ast.unparse(name) for name in names))
    except (SyntaxError, AssertionError, AttributeError, ValueError) as error:
        raise NotPointwiseError(f"{text!r} is no pointwise program") from error


def _parse_line(step: ast.stmt) -> _Line:
    assert isinstance(step, ast.Assign) and isinstance(step.value, ast.Call)
    target: Any = torch.ops
    for part in ast.unparse(step.value.func).split("."):
        target = getattr(target, part)
    _check(target)
    args = tuple(_parse_argument(item) for item in step.value.args)
    kwargs = tuple((str(item.arg), _parse_argument(item.value)) for item in step.value.keywords)
    return _Line(ast.unparse(step.targets[0]), target, args, kwargs, _writing(target))


def _parse_argument(item: ast.expr) -> Any:
    if isinstance(item, ast.Name):
        return {"inf": float("inf"), "nan": float("nan")}.get(item.id, _Value(item.id))
    if isinstance(item, ast.Attribute):
        kind = getattr(torch, item.attr)
        assert isinstance(kind, torch.dtype)
        return kind
    if isinstance(item, ast.UnaryOp) and isinstance(item.operand, ast.Name):
        return -_parse_argument(item.operand)
    return ast.literal_eval(item)


def _check(target: Any) -> None:
    known = isinstance(target, torch._ops.OpOverload) and not target._schema.is_mutable
    if not known or not (_is_elementwise(target) or target == torch.ops.aten.scalar_tensor.default):
        raise NotPointwiseError(f"{target} is not elementwise")


def _is_elementwise(target: torch._ops.OpOverload) -> bool:
    return torch.Tag.pointwise in target.tags or target in UNTAGGED | FILLED_LIKE


def text_of(function: Callable[..., Tensor | Sequence[Tensor]], inputs: int, dtype: torch.dtype) -> str:
    """The text of a function of that many tensors of one shape and dtype. Raises NotPointwiseError."""
    writer = Writer()
    samples = [torch.ones(SAMPLE_SHAPE, dtype=dtype) for _ in range(inputs)]
    for index, sample in enumerate(samples):
        writer.names[id(sample)] = f"x{index}"
    with writer:
        results = function(*samples)
    return writer.text([results] if isinstance(results, Tensor) else results)


class Writer(DispatchMode):
    """Writes down the elementwise ops that run while it is active; `names` has the inputs by the id of the tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[int, str] = {}
        self._lines: list[tuple[str, str, frozenset[str]]] = []  # (name, call, names that it reads)
        self._kept: list[Any] = []  # so that an id stays that of one tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        value = func(*args, **(kwargs or {}))
        self._kept.append(value)
        if func in IDENTITIES and id(args[0]) in self.names:
            self.names[id(value)] = self.names[id(args[0])]
        elif not self.is_structure(func, args, value):
            self._write(func, args, kwargs or {}, value)
        return value

    def is_structure(self, func: Any, args: Any, value: Any) -> bool:
        """Whether the op only takes parts of what is no input yet; a subclass names the parts that are inputs."""
        return False

    def _write(self, func: Any, args: Any, kwargs: dict[str, Any], value: Any) -> None:
        target = _out_of_place(func)
        _check(target)
        options = {key: item for key, item in kwargs.items() if key not in ("device", "pin_memory", "layout")}
        items = [self._argument(item) for item in args]
        items += [f"{key}={self._argument(item)}" for key, item in options.items()]
        read = frozenset(self.names[id(item)] for item in (*args, *options.values()) if isinstance(item, Tensor))
        name = f"y{len(self._lines)}"
        self._lines.append((name, f"{target}({', '.join(items)})", read))
        self.names[id(value)] = name

    def _argument(self, item: Any) -> str:
        if isinstance(item, Tensor) and id(item) not in self.names:
            raise NotPointwiseError(f"a tensor of shape {tuple(item.shape)} is not computed element by element")
        if isinstance(item, (torch.memory_format, list, tuple)):
            raise NotPointwiseError(f"{item} is no argument of an elementwise op")
        return self.names[id(item)] if isinstance(item, Tensor) else repr(item)

    def text(self, results: Sequence[Tensor]) -> str:
        """What the results need, and their names."""
        ends = [self._argument(item) for item in results]
        wanted, lines = set(ends), list[str]()
        for name, line, read in reversed(self._lines):
            if name in wanted:
                wanted |= read
                lines.append(f"{name} = {line}")
        return "; ".join([*reversed(lines), ", ".join(ends)])


def _out_of_place(func: Any) -> Any:
    """The op that gives what an in-place op writes."""
    name, _, overload = str(func).removeprefix("aten.").rpartition(".")
    if func._schema.is_mutable and name.endswith("_") and hasattr(torch.ops.aten, name[:-1]):
        return getattr(getattr(torch.ops.aten, name[:-1]), overload)
    return func


@lru_cache(maxsize=256)
def gradient_text(text: str, inputs: int, dtype: torch.dtype) -> str:
    """The text of a program of one result and its gradients: inputs, then the result's gradient -> the result, and one
    gradient per input."""
    program = parse(text)

    def gradients(*tensors: Tensor) -> list[Tensor]:
        *values, grad = tensors
        leaves = [value.detach().requires_grad_() for value in values]
        with torch.enable_grad():
            (result,) = program(*leaves)
        found = torch.autograd.grad(result, leaves, grad, allow_unused=True)
        pairs = zip(found, leaves, strict=True)
        return [result.detach(), *(torch.zeros_like(leaf) if item is None else item for item, leaf in pairs)]

    return text_of(gradients, inputs + 1, dtype)
