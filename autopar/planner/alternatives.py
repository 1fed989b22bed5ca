"""What else a decision could have been, everything else chosen anew for it; and what it could not, and why."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from torch.distributed.tensor.placement_types import Placement

from autopar.errors import InfeasibleProblemError
from autopar.plan_questions import Alternative, RuledOut
from autopar.planner.bounds import without_limit
from autopar.planner.constraints import pinned
from autopar.planner.decisions import Decision, layouts_of
from autopar.planner.make import Planner
from autopar.search import FORBIDDEN, Problem, Solution, peak_usage, solve_again
from autopar.sharding.layout import Layout, format_layout, ranks_per_dim, shard_dim
from autopar.sharding.op_call import TensorSpec
from autopar.sharding.strategies import shardable

MAX_LAYOUTS = 12  # solved for, per decision


class Alternatives:
    """Of one plan's choice; memory aside."""

    def __init__(self, planner: Planner, choice: Sequence[int]) -> None:
        self.planner, self.planning, self.choice = planner, planner.planning, tuple(choice)

    @cached_property
    def best(self) -> Solution:
        """The best there is, nothing pinned but what the caller of make_plan has pinned."""
        return self._solution(without_limit(self.planning.problem), ())

    def _solution(self, problem: Problem, changed: Sequence[int]) -> Solution:
        options = self.planner.options
        seconds, seed = options.time_limit_s, options.seed
        return solve_again(problem, self.choice, changed, time_limit_s=seconds, seed=seed)

    def of(self, members: Sequence[int]) -> tuple[tuple[Alternative, ...], tuple[str, ...]]:
        """(Solved for, the cheapest first; allowed, but not solved for) of decisions that decide alike."""
        layouts = self._layouts(members)
        chosen = _layout(self.planning.decisions[members[0]], self.choice[members[0]])
        layouts.sort(key=lambda layout: layout != chosen)
        found: list[tuple[Layout, Solution]] = []
        for layout in layouts[:MAX_LAYOUTS]:
            try:
                found.append((layout, self._pinned(members, layout)))
            except InfeasibleProblemError:
                continue
        if not found:
            return (), ()
        base = found[0][1]
        solved = [
            self._alternative(members, layout, solution, base, is_chosen=layout == chosen) for layout, solution in found
        ]
        solved.sort(key=lambda item: (item.cost, not item.is_chosen))
        return tuple(solved), tuple(format_layout(layout) for layout in layouts[MAX_LAYOUTS:])

    def _layouts(self, members: Sequence[int]) -> list[Layout]:
        """What every member may have, in the order of their strategies."""
        per_member = []
        for index in members:
            costs, decision = self.planning.problem.costs[index], self.planning.decisions[index]
            per_member.append(
                dict.fromkeys(_layout(decision, pick) for pick in range(len(costs)) if costs[pick] < FORBIDDEN)
            )
        return [layout for layout in per_member[0] if all(layout in other for other in per_member)]

    def _pinned(self, members: Sequence[int], layout: Layout) -> Solution:
        allowed = {}
        for index in members:
            decision = self.planning.decisions[index]
            allowed[index] = np.array([_layout(decision, pick) == layout for pick in range(len(decision.strategies))])
        return self._solution(without_limit(pinned(self.planning, allowed).problem), members)

    def _alternative(
        self,
        members: Sequence[int],
        layout: Layout,
        solution: Solution,
        base: Solution,
        *,
        is_chosen: bool,
    ) -> Alternative:
        decisions, groups = self.planning.decisions, self.planning.problem.groups or ()
        ops = [float(sum(d.seconds[p] for d, p in zip(decisions, it.choice, strict=True))) for it in (solution, base)]
        pairs = enumerate(zip(decisions, solution.choice, base.choice, strict=True))
        own = {groups[index] for index in members}
        changed = {
            groups[index]
            for index, (decision, pick, other) in pairs
            if decision.kind in ("op", "parameter", "input") and decision.strategies[pick] != decision.strategies[other]
        }
        more_s = solution.cost - base.cost
        return Alternative(
            layout=format_layout(layout),
            cost=solution.cost,
            more_s=solution.cost - self.best.cost,
            is_chosen=is_chosen,
            ops_s=ops[0] - ops[1],
            moves_s=more_s - (ops[0] - ops[1]),
            peak_bytes=int(
                peak_usage(self.planning.problem, solution.choice) - peak_usage(self.planning.problem, base.choice)
            ),
            changes=len(changed - own),
        )

    def ruled_out(self, index: int) -> tuple[RuledOut, ...]:
        """Layouts of shards that the decision cannot have."""
        decision, spec = self.planning.decisions[index], self.planning.decisions[index].specs[0]
        if spec is None:
            return ()
        allowed = {_layout(decision, pick) for pick in range(len(decision.strategies))}
        if decision.kind == "op":
            return tuple(self._cuts_ruled_out(decision, spec, allowed))
        shape = self.planning.mesh_shape
        candidates = [layout for layout in layouts_of(spec, shape) if layout not in allowed]
        return tuple(RuledOut(format_layout(layout), _why_not(spec, layout, shape)) for layout in candidates)

    def _cuts_ruled_out(self, decision: Decision, spec: TensorSpec, allowed: set[Layout]) -> list[RuledOut]:
        """Of an op: the dims of its output that no strategy cuts over an axis."""
        found = []
        shape, names = self.planning.mesh_shape, self.planner.mesh.axis_names
        assert decision.call is not None
        rules = self.planner.rules.rules_of(decision.call)
        for axis, ranks in enumerate(shape):
            for dim, size in enumerate(spec.shape):
                if ranks == 1 or any(shard_dim(layout[axis]) == dim for layout in allowed):
                    continue
                cutting = [rule for rule in rules if rule.outputs and shard_dim(rule.outputs[0]) == dim]
                why = f"no rule of {decision.call.name} cuts dim {dim} of its output"
                if cutting and size % ranks:
                    why = f"dim {dim} of {size} does not divide over {ranks} ranks"
                elif cutting:
                    why = self._input_in_the_way(decision, cutting[0].inputs, ranks)
                found.append(RuledOut(f"S{dim} on axis {names[axis]}", why))
        return found

    def _input_in_the_way(self, decision: Decision, placements: Sequence[Placement], ranks: int) -> str:
        assert decision.call is not None
        for number, (spec, placement) in enumerate(zip(decision.call.inputs, placements, strict=True)):
            layout: Layout = (placement,)
            if not shardable(spec, layout, (ranks,), even=True):
                return (
                    f"input {number} of shape {spec.shape} would be cut as {format_layout(layout)} over {ranks} ranks"
                )
        return "its rule goes together with nothing on the other axes"


def _layout(decision: Decision, pick: int) -> Layout:
    return decision.strategies[pick].outputs[0]


def _why_not(spec: TensorSpec, layout: Layout, mesh_shape: Sequence[int]) -> str:
    ways = ranks_per_dim(len(spec.shape), layout, mesh_shape)
    for dim, (size, count) in enumerate(zip(spec.shape, ways, strict=True)):
        if count > size:
            return f"dim {dim} of {size} leaves some of {count} ranks nothing"
        if count > 1 and size % count:
            return f"dim {dim} of {size} does not divide over {count} ranks"
    return "its rules do not allow it"
