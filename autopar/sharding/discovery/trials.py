"""One trial of a rule: an op on the whole, on the shards of each rank, and which placements put the whole together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from autopar.sharding.discovery.scaling import Problem
from autopar.sharding.execution import distribute, recombine
from autopar.sharding.layout import REPLICATE, Layout, chunk, shard_dim
from autopar.torch_compat import FakeTensorMode

Outputs = tuple[Tensor | None, ...]
REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


@dataclass(frozen=True)
class Trial:
    """Inputs, what the op makes of them, and over how many ranks they are to be cut."""

    problem: Problem
    tensors: list[Tensor]
    expected: Outputs
    ranks: int


def run_ranks(trial: Trial, layouts: Sequence[Layout], mesh_shape: tuple[int, ...]) -> list[Outputs]:
    """What each rank makes of its shards. Raises whatever the op raises on them."""
    shards = [distribute(tensor, layout, mesh_shape) for tensor, layout in zip(trial.tensors, layouts, strict=True)]
    return [trial.problem.run(list(rank)) for rank in zip(*shards, strict=True)]


def fakes_agree(trial: Trial, inputs: Sequence[Placement]) -> bool:
    """Whether the op's form on fake tensors foretells the shapes of what it makes of the shards.

    The shapes in an emitted program are those that it foretells.
    """
    shards = [distribute(tensor, (placement,), (2,)) for tensor, placement in zip(trial.tensors, inputs, strict=True)]
    for rank in zip(*shards, strict=True):
        made = trial.problem.run(list(rank))
        with FakeTensorMode() as mode:
            foretold = trial.problem.run([mode.from_tensor(shard) for shard in rank])
        if list(map(_form, made)) != list(map(_form, foretold)):
            return False
    return True


def _form(value: Tensor | None) -> object:
    return None if value is None else (tuple(value.shape), value.dtype)


def outputs_that_hold(trials: Sequence[Trial], inputs: Sequence[Placement]) -> tuple[Placement, ...] | None:
    """The placements of the outputs under which every trial gives the op's result; None if there are none."""
    left: list[set[Placement]] | None = None
    for trial in trials:
        found = _possible_outputs(trial, inputs)
        if found is None:
            return None
        left = found if left is None else [old & new for old, new in zip(left, found, strict=True)]
        if not all(left):
            return None
    return None if left is None else tuple(min(own, key=_preference) for own in left)


def _preference(placement: Placement) -> tuple[int, str]:
    """Whole values before shards before sums before maxima, where the trials cannot tell them apart."""
    order = 0 if placement == REPLICATE else 1 if isinstance(placement, Shard) else 2 if placement == Partial() else 3
    return order, str(placement)


def _possible_outputs(trial: Trial, inputs: Sequence[Placement]) -> list[set[Placement]] | None:
    """Per output, every placement that its parts may have been; None where the op does not run or one has none."""
    try:
        parts = run_ranks(trial, [(placement,) for placement in inputs], (trial.ranks,))
    except Exception:  # whatever an op says to shards that it cannot take
        return None
    found = []
    for index, whole in enumerate(trial.expected):
        own = [outputs[index] if index < len(outputs) else None for outputs in parts]
        placements = _possible(own, whole, trial.ranks)
        if not placements:
            return None
        found.append(placements)
    return found


def _possible(parts: Sequence[Tensor | None], whole: Tensor | None, ranks: int) -> set[Placement]:
    if whole is None:
        return {REPLICATE} if all(part is None for part in parts) else set()
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if len(tensors) < ranks or any(part.dtype != whole.dtype or part.dim() != whole.dim() for part in tensors):
        return set()
    found: set[Placement] = set()
    if all(part.shape == whole.shape for part in tensors):
        if all(same_bits(part, tensors[0]) for part in tensors[1:]) and agree(tensors[0], whole):
            found.add(REPLICATE)
        found |= {Partial(name) for name in REDUCTIONS if _reduces_to(tensors, whole, name)}
    return found | {Shard(dim) for dim in range(whole.dim()) if _is_cut(tensors, whole, dim)}


def _reduces_to(parts: Sequence[Tensor], whole: Tensor, name: str) -> bool:
    if whole.dtype is torch.bool or whole.dtype.is_complex:
        return False
    total = reduce(REDUCTIONS[name], parts)
    return agree(total, whole, scale_of(parts)) if name == "sum" else agree(total, whole)


def _is_cut(parts: Sequence[Tensor], whole: Tensor, dim: int) -> bool:
    for rank, part in enumerate(parts):
        length = chunk(whole.shape[dim], len(parts), rank)[1]
        if not length or part.shape != (*whole.shape[:dim], length, *whole.shape[dim + 1 :]):
            return False
    return agree(torch.cat(list(parts), dim), whole)


