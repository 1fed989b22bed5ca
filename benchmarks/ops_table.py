"""docs/ops.md: which ops have sharding rules, ours and those of PyTorch's DTensor, and whether ours are proven.

    python -m benchmarks.ops_table > docs/ops.md

An op overload is in the table if it can stand in a joint graph: functional, deterministic, not decomposed on the way.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date

import torch
from torch.distributed.tensor import DTensor

from autopar.sharding.op_call import OpCall
from autopar.sharding.registry import BUILT_IN, has_rule, rules_of
from tests.autopar.sharding.rules.model_calls import MODEL_CALLS
from tests.autopar.sharding.rules.proving import wrong_strategies
from tests.autopar.sharding.rules.recording import Sample, elementwise_samples, merged, op_db_samples, recorded_call

MESHES = ((2,), (3,))
OUTSIDE_JOINT_GRAPHS = ("aten._foreach_", "aten._fused_adam", "aten._amp_", "aten.is_", "aten._local_scalar_dense")


@dataclass(frozen=True)
class Row:
    """One op overload. `ours`: rules of the sample with the most, beside the replicated one; None without a rule.

    `is_sampled`: whether there is a sample; a rule of an op that only accelerators run has none here.
    """

    name: str
    ours: int | None
    runs: int  # strategies that were run on shards
    wrong: int
    theirs: bool
    is_sampled: bool = True

    def __str__(self) -> str:
        ours = (
            "-"
            if self.ours is None
            else "yes"
            if not self.is_sampled
            else "replicate"
            if not self.ours
            else str(self.ours)
        )
        proof = f"{self.runs - self.wrong} of {self.runs}" if self.runs else "-"
        return f"| `{self.name}` | {ours} | {proof} | {'yes' if self.theirs else '-'} |"


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
    if not known:
        return Row(name, 1 if name in BUILT_IN else None, 0, 0, name in theirs, is_sampled=False)
    best = samples[max(known, key=lambda call: len(rules_of(call)))]
    ours = len(rules_of(best.call)) - 1
    if not ours or ".empty" in name or ".new_empty" in name:  # values that are not defined cannot be compared
        return Row(name, ours, 0, 0, name in theirs)
    wrong, runs = wrong_strategies(best.call.target, best.args, best.kwargs, MESHES)
    return Row(name, ours, runs, len(wrong), name in theirs)


def rows() -> list[Row]:
    """All overloads that can stand in a joint graph and that somebody knows or PyTorch has a sample of."""
    samples, theirs = all_samples(), dtensor_ops()
    names = sorted(filter(can_stand_in_a_joint_graph, {*samples, *BUILT_IN, *theirs}))
    return [row(name, samples.get(name, {}), theirs) for name in names]


def document(table: list[Row]) -> Iterator[str]:
    """Lines of the page."""
    sharded = [it for it in table if it.ours]
    yield "# Ops and their sharding rules"
    yield ""
    yield "Made by `python -m benchmarks.ops_table > docs/ops.md` with PyTorch"
    yield f"{torch.__version__} on {platform.machine()} CPU, {date.today().isoformat()}."
    yield ""
    yield "**Ours**: rules beside the replicated one, for the sample of the op that has the most. **Run**: strategies"
    yield "that were executed on 2 and 3 ranks and gave the op's own result in float64 (1e-10), of those that the"
    yield "sample's sizes allow. **DTensor**: whether PyTorch's DTensor registers a strategy for the overload;"
    yield "those are not run here."
    yield "An op without rules has them discovered where it can, else it is replicated; the plan says which."
    yield ""
    yield f"- overloads that can stand in a joint graph: {len(table)}"
    yield f"- with rules of ours that shard: {len(sharded)}; run: {sum(bool(it.runs) for it in sharded)}"
    yield f"- of those, with a wrong strategy: {sum(bool(it.wrong) for it in table)}"
    yield f"- replicated by us: {len(table) - len(sharded)}; unknown to DTensor: {sum(not it.theirs for it in table)}"
    yield f"- sharded by us, unknown to DTensor: {sum(not it.theirs for it in sharded)}"
    yield "- attention and dropout are ops of autopar's own in a captured graph, and have rules of their own"
    missing = [f"`{it.name}`" for it in table if it.theirs and not it.ours]
    yield f"- registered by DTensor, replicated by us: {len(missing)} ({', '.join(missing)})"
    yield ""
    yield "| op | ours | run | DTensor |"
    yield "| --- | --- | --- | --- |"
    yield from map(str, table)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("\n".join(document(rows())))
