"""One trial of a rule: an op on the whole, on the shards of each rank, and which placements put the whole together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from autopar.sharding.discovery.scaling import Problem
from autopar.sharding.execution import distribute, pieces, recombine
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
    _pieces: dict[tuple[int, Placement], list[Tensor]] = field(default_factory=dict, repr=False, compare=False)

    def pieces(self, index: int, placement: Placement) -> list[Tensor]:
        """What each rank holds of one input."""
        if placement == REPLICATE:
            return [self.tensors[index]] * self.ranks
        key = index, placement
        if key not in self._pieces:
            self._pieces[key] = pieces(self.tensors[index], placement, self.ranks)
        return self._pieces[key]

    def run_axis(self, inputs: Sequence[Placement]) -> list[Outputs] | None:
        """What each rank of one axis makes of its shards; None where the op does not run on them."""
        return self._run_all([self.pieces(index, placement) for index, placement in enumerate(inputs)])

    def run_mesh(self, layouts: Sequence[Layout], mesh_shape: tuple[int, ...]) -> list[Outputs] | None:
        """What each rank of a mesh makes of its shards; None where the op does not run on them."""
        pairs = zip(self.tensors, layouts, strict=True)
        return self._run_all([distribute(tensor, layout, mesh_shape) for tensor, layout in pairs])

    def _run_all(self, shards: Sequence[Sequence[Tensor]]) -> list[Outputs] | None:
        found = []
        for rank in zip(*shards, strict=True):
            outputs = self.problem.run(list(rank))
            if outputs is None or len(outputs) != len(self.expected):
                return None
            found.append(outputs)
        return found


def is_foretold(trial: Trial, inputs: Sequence[Layout]) -> bool:
    """Whether the op's form on tensors without content foretells the shapes of what it makes of the last rank's shards.

    The shapes in an emitted program are those that it foretells.
    """
    shards = [_last_shard(tensor, layout, trial.ranks) for tensor, layout in zip(trial.tensors, inputs, strict=True)]
    made = _forms(trial.problem.run(shards))
    if made is None:
        return False
    if _forms(trial.problem.run([shard.to("meta") for shard in shards])) == made:
        return True  # what fake tensors tell too, in milliseconds
    with FakeTensorMode() as mode:
        return _forms(trial.problem.run([mode.from_tensor(shard) for shard in shards])) == made


def _last_shard(tensor: Tensor, layout: Layout, ranks: int) -> Tensor:
    """Of a mesh with as many ranks on each axis."""
    for placement in layout:
        dim = shard_dim(placement)
        if dim is not None:
            tensor = tensor.narrow(dim, *chunk(tensor.shape[dim], ranks, ranks - 1))
    return tensor.contiguous()


def _forms(outputs: Outputs | None) -> list[object] | None:
    """Shapes and dtypes."""
    if outputs is None:
        return None
    return [(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else None for value in outputs]


def outputs_that_hold(trials: Sequence[Trial], inputs: Sequence[Placement]) -> tuple[Placement, ...] | None:
    """The placements of the outputs under which every trial that they fit gives the op's result; None if there are
    none."""
    left: list[set[Placement]] | None = None
    dims = [(index, dim) for index, placement in enumerate(inputs) if (dim := shard_dim(placement)) is not None]
    for trial in trials:
        if any(trial.tensors[index].shape[dim] % trial.ranks for index, dim in dims):
            continue
        found = _possible_outputs(trial, inputs, left)
        if found is None:
            return None
        left = found
    return None if left is None else tuple(min(own, key=_preference) for own in left)


def _preference(placement: Placement) -> tuple[int, str]:
    """Whole values before shards before sums before maxima, where the trials cannot tell them apart."""
    order = 0 if placement == REPLICATE else 1 if isinstance(placement, Shard) else 2 if placement == Partial() else 3
    return order, str(placement)


def _possible_outputs(
    trial: Trial, inputs: Sequence[Placement], left: Sequence[set[Placement]] | None
) -> list[set[Placement]] | None:
    """Per output, every placement (of those left, where trials went before) that its parts may have been; None where
    the op does not run or one has none."""
    parts = trial.run_axis(inputs)
    if parts is None:
        return None
    found = []
    for index, whole in enumerate(trial.expected):
        own = [outputs[index] for outputs in parts]
        among = left[index] if left is not None else _placements_of(whole)
        placements = _possible(own, whole, trial.ranks, among)
        if not placements:
            return None
        found.append(placements)
    return found


def _placements_of(whole: Tensor | None) -> set[Placement]:
    if whole is None:
        return {REPLICATE}
    return {REPLICATE, *map(Partial, REDUCTIONS), *map(Shard, range(whole.dim()))}


def _possible(
    parts: Sequence[Tensor | None], whole: Tensor | None, ranks: int, among: set[Placement]
) -> set[Placement]:
    if whole is None:
        return among if all(part is None for part in parts) else set()
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if len(tensors) < ranks or any(part.dtype != whole.dtype or part.dim() != whole.dim() for part in tensors):
        return set()
    return {placement for placement in among if _gives(placement, tensors, whole)}


def _gives(placement: Placement, parts: Sequence[Tensor], whole: Tensor) -> bool:
    """Whether the parts, put together as a placement says, are the whole."""
    if isinstance(placement, Shard):
        return _is_cut(parts, whole, placement.dim)
    if any(part.shape != whole.shape for part in parts):
        return False
    if isinstance(placement, Partial):
        return _reduces_to(parts, whole, placement.reduce_op)
    return all(same_bits(part, parts[0]) for part in parts[1:]) and agree(parts[0], whole)


def _reduces_to(parts: Sequence[Tensor], whole: Tensor, name: str) -> bool:
    if whole.dtype is torch.bool or whole.dtype.is_complex:
        return False
    return agree(reduce(REDUCTIONS[name], parts), whole, parts if name == "sum" else ())


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


def agree(actual: Tensor, expected: Tensor, addends: Sequence[Tensor] = ()) -> bool:
    """Whether two tensors are equal up to rounding of the largest magnitude, of the `addends` too if it is a sum."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    if torch.equal(actual, expected):
        return True
    limit = tolerance(expected.dtype)
    if not limit:
        return False
    largest = max(1.0, scale_of([expected, *addends]))
    return bool(torch.allclose(actual, expected, rtol=0.0, atol=limit * largest, equal_nan=True))


