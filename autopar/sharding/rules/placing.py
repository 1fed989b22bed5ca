"""How a rule function says where the tensors of a call lie on one mesh axis."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch.distributed.tensor import Partial
from torch.distributed.tensor.placement_types import Placement

from autopar.sharding.layout import REPLICATE
from autopar.sharding.op_call import OpCall, TensorSpec, is_spec, walk
from autopar.sharding.rule import Dispatch, Ring, Rule
from autopar.sharding.windows import Halo

RuleSource = str | Callable[[OpCall], Iterable[Rule]]  # a line of notation, or a function of the call
RuleTable = Mapping[str, RuleSource]  # by the name of the op overload

SUM = Partial()
MAX = Partial("max")
MIN = Partial("min")


def place(
    call: OpCall,
    inputs: Mapping[Any, Placement],
    outputs: Placement | tuple[Placement, ...],
    *,
    form: str = "",
    even: bool = False,
    internal_bytes: int = 0,
    splits: int = 0,
    halo: Halo | None = None,
    ring: Ring | None = None,
    dispatch: Dispatch | None = None,
    excludes: str = "",
    short: bool = False,
) -> Rule:
    """A rule from placements by argument (position or keyword); what is not named is replicated.

    One placement for a list of tensors holds for each of them; one for `outputs` holds for every output.
    """
    arguments: Iterable[tuple[int | str, Any]] = itertools.chain(enumerate(call.args), call.kwargs)
    placements = tuple(
        inputs.get(key, REPLICATE) for key, value in arguments for leaf in walk(value) if isinstance(leaf, TensorSpec)
    )
    results = outputs if isinstance(outputs, tuple) else (outputs,) * len(call.outputs)
    return Rule(placements, results, form, even, internal_bytes, splits, halo, ring, dispatch, excludes, short)


def long_dims(spec: TensorSpec) -> tuple[int, ...]:
    """The dims that can be cut at all: those longer than one."""
    return tuple(dim for dim, size in enumerate(spec.shape) if size > 1)


def tensor_at(call: OpCall, index: int) -> TensorSpec | None:
    """The tensor at an argument position, or None where there is no tensor."""
    value = call.args[index] if index < len(call.args) else None
    return value if isinstance(value, TensorSpec) else None


def required_tensor_at(call: OpCall, index: int) -> TensorSpec:
    """The tensor at an argument position whose type is a tensor."""
    value = call.args[index]
    assert isinstance(value, TensorSpec), f"{call.name}: argument {index} is no tensor"
    return value


def tensors_in(value: Any) -> tuple[TensorSpec, ...]:
    """All tensors of a nested argument."""
    return tuple(leaf for leaf in walk(value) if is_spec(leaf))


def result(call: OpCall, index: int = 0) -> TensorSpec:
    """An output that is always computed."""
    spec = call.outputs[index]
    assert spec is not None, f"{call.name}: output {index} is not computed"
    return spec


def wrap_dim(dim: int, rank: int) -> int:
    """A dim counted from the front."""
    return dim + rank if dim < 0 else dim


def wrap_dims(dims: Any, rank: int) -> tuple[int, ...]:
    """Dims of a reduction counted from the front; None or an empty list means all of them. A scalar has none."""
    if dims is None or dims == () or not rank:
        return tuple(range(rank))
    listed = dims if isinstance(dims, tuple) else (dims,)
    return tuple(wrap_dim(dim, rank) for dim in listed)


def summable(spec: TensorSpec | None) -> bool:
    """Whether addends of such a tensor can be all-reduced: integers and real numbers, no bool, no complex."""
    return (
        spec is not None and spec.dtype.itemsize > 0 and not spec.dtype.is_complex and str(spec.dtype) != "torch.bool"
    )


def names(text: str) -> tuple[str, ...]:
    """The words of a table's column."""
    return tuple(text.split())
