"""Calls of single ops with real arguments, recorded from PyTorch's own samples."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.sharding.op_call import OpCall, spec_of

SAMPLES_PER_OP = 10
LARGEST_SAMPLE = 5000  # elements
UNDEFINED_VALUES = (".empty", ".new_empty", ".resize")  # how the names of ops begin whose values nobody can compare


@dataclass(frozen=True)
class Sample:
    """A call and the tensors it was made with."""

    call: OpCall
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


def has_defined_values(name: str) -> bool:
    """Whether what an op returns is defined by its inputs."""
    return not any(part in name for part in UNDEFINED_VALUES)


class Recorder(TorchDispatchMode):
    """Keeps one sample per distinct call of every functional op that runs below it."""

    def __init__(self) -> None:
        super().__init__()
        self.samples: dict[str, dict[OpCall, Sample]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            return func(*args, **kwargs)
        copies = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), (args, kwargs))
        value = func(*args, **kwargs)
        call = recorded_call(func, args, kwargs, value)
        if _is_hashable(call):
            self.samples.setdefault(call.name, {}).setdefault(call, Sample(call, *copies))
        return value


def recorded_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> OpCall:
    """The call of an op on real tensors."""
    leaves = pytree.tree_leaves(value, is_leaf=lambda leaf: leaf is None)
    outputs = tuple(spec_of(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in leaves)
    return OpCall(func, frozen(args), tuple((name, frozen(item)) for name, item in kwargs.items()), outputs)


def frozen(value: Any) -> Any:
    """Tensors to specs, lists to tuples."""
    if isinstance(value, torch.Tensor):
        return spec_of(value)
    if isinstance(value, (tuple, list)):
        return tuple(frozen(item) for item in value)
    return value


def _is_hashable(call: OpCall) -> bool:
    try:
        hash(call)
    except TypeError:
        return False
    return True


def op_db_samples(names: Collection[str] = ()) -> dict[str, dict[OpCall, Sample]]:
    """Samples by op overload: what runs when PyTorch's test inputs (of functions of these names, or of all) go forward
    and backward, in float64."""
    with ThreadPoolExecutor(1) as pool:  # PyTorch inspects the whole stack for each sample: a thread's is short
        return pool.submit(_record_op_db, names).result()


def _record_op_db(names: Collection[str]) -> dict[str, dict[OpCall, Sample]]:
    from torch.testing._internal.common_methods_invocations import op_db

    recorder = Recorder()
    with warnings.catch_warnings(action="ignore"):
        for op in op_db:
            if names and op.name not in names:
                continue
            torch.manual_seed(0)
            for sample in _inputs(op):
                _run(op, sample, recorder)
    return recorder.samples


def merged(*tables: dict[str, dict[OpCall, Sample]]) -> dict[str, dict[OpCall, Sample]]:
    """All samples of all tables."""
    return {
        name: {call: it for table in tables for call, it in table.get(name, {}).items()}
        for name in set().union(*tables)
    }


def elementwise_samples() -> dict[str, dict[OpCall, Sample]]:
    """One sample of every functional overload that PyTorch tags as elementwise, with arguments made from its schema."""
    samples = {}
    packets = (getattr(torch.ops.aten, name) for name in dir(torch.ops.aten))
    for packet in packets:
        for overload in packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else ():
            op = getattr(packet, overload)
            if torch.Tag.pointwise in op.tags and not op._schema.is_mutable:
                sample = _from_schema(op)
                samples[str(op)] = {sample.call: sample} if sample else {}
    return samples


def _from_schema(op: torch._ops.OpOverload) -> Sample | None:
    """A call on tensors of 6 x 4 and on the number 2, in floats or, where the op refuses those, in integers."""
    required = [argument for argument in op._schema.arguments if not argument.has_default_value()]
    for dtype in (torch.float64, torch.int64):
        made = [_argument(str(argument.type), dtype) for argument in required]
        args = tuple(value for value, argument in zip(made, required, strict=True) if not argument.kwarg_only)
        kwargs = {argument.name: value for value, argument in zip(made, required, strict=True) if argument.kwarg_only}
        try:
            return Sample(recorded_call(op, args, kwargs, op(*args, **kwargs)), args, kwargs)
        except (RuntimeError, TypeError):
            continue
    return None


def _argument(kind: str, dtype: torch.dtype) -> Any:
    if kind == "Tensor":
        return torch.rand(6, 4, dtype=dtype) + 0.5 if dtype.is_floating_point else torch.randint(1, 5, (6, 4))
    return {"bool": True, "str": "none"}.get(kind, 2)


def _inputs(op: Any) -> Iterator[Any]:
    dtypes = op.supported_dtypes("cpu")
    dtype = next((dtype for dtype in (torch.float64, torch.int64) if dtype in dtypes), None)
    if dtype is None:
        return
    with_gradient = op.supports_autograd and dtype == torch.float64
    try:
        for number, sample in enumerate(op.sample_inputs("cpu", dtype, requires_grad=with_gradient)):
            if number == SAMPLES_PER_OP:
                return
            yield sample
    except Exception:  # a few generators need packages or hardware that are not here
        return


def _run(op: Any, sample: Any, recorder: Recorder) -> None:
    given = [leaf for leaf in pytree.tree_leaves((sample.input, sample.args, sample.kwargs)) if _is_tensor(leaf)]
    if sum(tensor.numel() for tensor in given) > LARGEST_SAMPLE:
        return
    try:
        with recorder:
            outputs = pytree.tree_leaves(op(sample.input, *sample.args, **sample.kwargs))
            reached = [leaf for leaf in outputs if _is_tensor(leaf) and leaf.requires_grad]
            sources = [tensor for tensor in given if tensor.requires_grad]
            if reached and sources:
                tangents = [torch.randn_like(leaf) for leaf in reached]
                torch.autograd.grad(reached, sources, tangents, allow_unused=True)
    except Exception:  # samples of sparse tensors and the like: whatever ran until then is recorded
        return


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)
