"""Elementwise ops: every dim of the broadcast result may be sharded; where an op is linear, partial sums pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from autopar.sharding.layout import REPLICATE
from autopar.sharding.op_call import OpCall, TensorSpec
from autopar.sharding.rule import Rule
from autopar.sharding.rules.placing import SUM, RuleTable, long_dims, names, place, result, summable

# Ops that work element by element, beyond those that PyTorch tags so.
UNTAGGED = names("""
    _to_copy.default alias.default alias_copy.default detach.default detach_copy.default lift_fresh.default
    lift_fresh_copy.default copy.default zeros_like.default ones_like.default empty_like.default
    full_like.default fill.Scalar fill.Tensor masked_fill.Tensor hardtanh_backward.default hardswish.default
    hardswish_backward.default hardsigmoid_backward.default elu_backward.default leaky_relu_backward.default
    softplus_backward.default softshrink_backward.default hardshrink_backward.default mish_backward.default
    log_sigmoid_forward.default log_sigmoid_backward.default logit_backward.default rsub.Tensor
    _prelu_kernel.default _prelu_kernel_backward.default floor_divide.default __lshift__.Scalar
    __lshift__.Tensor __rshift__.Scalar __rshift__.Tensor rrelu_with_noise_backward.default _conj.default
    _neg_view.default complex.default polar.default isin.Tensor_Scalar bitwise_not.default div.Scalar_mode
""")

# For each op, the sets of operands in which it is linear together, by argument position: partial sums in all operands
# of a set, whole values in the others, give partial sums of the result.
LINEAR: dict[str, tuple[tuple[int, ...], ...]] = {
    **dict.fromkeys(
        names("""
            neg.default positive.default clone.default alias.default alias_copy.default detach.default
            lift_fresh.default lift_fresh_copy.default mul.Scalar div.Scalar div.Tensor deg2rad.default
            rad2deg.default masked_fill.Scalar tanh_backward.default sigmoid_backward.default
            silu_backward.default gelu_backward.default threshold_backward.default hardtanh_backward.default
            hardswish_backward.default hardsigmoid_backward.default elu_backward.default
            leaky_relu_backward.default softplus_backward.default softshrink_backward.default
            hardshrink_backward.default mish_backward.default log_sigmoid_backward.default
            logit_backward.default native_dropout_backward.default
        """),
        ((0,),),
    ),
    "mul.Tensor": ((0,), (1,)),
    "add.Tensor": ((0, 1),),
    "sub.Tensor": ((0, 1),),
    "rsub.Tensor": ((0, 1),),
    "where.self": ((1, 2),),
    "lerp.Scalar": ((0, 1),),
    "lerp.Tensor": ((0, 1),),
    "addcmul.default": ((0, 1), (0, 2)),
    "addcdiv.default": ((0, 1),),
    "copy.default": ((1,),),
}
SCALAR_MUST_BE_ZERO = {"masked_fill.Scalar": 2}  # position of a scalar that is written into the result

NOT_ELEMENTWISE = (torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output)  # whatever else it is tagged


def pointwise(call: OpCall) -> Iterator[Rule]:
    """One rule per dim of the result, then the linear ones."""
    if None in call.outputs:  # a Python value, as of `equal`
        return
    shape = result(call).shape
    for dim, size in enumerate(shape):
        if size > 1:
            inputs = tuple(aligned(spec, dim, shape) for spec in call.inputs)
            yield Rule(inputs, (Shard(dim),) * len(call.outputs))
    yield from linear(call)


def aligned(spec: TensorSpec, dim: int, shape: tuple[int, ...]) -> Placement:
    """The placement of an operand when dim `dim` of the broadcast result is cut."""
    own = dim - (len(shape) - len(spec.shape))
    return Shard(own) if own >= 0 and spec.shape[own] == shape[dim] else REPLICATE


def linear(call: OpCall) -> Iterator[Rule]:
    """Rules that let partial sums through."""
    name = call.name.removeprefix("aten.")
    written = SCALAR_MUST_BE_ZERO.get(name)
    if not all(map(summable, call.outputs)) or (written is not None and call.args[written] != 0):
        return
    for operands in LINEAR.get(name, ()):
        if all(_carries_addends(call, index) for index in operands):
            yield place(call, dict.fromkeys(operands, SUM), SUM)


def _carries_addends(call: OpCall, index: int) -> bool:
    """Whether an operand can be split into addends: a tensor, or a literal zero."""
    operand = call.args[index] if index < len(call.args) else None
    if isinstance(operand, TensorSpec):
        return summable(operand)
    return isinstance(operand, (int, float)) and operand == 0


def conversion(call: OpCall) -> Iterator[Rule]:
    """`_to_copy`: partial sums pass where the new dtype holds every value of the old one."""
    yield from pointwise(call)
    old, new = call.inputs[0], result(call)
    if summable(old) and summable(new) and torch.promote_types(old.dtype, new.dtype) == new.dtype:
        yield Rule((SUM,), (SUM,))


def zeros_like(call: OpCall) -> Iterator[Rule]:
    """Zeros are the addends of zeros; the values of the input do not matter."""
    yield from pointwise(call)
    if summable(call.inputs[0]) and summable(result(call)):
        yield Rule((SUM,), (SUM,))


def real_view(call: OpCall) -> Iterator[Rule]:
    """`view_as_real` and its inverse: all dims but the last of the real tensor."""
    rank = min(len(call.inputs[0].shape), len(result(call).shape))
    for dim in range(rank):
        if result(call).shape[dim] > 1:
            yield Rule((Shard(dim),), (Shard(dim),))


def first_operand(call: OpCall) -> Iterator[Rule]:
    """Elementwise in the first operand; the others are whole."""
    for dim in long_dims(result(call)):
        yield place(call, {0: Shard(dim)}, Shard(dim))


def is_pointwise(call: OpCall) -> bool:
    """Whether PyTorch tags the op as elementwise, deterministic and of tensors (not as `equal`, which gives a bool)."""
    tags = set(getattr(call.target, "tags", ()))
    return call.name.startswith("aten.") and torch.Tag.pointwise in tags and tags.isdisjoint(NOT_ELEMENTWISE)


_SPECIAL: dict[str, Callable[[OpCall], Iterator[Rule]]] = {
    "aten._to_copy.default": conversion,
    "aten.zeros_like.default": zeros_like,
    "aten.bucketize.Tensor": first_operand,
    "aten.isin.Tensor_Tensor": first_operand,
    "aten.view_as_real.default": real_view,
    "aten.view_as_complex.default": real_view,
}
RULES: RuleTable = {**{f"aten.{name}": pointwise for name in UNTAGGED}, **_SPECIAL}
