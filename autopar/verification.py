"""verify(): the emitted program against the single-device one, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autopar.capture.precision import Precision
from autopar.capture.program import InputKind, LeafIndex, OutputKind, Program, is_number
from autopar.capture.trace import input_gradient, tensor_leaves
from autopar.plan import Plan
from autopar.report.figures import rendered
from autopar.runtime.inputs import batch_of, nth_microbatch
from autopar.runtime.pipeline.module import PipelineModule
from autopar.runtime.strided import Strided
from autopar.runtime.tangents import varied_tangents
from autopar.runtime.twins import run_apart, twin_of
from autopar.runtime.virtual_run import program_values

TOLERANCES = {torch.float64: (1e-10, 1e-10), torch.float32: (1e-5, 1e-4)}  # (outputs, gradients), relative
ROUNDING_UNITS = 16.0
SAVED_ERRORS = 4.0  # of a gradient: it is a product of some saved values, one after the other
LOW_PRECISION = (2e-2, 5e-2)  # bf16 and fp16: sums are rounded in another order


@dataclass(frozen=True, slots=True)
class Comparison:
    """One tensor: the largest difference, relative to the largest magnitude of the expected tensor."""

    name: str
    kind: str  # output, gradient or buffer
    relative_error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return self.relative_error <= self.tolerance


@dataclass(frozen=True)
class Report:
    """How far the distributed program is from the single-device one."""

    comparisons: tuple[Comparison, ...]
    reference: str  # what the expected values came from
    plan: Plan | None = None  # what was followed
    peak_bytes: int | None = None  # measured, of the rank that held most; only on virtual ranks

    @property
    def ok(self) -> bool:
        """Whether every tensor is within its tolerance."""
        return all(item.ok for item in self.comparisons)

    @property
    def worst(self) -> Comparison:
        return max(self.comparisons, key=lambda item: item.relative_error / item.tolerance)

    @property
    def worst_tensor(self) -> str:
        return self.worst.name

    @property
    def worst_relative_error(self) -> float:
        return self.worst.relative_error

    @property
    def table(self) -> str:
        """Every tensor with its error, worst first."""
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for name in ("tensor", "kind", "relative error", "tolerance", ""):
            table.add_column(name, overflow="fold")
        for item in sorted(self.comparisons, key=lambda item: -item.relative_error / item.tolerance):
            verdict = "ok" if item.ok else "WRONG"
            table.add_row(item.name, item.kind, f"{item.relative_error:.2e}", f"{item.tolerance:.0e}", verdict)
        return rendered(table)

    def __str__(self) -> str:
        verdict = "verified" if self.ok else "NOT EQUAL"
        memory = ""
        if self.plan is not None and self.peak_bytes is not None:
            memory = f"; at most {self.peak_bytes / 1e6:,.3f} MB held, {self.plan.peak_bytes / 1e6:,.3f} MB planned"
        return (
            f"{verdict}: {len(self.comparisons)} tensors against {self.reference}; worst {self.worst_tensor} "
            f"with a relative error of {self.worst_relative_error:.2e}{memory}"
        )


@dataclass(frozen=True)
class Values:
    """Results of one training step, full tensors by name.

    `computed_in`: by (field, name), the least precise dtype through which a tensor was computed.
    """

    outputs: Mapping[str, torch.Tensor]
    gradients: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    computed_in: Mapping[tuple[str, str], torch.dtype] = field(default_factory=dict)


def relative_error(actual: torch.Tensor, expected: torch.Tensor, *, least_scale: float = 0.0) -> float:
    """max |actual - expected| / max(max |expected|, least_scale).

    Not-a-number and infinity must stand in the same places; integers and shapes must be equal.
    """
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return float("inf")
    if not expected.numel():
        return 0.0
    if not expected.dtype.is_floating_point and not expected.dtype.is_complex:
        return 0.0 if torch.equal(actual, expected) else float("inf")
    finite = torch.isfinite(expected)
    if not torch.equal(torch.isfinite(actual), finite) or not torch.equal(
        actual[~finite].nan_to_num(), expected[~finite].nan_to_num()
    ):
        return float("inf")
    wide = torch.promote_types(expected.dtype, torch.float64)
    left, right = actual[finite].to(wide), expected[finite].to(wide)
    if not right.numel():
        return 0.0
    scale = max(float(right.abs().max()), least_scale)
    difference = float((left - right).abs().max())
    return difference / scale if scale > 0 else (0.0 if difference == 0 else difference)


def compare(
    actual: Values, expected: Values, *, reference: str, tolerance: float | None = None, saved_error: float = 0.0
) -> Report:
    """Every output, gradient and buffer of `expected` against `actual`.

    `saved_error`: of the values that the backward reads, where they were held in less precision.

    A gradient may be zero in exact arithmetic (a bias before batch norm, a key's bias), and so may a running mean: what
    is left is the rounding of larger terms. So its scale is at least that at which the tolerance is `ROUNDING_UNITS`
    units of rounding of the largest tensor of its kind: what a sum of some hundred such terms loses in another order.

    A gradient that is not expected, since no part of the model that ran needs one (an expert that no token chose, in a
    loop that skips it), must be zero in every element.
    """
    comparisons = []
    for kind, index in (("outputs", 0), ("gradients", 1), ("buffers", 0)):
        wanted, found = getattr(expected, kind), getattr(actual, kind)
        largest = _largest(wanted) if kind != "outputs" else 0.0
        for name in sorted(wanted.keys() | found.keys()):
            dtype = wanted[name].dtype if name in wanted else torch.float32
            dtype = expected.computed_in.get((kind, name), dtype)
            usual = max(TOLERANCES.get(dtype, LOW_PRECISION)[index], index * SAVED_ERRORS * saved_error)
            limit = tolerance or usual
            error = float("inf")
            if name in wanted and name in found:
                least = ROUNDING_UNITS * largest * torch.finfo(dtype).eps / limit if dtype.is_floating_point else 0.0
                error = relative_error(found[name].detach().cpu(), wanted[name].detach().cpu(), least_scale=least)
            elif kind == "gradients" and name in found and not found[name].detach().any():
                error = 0.0
            comparisons.append(Comparison(name, kind[:-1], error, limit))
    return Report(tuple(comparisons), reference)


def _largest(tensors: Mapping[str, torch.Tensor]) -> float:
    floating = [tensor.detach() for tensor in tensors.values() if tensor.numel() and tensor.is_floating_point()]
    magnitudes = [float(tensor.abs().max()) for tensor in floating]
    return max((value for value in magnitudes if math.isfinite(value)), default=0.0)


def is_random(program: Program) -> bool:
    """Whether any op draws random numbers: then eager PyTorch's masks are not those of the program."""
    return any(node.users for node in program.named_inputs(InputKind.SEED).values())


def computed_in(program: Program) -> dict[tuple[str, str], torch.dtype]:
    """By (field of `Values`, name): the dtype to whose precision an output is known, where that is not its own.

    It is the bf16 or fp16 through which it was computed, or the finest dtype of what the program is given.
    """
    finest = _finest_source(program)
    coarsest: dict[torch.fx.Node, torch.dtype] = {}
    for node in program.graph_module.graph.nodes:
        own = getattr(node.meta.get("val"), "dtype", None)
        found = [coarsest[source] for source in node.all_input_nodes if source in coarsest]
        found += [own] if own in (torch.bfloat16, torch.float16) else []
        if found:
            coarsest[node] = max(found, key=_epsilon)
    known = {}
    for output, node in zip(program.outputs, program.results, strict=True):
        own = node.meta["val"].dtype
        if own.is_floating_point:
            kind = max((own, coarsest.get(node, own), finest or own), key=_epsilon)
            known[_FIELDS.get(output.kind, "outputs"), output.name] = kind
    return known


def _finest_source(program: Program) -> torch.dtype | None:
    """Of the parameters, buffers and inputs that are floating-point numbers."""
    kinds = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.INPUT)
    nodes = [node for kind in kinds for node in program.named_inputs(kind).values()]
    dtypes = {node.meta["val"].dtype for node in nodes}
    return min((dtype for dtype in dtypes if dtype.is_floating_point), key=_epsilon, default=None)


