"""PyTorch's DTensor on samples of single ops: run on the ranks that PyTorch itself simulates, compared with the whole.

A run places the inputs on a mesh of one axis, calls the op on DTensors and gathers its results. DTensor may move inputs
to other placements first: a run says whether what a user gets is right, and whether anything stayed sharded.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree

from autopar.sharding.check_rule import as_outputs
from autopar.sharding.execution import worst_error
from tests.autopar.sharding.rules.proving import tolerance

MOST_RUNS = 8  # placements of one sample's inputs
Placements = tuple[Placement, ...]  # one per tensor input


@dataclass(frozen=True, slots=True)
class TheirRuns:
    """How often DTensor tried an op, refused it, was wrong, or was right with a result left sharded or partial."""

    tried: int = 0
    refused: int = 0
    wrong: tuple[str, ...] = ()
    sharded: int = 0

    @property
    def right(self) -> int:
        return self.tried - self.refused - len(self.wrong)

    def __add__(self, other: TheirRuns) -> TheirRuns:
        return TheirRuns(
            self.tried + other.tried,
            self.refused + other.refused,
            self.wrong + other.wrong,
            self.sharded + other.sharded,
        )


@contextmanager
def simulated_mesh(ranks: int) -> Iterator[DeviceMesh]:
    """A mesh of one axis, all of whose ranks live in this process."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        with LocalTensorMode(ranks):
            yield init_device_mesh("cpu", (ranks,))
    finally:
        dist.destroy_process_group()


def their_runs(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], placements: Sequence[Placements]) -> TheirRuns:
    """One sample on two and on three ranks, under the placements that its sizes allow."""
    expected = as_outputs(op(*args, **kwargs))
    total = TheirRuns()
    for ranks in (2, 3):
        with simulated_mesh(ranks) as mesh:
            for chosen in placements:
                total += _run(op, (args, kwargs), chosen, mesh, expected)
    return total


def placements_to_try(tensors: Sequence[Tensor], ours: Sequence[Placements]) -> list[Placements]:
    """All replicated, what our rules take (but partial sums), and each tensor alone sharded on each dim."""
    whole: Placements = (Replicate(),) * len(tensors)
    plain = [item for item in ours if all(isinstance(each, (Replicate, Shard)) for each in item)]
    alone = [
        (*whole[:at], Shard(dim), *whole[at + 1 :])
        for at, tensor in enumerate(tensors)
        for dim, size in enumerate(tensor.shape)
        if size > 1
    ]
    return list(itertools.islice(dict.fromkeys([whole, *plain, *alone]), MOST_RUNS))


def _run(
    op: Any, call: tuple[Any, Any], chosen: Placements, mesh: DeviceMesh, expected: tuple[Tensor | None, ...]
) -> TheirRuns:
    leaves, spec = pytree.tree_flatten(call)
    rest = iter(chosen)
    try:
        placed = [
            distribute_tensor(leaf.clone(), mesh, [next(rest)]) if isinstance(leaf, Tensor) else leaf for leaf in leaves
        ]
        args, kwargs = pytree.tree_unflatten(placed, spec)
        results = as_outputs(op(*args, **kwargs))
        whole = [None if result is None else _whole(result) for result in results]
    except Exception:  # an op may raise anything under DTensor: whatever it is, the user's program stops there
        return TheirRuns(tried=1, refused=1)
    kept = any(isinstance(it, DTensor) and not it.placements[0].is_replicate() for it in results)
    off_by = worst_error(whole, expected)
    wrong = (f"{', '.join(map(str, chosen))}: off by {off_by:.2g}",) if off_by > tolerance(expected) else ()
    return TheirRuns(tried=1, wrong=wrong, sharded=int(kept and not wrong))


def _whole(result: Tensor) -> Tensor:
    full = result.full_tensor() if isinstance(result, DTensor) else result
    return full.reconcile() if isinstance(full, LocalTensor) else full
