"""The experts' plans by name: `ddp`, `zero1`, `zero2`, `fsdp`, `megatron`, as choices of the same problem.

ddp: parameters replicated, the batch cut over all axes. zero1: the same, with an optimizer whose state the replicas
divide among them. fsdp: parameters stored in shards and gathered for every
use, the batch cut over all axes (Zhao et al., VLDB 2023; ZeRO-3 of Rajbhandari et al., SC 2020). zero2: the same, but
the copies that the forward gathers are kept for the backward. megatron: weights cut over the last axis (Shoeybi et
al., 2019), the batch over the others; on that last axis the layout of each op is the best that the search finds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from autopar.capture.program import BETWEEN_STAGES
from autopar.errors import InfeasibleProblemError, NotDivisibleError, PlanError
from autopar.planner.build import TIED, PlanningProblem
from autopar.planner.decisions import Decision, Source
from autopar.planner.reductions import is_cast
from autopar.planner.saved_values import is_view
from autopar.search import FORBIDDEN, Problem, evaluate, solve
from autopar.sharding.layout import REPLICATE, Layout, is_partial, replicated, shard_dim

HAND_PLANS = ("ddp", "zero1", "zero2", "fsdp", "megatron")
INPUTS = ("input", "tangent", "arriving")
Choice = tuple[int, ...]
Mask = npt.NDArray[np.bool_]  # of a decision's strategies


def hand_plan(planning: PlanningProblem, name: str, *, time_limit_s: float, seed: int) -> Choice:
    """The choice that the plan of that name makes. Raises PlanError where it does not apply."""
    if name == "megatron":
        return _megatron(planning, time_limit_s, seed)
    return _follow_batch(planning, shard_parameters=name in ("zero2", "fsdp"), batch_axes=len(planning.mesh_shape))


def batch_size(decisions: Sequence[Decision]) -> int:
    """The size of dim 0 that most inputs share."""
    kinds = ("input", "arriving")
    shapes = [spec.shape for decision in decisions if decision.kind in kinds for spec in decision.specs if spec]
    sizes = [shape[0] for shape in shapes if shape]
    if not sizes:
        raise PlanError("no input has a batch dim", fix="use search='ilp'")
    return max(set(sizes), key=lambda size: (sizes.count(size), size))


def _follow_batch(planning: PlanningProblem, *, shard_parameters: bool, batch_axes: int) -> Choice:
    """Cut the batch over the first `batch_axes` axes; let every op run where its inputs are."""
    decisions, axes = planning.decisions, len(planning.mesh_shape)
    size, ways = batch_size(decisions), math.prod(planning.mesh_shape[:batch_axes])
    if size % ways:
        raise NotDivisibleError(
            f"a batch of {size} does not divide over {ways} ranks", fix="use a batch that does, or search='ilp'"
        )
    batch: Layout = tuple(
        Shard(0) if axis < batch_axes else placement for axis, placement in enumerate(replicated(axes))
    )
    follower = _Follower(planning, batch, size)
    choice = follower.run()
    if shard_parameters:
        _store_shards(planning, choice)
    return tuple(choice)


class _Follower:
    """Chooses in program order: the strategy that moves the fewest seconds' worth of inputs, then the fastest."""

    def __init__(self, planning: PlanningProblem, batch: Layout, size: int) -> None:
        self.planning, self.batch, self.size = planning, batch, size
        self.incoming: list[list[tuple[int, int]]] = [[] for _ in planning.decisions]
        for edge, (first, second) in enumerate(planning.problem.edges):
            self.incoming[second].append((first, edge))
        self.choice: list[int] = []
        self.by_group: dict[int, int] = {}

    def run(self) -> list[int]:
        groups = self.planning.problem.groups
        assert groups is not None
        for index, decision in enumerate(self.planning.decisions):
            if groups[index] not in self.by_group:
                self.by_group[groups[index]] = self._pick(index, decision)
            self.choice.append(self.by_group[groups[index]])
        return self.choice

    def _pick(self, index: int, decision: Decision) -> int:
        if decision.kind == "parameter":
            return find_layout(decision, replicated(len(self.planning.mesh_shape)))
        if decision.kind in INPUTS:
            own = self._input(decision)
            return self._allowed(index, own) if decision.name.startswith(BETWEEN_STAGES) else own
        if decision.kind == "op" and all(self._is_whole(source) for source in decision.sources):
            return 0  # what does not depend on the batch is computed on every rank: the replicated strategy comes first
        summed = self._cast_of_sum(index, decision)
        if summed is not None:
            return summed
        moves = np.zeros(len(decision.strategies))
        for first, edge in self.incoming[index]:
            weight = 1e3 if self._lies_as_batch(decision, edge) else 1.0  # the batch stays where it is
            moves += weight * self.planning.problem.edge_costs[edge][self.choice[first]]
        compute = self.planning.problem.costs[index]
        total = moves * 1e3 + compute  # moving nothing comes first: this is the plan's idea, not an optimum
        return int(np.argmin(total))

    def _allowed(self, index: int, pick: int) -> int:
        """The pick, or what the other pipeline stage has it pinned to."""
        costs = self.planning.problem.costs[index]
        return pick if costs[pick] < FORBIDDEN else int(np.argmin(costs))

    def _cast_of_sum(self, index: int, decision: Decision) -> int | None:
        """The strategy by which the backward's cast of a partial sum follows an all-reduce, where that is allowed."""
        if decision.phase != "backward" or not is_cast(decision):
            return None
        source = decision.sources[0]
        made = self.planning.decisions[source.decision].strategies[self.choice[source.decision]].outputs[source.output]
        total = tuple(REPLICATE if is_partial(placement) else placement for placement in made)
        ends = [(strategy.inputs[0], strategy.outputs[0]) for strategy in decision.strategies]
        if total == made or (total, total) not in ends:
            return None
        pick, (first, edge) = ends.index((total, total)), self.incoming[index][0]
        return pick if self.planning.problem.edge_costs[edge][self.choice[first], pick] < FORBIDDEN else None

    def _lies_as_batch(self, decision: Decision, edge: int) -> bool:
        argument = self.planning.edge_arguments[edge]
        if argument == TIED:
            return False
        source = decision.sources[argument]
        strategy = self.planning.decisions[source.decision].strategies[self.choice[source.decision]]
        return strategy.outputs[source.output] == self.batch

    def _is_whole(self, source: Source) -> bool:
        strategy = self.planning.decisions[source.decision].strategies[self.choice[source.decision]]
        return strategy.outputs[source.output] == replicated(len(self.batch))

    def _input(self, decision: Decision) -> int:
        spec = decision.specs[0]
        assert spec is not None
        between = decision.name.startswith(BETWEEN_STAGES)  # may have the batch and another dim in one
        has_batch = bool(spec.shape) and (spec.shape[0] % self.size == 0 if between else spec.shape[0] == self.size)
        return find_layout(decision, self.batch if has_batch else replicated(len(self.batch)))


