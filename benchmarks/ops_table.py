"""docs/ops.md: which ops have sharding rules, ours and those of PyTorch's DTensor, and whether ours are proven.

    python -m benchmarks.ops_table > docs/ops.md

An op overload is in the table if it can stand in a joint graph: functional, deterministic, not decomposed on the way.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from autopar.sharding.op_call import OpCall
from autopar.sharding.registry import BUILT_IN, has_rule, rules_of
from benchmarks.dtensor_runs import MOST_RUNS, TheirRuns, placements_to_try, their_runs
from tests.autopar.sharding.rules.model_calls import MODEL_CALLS
from tests.autopar.sharding.rules.proving import wrong_strategies
from tests.autopar.sharding.rules.recording import (
    Sample,
    elementwise_samples,
    has_defined_values,
    merged,
    op_db_samples,
    recorded_call,
)

MESHES = ((2,), (3,))
OUTSIDE_JOINT_GRAPHS = ("aten._foreach_", "aten._fused_adam", "aten._amp_", "aten.is_", "aten._local_scalar_dense")


LEGEND = f"""**Ours**: rules beside the replicated one, for the sample of the op that has the most. **Correct**:
strategies that were executed on 2 and 3 ranks and gave the op's own result in float64 (1e-10), of those that the
sample's sizes allow. An op without rules has them discovered where that can be done, else it is replicated;
the plan says which. What discovery finds is not counted here.

**DTensor**: whether PyTorch's DTensor registers a strategy for the overload. **Correct**: the same sample under it,
registered or not, on 2 and 3 ranks that PyTorch simulates (`LocalTensorMode`): runs that gave the op's own result, of
those tried, with inputs placed as our rules take them (no partial sums) and with each tensor sharded alone, {MOST_RUNS}
placements at most; the others raised an error, or were wrong by the same tolerance. **Kept**: right runs whose result
stayed sharded or partial; in the others DTensor replicated what it needed.

**Missing**: who has no rule that shards the op, or kept it sharded and right in no run.""".splitlines()


@dataclass(frozen=True)
class Row:
    """One op overload. `ours`: rules of the sample with the most, beside the replicated one; None without a rule.

    `is_sampled`: whether there is a sample; a rule of an op that only accelerators run has none here. `registered`:
    whether DTensor registers a strategy. `their`: what it did with the same sample, registered or not.
    """

    name: str
    ours: int | None
    runs: int  # strategies that were run on shards
    wrong: int
    registered: bool
    is_sampled: bool = True
    their: TheirRuns = field(default_factory=TheirRuns)

    @property
    def is_missing(self) -> bool:
        """Whether we have no rule that shards the op."""
        return not self.ours

    @property
    def is_missing_there(self) -> bool:
        """Whether DTensor gave no right result that was left sharded, under any placement of the sample."""
        return not self.their.sharded if self.their.tried else not self.registered

    @property
    def missing(self) -> str:
        """Who lacks the op."""
        return {(1, 1): "both", (1, 0): "ours", (0, 1): "DTensor's"}.get(
            (int(self.is_missing), int(self.is_missing_there)), ""
        )

    def __str__(self) -> str:
        ours = "-" if self.ours is None else "yes" if not self.is_sampled else str(self.ours or "replicate")
        proof = f"{self.runs - self.wrong} of {self.runs}" if self.runs else "-"
        their = self.their
        runs = f"{their.right} of {their.tried}" if their.right else "-" if their.tried else "not run"
        if their.wrong:
            runs += f", {len(their.wrong)} wrong"
        known = "yes" if self.registered else "-"
        return f"| `{self.name}` | {ours} | {proof} | {known} | {runs} | {their.sharded or '-'} | {self.missing} |"


def overload(name: str) -> torch._ops.OpOverload | None:
    """The op of a dotted name."""
    namespace, packet, rest = name.split(".")
    found = getattr(getattr(getattr(torch.ops, namespace), packet, None), rest, None)
    return found if isinstance(found, torch._ops.OpOverload) else None


def can_stand_in_a_joint_graph(name: str) -> bool:
    """Whether tracing may leave the op in a graph, and a planner may shard it."""
    op = overload(name) if name.count(".") == 2 else None
    if op is None or op._schema.is_mutable or not name.startswith("aten.") or name.startswith(OUTSIDE_JOINT_GRAPHS):
        return False
    unplannable = {
        torch.Tag.nondeterministic_seeded,
        torch.Tag.data_dependent_output,
        torch.Tag.dynamic_output_shape,
    }
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return unplannable.isdisjoint(op.tags) and not op.has_kernel_for_dispatch_key(key)


def dtensor_ops() -> set[str]:
    """The overloads for which DTensor registers a sharding strategy or a handler of its own."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    tables = ("op_strategy_funcs", "op_single_dim_strategy_funcs", "op_to_rules")
    registered = {str(op) for table in tables for op in getattr(propagator, table, ())}
    return registered | {str(op) for op in DTensor._op_dispatcher._custom_op_handlers}


