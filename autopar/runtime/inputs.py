"""The user's call: its key, its tensors, and this rank's part of each."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autopar.capture.program import InputKind, Program
from autopar.capture.trace import tensor_leaves
from autopar.errors import InputError, NotDivisibleError
from autopar.runtime.parameters import in_layout
from autopar.sharding.assignment import Assignment
from autopar.sharding.layout import Layout, format_layout, is_partial, ranks_per_dim
from autopar.sharding.op_call import TensorSpec
from autopar.sharding.strategies import shardable

PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.memory_format, enum.Enum)


@dataclass(frozen=True)
class Modes:
    """What a captured program depends on besides the call's inputs."""

    training: tuple[bool, ...]  # by module
    requires_grad: tuple[bool, ...]  # by parameter
    gradients: bool
    autocast: tuple[str, ...]


def modes_now(training: Sequence[bool], requires_grad: Sequence[bool], device_types: Sequence[str]) -> Modes:
    """The modes of this moment; autocast for each device type."""
    casts = tuple(
        f"{device} {torch.get_autocast_dtype(device)}"
        for device in dict.fromkeys(device_types)
        if torch.is_autocast_enabled(device)
    )
    return Modes(tuple(training), tuple(requires_grad), torch.is_grad_enabled(), casts)


def call_key(args: tuple[Any, ...], kwargs: dict[str, Any], modes: Modes) -> str:
    """All that a program depends on, as text with one line per input: equal keys run the same compiled step.

    Raises InputError for an input that is neither a tensor nor a plain value.
    """
    leaves, spec = pytree.tree_flatten_with_path((args, kwargs))
    lines = [f"input {pytree.keystr(path[1:])} = {_leaf_text(pytree.keystr(path[1:]), leaf)}" for path, leaf in leaves]
    lines.append(f"structure {spec}")
    lines.append("gradients " + ("on" if modes.gradients else "off"))
    lines.append("training " + _flags(modes.training))
    lines.append("requires_grad " + _flags(modes.requires_grad))
    lines.append("autocast " + (", ".join(modes.autocast) or "off"))
    return "\n".join(lines)


def _leaf_text(path: str, leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        gradient = " requires_grad" if leaf.requires_grad and torch.is_grad_enabled() else ""
        return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}{gradient}"
    if not isinstance(leaf, PLAIN):
        raise InputError(
            f"input {path} is a {type(leaf).__name__}",
            fix="pass tensors and plain values, in tuples, lists, dicts or types registered with torch.utils._pytree",
        )
    return repr(leaf)


def _flags(flags: Sequence[bool]) -> str:
    """`all`, `none`, or the flags packed in hexadecimal."""
    if len(set(flags)) <= 1:
        return "all" if all(flags) else "none"
    return hex(int("".join("01"[flag] for flag in flags), 2))


def check_inputs_divide(program: Program, assignment: Assignment) -> None:
    """Raise NotDivisibleError for an input that is cut along a dim which the ranks do not divide."""
    for name, node in program.named_inputs(InputKind.INPUT).items():
        value: Tensor = node.meta["val"]
        layout = assignment.inputs[node.name]
        spec = TensorSpec(tuple(value.shape), value.dtype)
        if any(map(is_partial, layout)):
            raise InputError(f"the plan wants input {name!r} as a partial sum", fix="pin it to R or to a shard")
        if not shardable(spec, layout, assignment.mesh_shape, even=False):
            raise NotDivisibleError(_not_divisible(name, spec, layout, assignment.mesh_shape), fix=_FIX)


_FIX = "pad or drop the last batch (drop_last=True), or plan with example inputs of this size"


def _not_divisible(name: str, spec: TensorSpec, layout: Layout, mesh_shape: Sequence[int]) -> str:
    ways = ranks_per_dim(len(spec.shape), layout, mesh_shape)
    bad = [(dim, size, cut) for dim, (size, cut) in enumerate(zip(spec.shape, ways, strict=True)) if size % cut]
    if not bad:
        return f"input {name!r} of shape {list(spec.shape)} cannot lie in layout {format_layout(layout)}"
    dim, size, cut = bad[0]
    return f"dim {dim} of input {name!r} has size {size}, which does not divide by the {cut} ranks that share it"


def user_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """The call's tensors by path; a DTensor among them must be whole."""
    leaves = tensor_leaves(args, kwargs)
    for name, leaf in leaves.items():
        if isinstance(leaf, DTensor) and any(map(is_partial, leaf.placements)):
            raise InputError(f"input {name!r} is a DTensor with a partial sum", fix="redistribute it first")
    return leaves


def rank_part(value: Tensor, mesh: DeviceMesh, layout: Layout) -> Tensor:
    """This rank's part of an input: a chunk of a plain tensor (all ranks hold the whole), the shard of a DTensor.

    A DTensor that lies in the planned layout is used as it is; any other is redistributed.
    """
    return in_layout(value, mesh, layout)


def microbatches_of(args: tuple[Any, ...], kwargs: dict[str, Any], most: int) -> int:
    """Into how many equal microbatches a call divides: at most so many."""
    size = batch_of(args, kwargs)
    return max(count for count in range(1, min(most, max(1, size)) + 1) if size % count == 0)


def batch_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The samples of a call: dim 0 of its first tensor that has dims; 1 if there is none."""
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.dim()]
    return int(leaves[0].shape[0]) if leaves else 1


def first_microbatch(
    args: tuple[Any, ...], kwargs: dict[str, Any], microbatches: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The part of a call that is the first of equal microbatches: tensors as long as the first one are cut.

    Raises InputError for a batch that does not divide.
    """
    return nth_microbatch(args, kwargs, microbatches, 0)


def nth_microbatch(
    args: tuple[Any, ...], kwargs: dict[str, Any], microbatches: int, number: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The part of a call that is one of equal microbatches; see `first_microbatch`."""
    size = batch_of(args, kwargs)
    if size % microbatches:
        raise InputError(
            f"a batch of {size} does not divide into {microbatches} microbatches that are batches by themselves",
            fix="use a batch, or microbatches=, that divides",
        )

    each = size // microbatches

    def cut(leaf: Any) -> Any:
        batched = isinstance(leaf, Tensor) and leaf.shape[:1] == (size,)
        return leaf[number * each : (number + 1) * each] if batched else leaf

    part: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(cut, (args, kwargs))
    return part