def find_layout(decision: Decision, layout: Layout) -> int:
    """The strategy of a placeholder with that layout, or else the replicated one."""
    layouts = [strategy.outputs[0] for strategy in decision.strategies]
    wanted = layout if layout in layouts else replicated(len(layout))
    return layouts.index(wanted)


def _store_shards(planning: PlanningProblem, choice: list[int]) -> None:
    """Store every parameter in shards of its first dim that is long enough; its gradient likewise."""
    axes, decisions = len(planning.mesh_shape), planning.decisions
    stored: dict[str, int] = {}
    into_casts = {reader: costs for _, reader, _, costs in planning.reads() if is_cast(decisions[reader])}
    for index, decision in enumerate(decisions):
        if decision.kind == "parameter":
            layouts = [strategy.outputs[0] for strategy in decision.strategies]
            spec = decision.specs[0]
            dims = range(len(spec.shape)) if spec else ()
            wanted = [(Shard(dim),) * axes for dim in dims if (Shard(dim),) * axes in layouts]
            choice[index] = stored[decision.name] = layouts.index(wanted[0]) if wanted else choice[index]
        elif decision.kind == "gradient" and decision.name in stored:
            choice[index] = stored[decision.name]
            layout, source = decision.strategies[choice[index]].outputs[0], decision.sources[0].decision
            _cast_where_it_lies(decisions[source], choice, source, layout, into_casts)
        elif decision.sources and decisions[decision.sources[0].decision].name in stored:
            source = decision.sources[0].decision
            layout = decisions[source].strategies[choice[source]].outputs[0]
            _cast_where_it_lies(decision, choice, index, layout, into_casts)