def all_samples() -> dict[str, dict[OpCall, Sample]]:
    """PyTorch's samples and the calls of models, by op overload."""
    samples = merged(elementwise_samples(), op_db_samples())
    for call in MODEL_CALLS:
        if overload(call.name_of_op) is None:
            continue
        args = call.args()
        made = recorded_call(call.target, args, call.kwargs, call.target(*args, **call.kwargs))
        samples.setdefault(call.name_of_op, {})[made] = Sample(made, args, call.kwargs)
    return samples


def row(name: str, samples: dict[OpCall, Sample], theirs: set[str]) -> Row:
    """The facts about one overload; its rules run on the sample that has the most of them."""
    known = [call for call in samples if has_rule(call)]
    is_defined = has_defined_values(name)
    best = samples[max(known or samples, key=lambda call: len(rules_of(call)))] if samples else None
    their = their_row(best) if best is not None and is_defined else TheirRuns()
    if not known or best is None:
        ours = 1 if name in BUILT_IN else None
        return Row(name, ours, 0, 0, name in theirs, is_sampled=bool(samples), their=their)
    ours = len(rules_of(best.call)) - 1
    if not ours or not is_defined:
        return Row(name, ours, 0, 0, name in theirs, their=their)
    wrong, runs = wrong_strategies(best.call.target, best.args, best.kwargs, MESHES)
    return Row(name, ours, runs, len(wrong), name in theirs, their=their)


def their_row(sample: Sample) -> TheirRuns:
    """DTensor on a sample, from the placements that our rules take and from each tensor sharded alone."""
    tensors = [leaf for leaf in pytree.tree_leaves((sample.args, sample.kwargs)) if isinstance(leaf, torch.Tensor)]
    placements = placements_to_try(tensors, [rule.inputs for rule in rules_of(sample.call)])
    return their_runs(sample.call.target, sample.args, sample.kwargs, placements)


def rows() -> list[Row]:
    """All overloads that can stand in a joint graph and that somebody knows or PyTorch has a sample of."""
    samples, theirs = all_samples(), dtensor_ops()
    names = sorted(filter(can_stand_in_a_joint_graph, {*samples, *BUILT_IN, *theirs}))
    return [row(name, samples.get(name, {}), theirs) for name in names]


def document(table: list[Row]) -> Iterator[str]:
    """Lines of the page."""
    yield "# Ops and their sharding rules"
    yield ""
    yield "Made by `python -m benchmarks.ops_table > docs/ops.md` with PyTorch"
    yield f"{torch.__version__} on {platform.machine()} CPU, {date.today().isoformat()}."
    yield ""
    yield from LEGEND
    yield ""
    yield from _totals(table)
    yield ""
    yield "| op | ours | correct | DTensor | correct | kept | missing |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    yield from map(str, table)


def _totals(table: list[Row]) -> Iterator[str]:
    sharded = [it for it in table if not it.is_missing]
    run = [it for it in table if it.runs]
    yield f"- overloads that can stand in a joint graph: {len(table)}"
    yield f"- ours: {len(sharded)} with rules that shard, {len(run)} of them run, {_correct(run)} of those correct"
    there = [it for it in table if it.their.tried]
    faulty = [f"`{it.name}`" for it in there if it.their.wrong]
    kept = sum(it.their.sharded > 0 for it in there)
    registered = sum(it.registered for it in table)
    yield f"- DTensor's: {registered} registered; of {len(there)} run, {kept} kept sharded and right"
    yield f"- DTensor's with a wrong result: {len(faulty)}" + (f" ({', '.join(faulty)})" if faulty else "")
    yield f"- missing: ours {sum(it.is_missing for it in table)}, DTensor's {sum(it.is_missing_there for it in table)}"
    only = [f"`{it.name}`" for it in table if it.missing == "ours"]
    yield f"- missing in ours alone: {len(only)}" + (f" ({', '.join(only)})" if only else "")
    yield f"- missing in DTensor's alone: {sum(it.missing.startswith('D') for it in table)}"
    yield "- attention and dropout are ops of autopar's own in a captured graph, and have rules of their own"


def _correct(run: list[Row]) -> int:
    return sum(not it.wrong for it in run)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("\n".join(document(rows())))