def tolerance(dtype: torch.dtype) -> float:
    """What another order of the same sums may change: 4e-10 in double, 7e-5 in float32, two units below that."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    eps = float(torch.finfo(dtype).eps)
    return eps**0.6 if eps < 1e-4 else 2 * eps


def agree(actual: Tensor, expected: Tensor, scale: float = 0.0) -> bool:
    """Whether two tensors are equal up to rounding of the largest magnitude, or of the `scale` of addends."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    limit = tolerance(expected.dtype)
    if not limit or torch.equal(actual, expected):
        return bool(torch.equal(actual, expected))
    largest = max(1.0, scale, scale_of([expected]))
    return bool(torch.allclose(actual, expected, rtol=0.0, atol=limit * largest, equal_nan=True))


def scale_of(parts: Sequence[Tensor]) -> float:
    """The largest finite magnitude."""
    real = [part.abs() for part in parts if part.numel() and (part.is_floating_point() or part.is_complex())]
    return max((float(part.where(part.isfinite(), 0.0).max()) for part in real), default=0.0)


def all_hold(
    trials: Sequence[Trial], inputs: Sequence[Placement], outputs: Sequence[Placement], *, is_even: bool
) -> bool:
    """Whether a rule of one axis holds in every trial whose sizes it allows."""
    before, after = ([(placement,) for placement in side] for side in (inputs, outputs))
    fitting = [trial for trial in trials if fits(trial, inputs, outputs, is_even=is_even)]
    return all(holds(trial, before, after, (trial.ranks,)) for trial in fitting)


def fits(trial: Trial, inputs: Sequence[Placement], outputs: Sequence[Placement], *, is_even: bool) -> bool:
    """Whether every rank has something of each tensor that is cut, and all the same if it must be even."""
    for placement, tensor in zip((*inputs, *outputs), (*trial.tensors, *trial.expected), strict=True):
        dim = shard_dim(placement)
        if dim is not None and tensor is not None:
            size = tensor.shape[dim]
            if chunk(size, trial.ranks, trial.ranks - 1)[1] == 0 or (is_even and size % trial.ranks):
                return False
    return True


def holds(trial: Trial, inputs: Sequence[Layout], outputs: Sequence[Layout], mesh_shape: tuple[int, ...]) -> bool:
    """Whether layouts over all axes of a mesh hold in a trial."""
    try:
        ranks = run_ranks(trial, inputs, mesh_shape)
        for index, (whole, layout) in enumerate(zip(trial.expected, outputs, strict=True)):
            parts = [part for outputs_ in ranks if (part := outputs_[index]) is not None]
            total = recombine(parts, layout, mesh_shape) if parts else None
            if not same_values(total, whole, scale_of(parts) if Partial() in layout else 0.0):
                return False
    except Exception:  # whatever an op says to shards that it cannot take; replicas that differ
        return False
    return True


def same_values(actual: Tensor | None, expected: Tensor | None, scale: float = 0.0) -> bool:
    """Whether an output that was put together is the op's; see `agree`."""
    if actual is None or expected is None:
        return actual is expected
    return agree(actual, expected, scale)


def varies(trials: Iterable[Trial]) -> bool:
    """Whether each output takes different values: one that is the same in all trials would fit any placement."""
    return all(map(_column_varies, zip(*(trial.expected for trial in trials), strict=True)))


def _column_varies(values: Sequence[Tensor | None]) -> bool:
    tensors = [value for value in values if value is not None and value.numel()]
    if not tensors:
        return True
    if all(value.numel() == 1 for value in tensors):
        return len({value.nan_to_num().item() for value in tensors}) > 1
    several = sum(_is_varied(value) for value in tensors)
    return several >= max(1, len(tensors) // 4)


def _is_varied(value: Tensor) -> bool:
    if value.dtype.is_complex:
        value = torch.view_as_real(value.resolve_conj())
    if value.is_floating_point():
        value = value[value.isfinite()]
    return value.numel() > 1 and bool((value != value.flatten()[0]).any())


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors are equal, NaN to NaN."""
    return left.shape == right.shape and bool(((left == right) | ((left != left) & (right != right))).all())


def shares_memory(outputs: Outputs, inputs: Sequence[Tensor]) -> bool:
    """Whether an output lies in the memory of an input."""
    held = {tensor.untyped_storage().data_ptr() for tensor in inputs if tensor.numel()}
    return any(output is not None and output.untyped_storage().data_ptr() in held for output in outputs)