def _cast_where_it_lies(
    decision: Decision, choice: list[int], index: int, layout: Layout, into_casts: Mapping[int, npt.NDArray[np.float64]]
) -> None:
    """If it is a cast, cast shards: of a parameter before it is gathered, of a gradient after it is reduced.

    Where it may not be reduced before, it is cast as it comes.
    """
    ends = [(strategy.inputs[0], strategy.outputs[0]) for strategy in decision.strategies] if is_cast(decision) else []
    if (layout, layout) not in ends:
        return
    pick, source = ends.index((layout, layout)), decision.sources[0].decision
    if into_casts[index][choice[source], pick] < FORBIDDEN:
        choice[index] = pick


def _megatron(planning: PlanningProblem, time_limit_s: float, seed: int) -> Choice:
    """The data axes as ddp has them; on the last axis inputs replicated, weights cut, the rest searched.

    A pipeline stage whose weights cannot be cut, or that has none, is whole on every rank of the last axis.
    """
    axes = len(planning.mesh_shape)
    base = _follow_batch(planning, shard_parameters=False, batch_axes=axes - 1)
    masks: dict[tuple[int, int, str], Mask] = {}  # by strategies, pick and kind, which repeated layers share
    allowed: dict[int, Mask] = {}
    for index, (decision, pick) in enumerate(zip(planning.decisions, base, strict=True)):
        key = id(decision.strategies), pick, decision.kind
        if key not in masks:
            masks[key] = _megatron_mask(decision, decision.strategies[pick].rules, axes)
        allowed[index] = masks[key]
    allowed = _with_pinned(planning, _Usable(planning, allowed).restricted())
    problem = _never_gathered(planning, planning.restricted(allowed))
    cut = any(_is_matrix(planning.decisions[index]) and not mask[base[index]] for index, mask in allowed.items())
    if not cut and not any(decision.name.startswith(BETWEEN_STAGES) for decision in planning.decisions):
        raise PlanError("no weight can be cut over the last mesh axis", fix="use search='ilp'")
    try:
        solution = solve(problem, strategy="ilp", time_limit_s=time_limit_s, seed=seed)
    except InfeasibleProblemError as error:
        raise PlanError("not every op can use its weight cut over the last mesh axis", fix="use 'ilp'") from error
    if not evaluate(problem, solution.choice) < FORBIDDEN:
        raise PlanError("no tensor-parallel layout keeps the batch where ddp has it", fix="use search='ilp'")
    return solution.choice


def _with_pinned(planning: PlanningProblem, allowed: Mapping[int, Mask]) -> dict[int, Mask]:
    """What is allowed; of what goes between pipeline stages, and where a layout is pinned that is not, all that is."""
    result = dict(allowed)
    for index, mask in allowed.items():
        possible = planning.problem.costs[index] < FORBIDDEN
        between = planning.decisions[index].name.startswith(BETWEEN_STAGES)
        if between or not (mask & possible).any():
            result[index] = possible
    return result


