"""Which part of every value belongs to one microbatch: layouts over an axis of time instead of ranks.

Microbatches are to a batch what ranks are to a batch-sharded program, but they cannot talk to each other: rules that
need a collective are out, and so is every change of layout but taking a part of a whole. What depends on the call's
inputs alone is known before the first microbatch, so any reader may have it whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor, fx
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from autopar.capture.program import InputKind, Program
from autopar.errors import MicrobatchError
from autopar.sharding.assignment import is_getitem
from autopar.sharding.layout import REPLICATE, shard_dim
from autopar.sharding.op_call import OpCall, call_of, op_name, tensor_inputs
from autopar.sharding.rule import Rule, replicate_rule
from autopar.sharding.rules.creation import OFFSET
from autopar.stages.sizes import BatchCut

RulesOf = Callable[[OpCall], tuple[Rule, ...]]
KNOWN_BEFORE = (InputKind.INPUT, InputKind.BUFFER, InputKind.CONSTANT, InputKind.SEED)
TAKES_A_PART = 1  # what it costs to cut a whole value
VALUES_UNUSED = ("aten.new_zeros", "aten.new_ones", "aten.new_full", "aten.new_empty")


@dataclass(frozen=True)
class TimeLayouts:
    """`rules`: of every op that runs per microbatch, by node. `placed`: where each value lies, as its producer leaves
    it. `early`: values that are computed before the first microbatch, whole, with how their readers want them."""

    rules: Mapping[str, Rule]
    placed: Mapping[str, Placement]
    early: tuple[tuple[str, Placement], ...]


def time_layouts(program: Program, cut: BatchCut, rules_of: RulesOf) -> TimeLayouts:
    """Layouts over time of all values. Raises MicrobatchError where an op needs the whole batch at once."""
    search = _Search(program, cut, rules_of)
    search.forward()
    search.specialize()
    return search.result()


def _is_zero(node: fx.Node) -> bool:
    """Whether a value is zero by the op that makes it."""
    if node.op != "call_function" or isinstance(node.target, str):
        return False
    name = op_name(node.target)
    if name.startswith(("aten.zeros", "aten.new_zeros")):
        return True
    position = {"aten.scalar_tensor.default": 0, "aten.full.default": 1, "aten.full_like.default": 1}.get(name)
    return position is not None and node.args[position] in (0, 0.0)


class _Search:
    """Walks the graph once forward, choosing for each op the rule that fits what its inputs are; then once back."""

    def __init__(self, program: Program, cut: BatchCut, rules_of: RulesOf) -> None:
        self.program, self.cut, self.rules_of = program, cut, rules_of
        self.graph = program.graph_module.graph
        self.kinds = {item.node: item for item in program.inputs}
        self.known: set[fx.Node] = set()  # before the first microbatch
        self.whole: set[fx.Node] = set()  # known values that no microbatch can make of its parts
        self.rules: dict[fx.Node, Rule] = {}
        self.placed: dict[fx.Node, Placement] = {}

    def forward(self) -> None:
        for node in self.graph.nodes:
            if node.op == "placeholder":
                self._place_input(node)
            elif node.op == "call_function" and not is_getitem(node):
                self._choose(node)
            elif is_getitem(node):
                self._pick(node)

    def _place_input(self, node: fx.Node) -> None:
        item = self.kinds[node.name]
        if item.kind in KNOWN_BEFORE:
            self.known.add(node)
        if item.kind is InputKind.TANGENT:
            return  # as its output, which is not placed yet
        value: Tensor = node.meta["val"]
        batched = item.kind is InputKind.INPUT and value.dim() > 0 and value.shape[0] == self.cut.size
        self.placed[node] = Shard(0) if batched else REPLICATE

    def _placement(self, node: fx.Node) -> Placement:
        if node not in self.placed:  # a tangent
            output = next(
                result
                for item, result in zip(self.program.outputs, self.program.results, strict=True)
                if item.differentiable and item.name == self.kinds[node.name].name
            )
            own = self._placement(output)
            self.placed[node] = own if shard_dim(own) is not None else REPLICATE
        return self.placed[node]

    def _pick(self, node: fx.Node) -> None:
        producer, index = node.args
        assert isinstance(producer, fx.Node) and isinstance(index, int)
        if producer in self.known:
            self.known.add(node)
        if producer in self.whole:
            self.whole.add(node)
        rule = self.rules.get(producer)
        self.placed[node] = REPLICATE if rule is None else rule.outputs[index]

    def _choose(self, node: fx.Node) -> None:
        sources = tensor_inputs(node)
        is_known = all(source in self.known for source in sources)
        if is_known:
            self.known.add(node)
        call = call_of(node)
        found = None if is_known and any(source in self.whole for source in sources) else self._best(call, sources)
        if found is not None and is_known and found[0] > 0:
            found = None
        if found is None and not is_known:
            raise self._needs_the_batch(node, call, sources)
        if found is None:
            self.whole.add(node)
            self.placed[node] = REPLICATE
            return
        self.rules[node] = found[1]
        self.placed[node] = found[1].outputs[0] if found[1].outputs else REPLICATE

    def _best(self, call: OpCall, sources: tuple[fx.Node, ...]) -> tuple[int, Rule] | None:
        """(cost, rule) of the rule that asks least of its inputs; of equals, one that cuts what is cut already."""
        has_parts = any(self._placement(source) != REPLICATE for source in sources)
        best: tuple[tuple[int, int], Rule] | None = None
        for rule in self._local_rules(call):
            rule = replace(rule, inputs=self._undemanding(call, rule, sources))
            cost = self._cost(rule, sources)
            if cost is None:
                continue
            wholes = sum(output == REPLICATE for output in rule.outputs)
            key = cost, wholes if has_parts else -wholes
            if best is None or key < best[0]:
                best = key, rule
        return None if best is None else (best[0][0], best[1])

    def _undemanding(self, call: OpCall, rule: Rule, sources: tuple[fx.Node, ...]) -> tuple[Placement, ...]:
        """The rule's inputs, taken as they lie where that does not matter: unread values, and zeros as addends."""
        unread = call.name.startswith(VALUES_UNUSED)
        return tuple(
            self._placement(source) if unread or (isinstance(wanted, Partial) and _is_zero(source)) else wanted
            for source, wanted in zip(sources, rule.inputs, strict=True)
        )

    def _local_rules(self, call: OpCall) -> list[Rule]:
        """The rules that need no other microbatch, and cut dims where the samples are cut."""
        rules = self.rules_of(call) or (replicate_rule(call),)
        return [
            rule
            for rule in rules
            if not (rule.internal_bytes or rule.halo or rule.ring or rule.splits) and self._divides(call, rule)
        ]

    def _divides(self, call: OpCall, rule: Rule) -> bool:
        pairs = zip((*call.inputs, *call.outputs), (*rule.inputs, *rule.outputs), strict=True)
        for spec, placement in pairs:
            dim = shard_dim(placement)
            if (
                spec is not None
                and dim is not None
                and (dim >= len(spec.shape) or not self.cut.can_cut(spec.shape[dim]))
            ):
                return False
        return True

    def _cost(self, rule: Rule, sources: tuple[fx.Node, ...]) -> int | None:
        """What the rule asks beyond how its inputs lie; None if it asks what cannot be had."""
        total = 0
        for source, wanted in zip(sources, rule.inputs, strict=True):
            has = self._placement(source)
            if has == wanted:
                continue
            if isinstance(wanted, Partial) or not (source in self.known or has == REPLICATE):
                return None
            total += TAKES_A_PART
        return total

    def specialize(self) -> None:
        """A whole value of which every reader takes the same part is made as that part, where its op can."""
        wanted: dict[fx.Node, set[Placement]] = defaultdict(set)
        for node in reversed(list(self.graph.nodes)):
            if node.op == "output":
                for result in node.all_input_nodes:
                    wanted[result].add(self._placement(result))
            elif is_getitem(node):
                wanted[node.all_input_nodes[0]].add(REPLICATE)  # several outputs: left as they are
            elif node in self.rules:
                self._specialize(node, wanted[node])
                for source, placement in zip(tensor_inputs(node), self.rules[node].inputs, strict=True):
                    wanted[source].add(placement)

    def _specialize(self, node: fx.Node, wanted: set[Placement]) -> None:
        if self.placed[node] != REPLICATE or len(wanted) != 1:
            return
        (part,) = wanted
        if shard_dim(part) is None:
            return
        sources = tensor_inputs(node)
        for rule in self._local_rules(call_of(node)):
            cost = self._cost(rule, sources)
            if rule.outputs != (part,) or cost is None or (node in self.known and (cost or rule.form == OFFSET)):
                continue  # what is known, and differs from microbatch to microbatch, is rather computed once
            self.rules[node], self.placed[node] = rule, part
            return

    def result(self) -> TimeLayouts:
        """Early are the known values that a reader wants otherwise than a microbatch makes them."""
        early: dict[tuple[str, Placement], None] = {}
        needed = self._needed()
        for node in self.graph.nodes:
            if node not in needed or node not in self.rules:
                continue
            for source, wanted in zip(tensor_inputs(node), self.rules[node].inputs, strict=True):
                if source in self.known and (source in self.whole or self._placement(source) != wanted):
                    early[source.name, wanted] = None
        for result in self.graph.output_node().all_input_nodes:
            if result in self.whole:
                early[result.name, self.placed[result]] = None
        for node in self.graph.nodes:  # tangents that nothing reads
            if node.op == "placeholder":
                self._placement(node)
        return TimeLayouts(
            {node.name: rule for node, rule in self.rules.items()},
            {node.name: placement for node, placement in self.placed.items()},
            tuple(early),
        )

    def _needed(self) -> set[fx.Node]:
        """What the results need of each microbatch: early values end the walk."""
        found: set[fx.Node] = set()
        waiting = list(self.graph.output_node().all_input_nodes)
        while waiting:
            node = waiting.pop()
            if node in found or node in self.whole:
                continue
            found.add(node)
            if is_getitem(node):
                waiting.extend(node.all_input_nodes)
            elif node in self.rules:
                for source, wanted in zip(tensor_inputs(node), self.rules[node].inputs, strict=True):
                    if source not in self.known or self._placement(source) == wanted:
                        waiting.append(source)
        return found

    def _needs_the_batch(self, node: fx.Node, call: OpCall, sources: tuple[fx.Node, ...]) -> MicrobatchError:
        sums = [source for source in sources if isinstance(self._placement(source), Partial)]
        what = f"{call.name} needs the whole batch at once"
        if sums:
            what = f"{call.name} reads a sum over the whole batch, of {sums[0].meta['key']}"
        return MicrobatchError(
            f"{what}: microbatches would give another result than the single device",
            where=node.meta.get("where", "") or (sums[0].meta.get("where", "") if sums else ""),
            fix="use microbatches=1; or a norm over each sample (GroupNorm, LayerNorm) in place of batch norm in "
            "training, or frozen statistics (eval()); or a loss that adds up over the samples; or microbatches that "
            "are batches by themselves, as in gradient accumulation: batch_semantics='accumulated'",
        )