def scale_of(parts: Sequence[Tensor]) -> float:
    """The largest finite magnitude."""
    real = [part.abs() for part in parts if part.numel() and (part.is_floating_point() or part.is_complex())]
    return max((float(part.where(part.isfinite(), 0.0).max()) for part in real), default=0.0)


def all_hold(
    trials: Sequence[Trial], inputs: Sequence[Placement], outputs: Sequence[Placement], *, is_even: bool
) -> bool:
    """Whether a rule of one axis holds in every trial whose sizes it allows."""
    only = [{placement} for placement in outputs]
    fitting = (trial for trial in trials if fits(trial, inputs, outputs, is_even=is_even))
    return all(_possible_outputs(trial, inputs, only) is not None for trial in fitting)


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
    ranks = trial.run_mesh(inputs, mesh_shape)
    if ranks is None:
        return False
    for index, (whole, layout) in enumerate(zip(trial.expected, outputs, strict=True)):
        parts = [part for own in ranks if isinstance(part := own[index], Tensor)]
        if len(parts) not in (0, len(ranks)):
            return False
        try:
            total = recombine(parts, layout, mesh_shape) if parts else None
        except (AssertionError, RuntimeError, IndexError):  # replicas that differ; parts that do not fit together
            return False
        if not same_values(total, whole, parts if Partial() in layout else ()):
            return False
    return True


def same_values(actual: Tensor | None, expected: Tensor | None, addends: Sequence[Tensor] = ()) -> bool:
    """Whether an output that was put together is the op's; see `agree`."""
    if actual is None or expected is None:
        return actual is expected
    return agree(actual, expected, addends)


def varies(trials: Iterable[Trial]) -> bool:
    """Whether each output takes different values: one that is the same in all trials would fit any placement."""
    return all(map(_column_varies, zip(*(trial.expected for trial in trials), strict=True)))


def _column_varies(values: Sequence[Tensor | None]) -> bool:
    tensors = [value for value in values if value is not None and value.numel()]
    if not tensors:
        return True
    if all(value.numel() == 1 for value in tensors):
        return len({value.nan_to_num().item() for value in tensors}) > 1
    several = max(1, len(tensors) // 4)
    return next(itertools.islice(filter(_is_varied, tensors), several - 1, None), None) is not None


def _is_varied(value: Tensor) -> bool:
    if value.dtype.is_complex:
        value = torch.view_as_real(value.resolve_conj())
    if value.is_floating_point():
        value = value[value.isfinite()]
    return value.numel() > 1 and bool((value != value.flatten()[0]).any())


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors are equal, NaN to NaN."""
    if left.shape != right.shape or torch.equal(left, right):
        return left.shape == right.shape
    return bool(((left == right) | ((left != left) & (right != right))).all())


def shares_memory(outputs: Outputs, inputs: Sequence[Tensor]) -> bool:
    """Whether an output lies in the memory of an input."""
    held = {tensor.untyped_storage().data_ptr() for tensor in inputs if tensor.numel()}
    return any(output is not None and output.untyped_storage().data_ptr() in held for output in outputs)