@dataclass
class _Usable:
    """Which cuts of a weight every op that reads it can take: a recurrence takes none of its hidden weights."""

    planning: PlanningProblem
    allowed: Mapping[int, Mask]
    known: dict[tuple[int, Placement], bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.readers: list[list[tuple[int, int]]] = [[] for _ in self.planning.decisions]
        edges = zip(self.planning.problem.edges, self.planning.edge_arguments, strict=True)
        for (first, second), argument in edges:
            if argument != TIED:
                self.readers[first].append((second, argument))

    def restricted(self) -> dict[int, Mask]:
        """What is allowed, without cuts that a reader cannot take; a weight that has no other is left whole."""
        result = dict(self.allowed)
        for index, decision in enumerate(self.planning.decisions):
            if _is_matrix(decision):
                placements = [strategy.outputs[0][-1] for strategy in decision.strategies]
                usable = np.array([self.takes(index, placement) for placement in placements], dtype=bool)
                whole = np.array([shard_dim(placement) is None for placement in placements], dtype=bool)
                cut = result[index] & usable
                result[index] = cut if cut.any() else whole & self._as_elsewhere(index)
        return result

    def _as_elsewhere(self, index: int) -> Mask:
        """The strategies that lie on the other axes as an allowed one does."""
        layouts = [strategy.outputs[0][:-1] for strategy in self.planning.decisions[index].strategies]
        wanted = {layout for layout, allowed in zip(layouts, self.allowed[index], strict=True) if allowed}
        return np.array([layout in wanted for layout in layouts], dtype=bool)

    def takes(self, index: int, placement: Placement) -> bool:
        """Whether all that read a value, or a view of it, can do so where it has that placement on the last axis."""
        key = (index, placement)
        if key not in self.known:
            self.known[key] = all(self._reads(reader, argument, placement) for reader, argument in self.readers[index])
        return self.known[key]

    def _reads(self, reader: int, argument: int, placement: Placement) -> bool:
        decision = self.planning.decisions[reader]
        choices = zip(decision.strategies, self.allowed[reader], strict=True)
        fitting = (item for item, allowed in choices if allowed and item.inputs[argument][-1] == placement)
        return any(not _passes_on(decision) or self.takes(reader, item.outputs[0][-1]) for item in fitting)


def _never_gathered(planning: PlanningProblem, problem: Problem) -> Problem:
    """Forbid moving a weight over the last axis: an op that reads it, or a view or cast, takes it as it is cut."""
    weights: set[int] = set()
    for index, decision in enumerate(planning.decisions):
        if _is_matrix(decision) or (_passes_on(decision) and decision.sources[0].decision in weights):
            weights.add(index)
    costs = list(problem.edge_costs)
    known: dict[tuple[int, int, int, int], npt.NDArray[np.float64]] = {}
    for edge, ((first, second), argument) in enumerate(zip(problem.edges, planning.edge_arguments, strict=True)):
        if first in weights and argument != TIED:
            weight, reader = planning.decisions[first], planning.decisions[second]
            key = id(weight.strategies), id(reader.strategies), argument, id(problem.edge_costs[edge])
            if key not in known:
                known[key] = _kept(weight, reader, argument, problem.edge_costs[edge])
            costs[edge] = known[key]
    return replace(problem, edge_costs=tuple(costs))


def _kept(weight: Decision, reader: Decision, argument: int, costs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    stored = [strategy.outputs[0][-1] for strategy in weight.strategies]
    read = [strategy.inputs[argument][-1] for strategy in reader.strategies]
    same = np.array([[left == right for right in read] for left in stored])
    return np.where(same, costs, float(FORBIDDEN))


def _passes_on(decision: Decision) -> bool:
    """Whether it gives its input, in another shape or dtype: a weight stays one."""
    return is_view(decision) or is_cast(decision)


def _is_matrix(decision: Decision) -> bool:
    """Whether it is a parameter of two dims or more."""
    spec = decision.specs[0]
    return decision.kind == "parameter" and spec is not None and len(spec.shape) > 1


def _megatron_mask(decision: Decision, base: Sequence[object], axes: int) -> Mask:
    same = [tuple(strategy.rules[:-1]) == tuple(base[: axes - 1]) for strategy in decision.strategies]
    whole = [shard_dim(strategy.outputs[0][-1]) is None for strategy in decision.strategies]
    mask: Mask = np.array(same, dtype=bool)
    if decision.kind in INPUTS:
        mask &= np.array(whole, dtype=bool)
    elif _is_matrix(decision) and np.any(mask > np.array(whole, dtype=bool)):
        mask &= ~np.array(whole, dtype=bool)
    return mask