def _epsilon(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


_FIELDS = {OutputKind.GRADIENT: "gradients", OutputKind.BUFFER: "buffers"}  # of Values; others are outputs


def fresh_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call on copies of its tensors, so that gradients do not pile up on the caller's."""

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)

    fresh: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_only(torch.Tensor, copied, (args, kwargs))
    return fresh


def input_gradients(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The gradients that arrived at the tensors of a call, by the names that a program gives them."""
    leaves = tensor_leaves(args, kwargs).items()
    return {input_gradient(name): item.grad for name, item in leaves if item.grad is not None}


def eager_values(
    model: nn.Module,
    program: Program,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    precision: Precision | None = None,
) -> Values:
    """One step of a copy of the model as PyTorch runs it, differentiated where the program is."""
    args, kwargs = fresh_inputs(args, kwargs)
    run = run_apart(model, args, kwargs, precision)
    leaves = pytree.tree_leaves(run.result, is_leaf=lambda leaf: leaf is None)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    outputs = [output for output in program.outputs if output.kind in (OutputKind.LOSS, OutputKind.OUTPUT)]
    roots = {output.name: item for output, item in zip(outputs, tensors, strict=True) if output.differentiable}
    _run_backward(program, roots)
    gradients = {name: item.grad for name, item in run.parameters.items() if item.grad is not None}
    gradients |= input_gradients(args, kwargs)
    written = {output.name for output in program.outputs if output.kind is OutputKind.BUFFER}
    buffers = {name: item for name, item in run.buffers.items() if name in written}
    found = {output.name: item for output, item in zip(outputs, tensors, strict=True)}
    return Values(found, gradients, buffers, computed_in(program))


def _run_backward(program: Program, roots: Mapping[str, torch.Tensor]) -> None:
    tangents = varied_tangents(program)
    if roots:
        torch.autograd.backward(
            tuple(roots.values()), tuple(tangents[name].to(root.device) for name, root in roots.items())
        )


def traced_values(model: nn.Module, program: Program, inputs: Mapping[str, torch.Tensor], seed: int) -> Values:
    """One step of the captured program in full, on one device: what random models are compared with."""
    values = program_values(model, program, inputs, seed, varied_tangents(program))
    with torch.no_grad():
        results = Strided(program.graph_module).run(*(values[item.node] for item in program.inputs))
    found: dict[str, dict[str, torch.Tensor]] = {"outputs": {}, "gradients": {}, "buffers": {}}
    for output, value in zip(program.outputs, results, strict=True):
        found[_FIELDS.get(output.kind, "outputs")][output.name] = value
    return Values(**found, computed_in=computed_in(program))


def accumulated_values(
    model: nn.Module,
    program: Program,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    count: int,
    *,
    seed: int,
    precision: Precision | None,
) -> Values:
    """The mean loss of `count` equal microbatches, its gradients, and the buffers after the last of them.

    `program`: of one microbatch. Each runs on a copy of the model with the buffers that the one before it left; a
    random model runs as the captured program, each microbatch with a seed of its own.
    """
    twin, found = twin_of(model), list[Values]()
    for number in range(count):
        own_args, own_kwargs = nth_microbatch(args, kwargs, count, number)
        if is_random(program):
            one = traced_values(twin, program, tensor_leaves(own_args, own_kwargs), seed + number)
        else:
            one = eager_values(twin, program, own_args, own_kwargs, precision)
        found.append(one)
        with torch.no_grad():
            for name, value in one.buffers.items():
                twin.get_buffer(name).copy_(value)
    outputs = {
        name: _mean_of([one.outputs[name] for one in found])
        if is_number(value)
        else _joined([one.outputs[name] for one in found], batch_of(args, kwargs) // count)
        for name, value in found[0].outputs.items()
    }
    gradients = {name: _mean_of([one.gradients[name] for one in found if name in one.gradients], count)
                 for name in _names([one.gradients for one in found])}  # fmt: skip
    return replace(found[-1], outputs=outputs, gradients=gradients)


def _names(every: Sequence[Mapping[str, torch.Tensor]]) -> list[str]:
    return list(dict.fromkeys(name for one in every for name in one))


def _mean_of(values: Sequence[torch.Tensor], count: int = 0) -> torch.Tensor:
    """Of so many values, of which those that are left out are zero; in float64 or more, in their own dtype again."""
    total = sum(value.detach().to(torch.promote_types(value.dtype, torch.float64)) for value in values)
    assert isinstance(total, torch.Tensor)
    return (total / (count or len(values))).to(values[0].dtype)


def _joined(values: Sequence[torch.Tensor], samples: int) -> torch.Tensor:
    """An output of all samples, so many in each; one that is not of samples is the last microbatch's."""
    return torch.cat(list(values)) if values[0].shape[:1] == (samples,) else values[-1]


def full_values(pmodel: nn.Module, program: Program, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Values:
    """One step of a parallel module on these inputs, everything gathered."""
    args, kwargs = fresh_inputs(args, kwargs)
    with pmodel.outputs_everywhere() if isinstance(pmodel, PipelineModule) else nullcontext():
        result = pmodel(*args, **kwargs)
    leaves = pytree.tree_leaves(result, is_leaf=lambda leaf: leaf is None)
    names = [output.name for output in program.outputs]
    marked = zip(program.output_leaves, leaves, strict=True)
    outputs = {names[mark.index]: leaf for mark, leaf in marked if isinstance(mark, LeafIndex)}
    _run_backward(program, {item.name: outputs[item.name] for item in program.outputs if item.differentiable})
    if isinstance(pmodel, PipelineModule):
        gradients = pmodel.full_gradients()
    else:
        gradients = {name: _full(item.grad) for name, item in pmodel.named_parameters() if item.grad is not None}
    gradients |= {name: _full(item) for name, item in input_gradients(args, kwargs).items()}
    written = {output.name for output in program.outputs if output.kind is OutputKind.BUFFER}
    buffers = {name: _full(item) for name, item in pmodel.named_buffers() if name in written}
    return Values({name: _full(value) for name, value in outputs.items()}, gradients, buffers)


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
