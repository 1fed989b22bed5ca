"""What there is to decide: one decision per op, input, parameter and gradient, with its strategies and their prices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np
import numpy.typing as npt
from torch import fx
from torch.distributed.tensor import Shard

from autopar.capture.program import InputKind, OutputKind, Program, ProgramOutput
from autopar.errors import UnsupportedRandomError
from autopar.planner.kinds import Kinds, owner
from autopar.planner.optimizer_state import Optimizer
from autopar.planner.prices import Prices
from autopar.planner.strategy_prices import StrategyPrices
from autopar.sharding.assignment import is_getitem
from autopar.sharding.discovery.book import RuleBook
from autopar.sharding.layout import REPLICATE, Layout, ranks_per_dim, replicated
from autopar.sharding.op_call import OpCall, TensorSpec, call_of, spec_of, tensor_inputs
from autopar.sharding.rule import Rule
from autopar.sharding.strategies import Strategy, local_bytes, shardable, strategies_of

Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Source:
    """Where a decision's tensor input comes from: output `output` of decision `decision`."""

    decision: int
    output: int


@dataclass(frozen=True, eq=False)
class Decision:
    """One choice. Its strategies say the layouts of its inputs (none for a placeholder) and of its outputs.

    `key` names it in plans; `kind` is parameter, buffer, input, tangent, seed, constant, op, gradient or result.
    """

    key: str
    kind: str
    node: str  # fx node name; for a gradient or result, of the producer
    name: str  # dotted parameter name, path of the input, ...
    module: str
    where: str
    phase: str
    strategies: tuple[Strategy, ...]
    seconds: Seconds
    bytes: npt.NDArray[np.int64]  # held over the life of its value, on the largest shard
    specs: tuple[TensorSpec | None, ...]  # of its outputs
    sources: tuple[Source, ...] = ()
    call: OpCall | None = None
    group: object = field(default=None)
    host_bytes: npt.NDArray[np.int64] | None = None  # of its optimizer's state, on the device while it is stepped


NO_OPTIMIZER = Optimizer("none")


class DecisionList:
    """Builds the decisions of a program, in program order. `rules`: by default the written ones alone."""

    def __init__(self, program: Program, prices: Prices, optimizer: Optimizer, rules: RuleBook | None = None) -> None:
        self.program, self.prices, self.optimizer = program, prices, optimizer
        self.rules = rules or RuleBook()
        self.mesh_shape = prices.mesh.shape
        self.decisions: list[Decision] = []
        self._trained = {output.name for output in program.outputs if output.kind is OutputKind.GRADIENT}
        self._at: dict[str, Source] = {}  # fx node name -> where its value comes from
        self._priced: dict[OpCall, tuple[tuple[Strategy, ...], Seconds, npt.NDArray[np.int64]]] = {}
        self._placed: dict[tuple[InputKind, TensorSpec], tuple[tuple[Strategy, ...], npt.NDArray[np.int64]]] = {}
        self._updates: dict[TensorSpec, tuple[npt.NDArray[np.int64], Seconds, npt.NDArray[np.int64] | None]] = {}
        self._left: dict[tuple[Layout, ...], tuple[tuple[Strategy, ...], Seconds]] = {}
        self._left_bytes: dict[tuple[TensorSpec, tuple[Layout, ...]], npt.NDArray[np.int64]] = {}
        nodes = [node for node in program.graph_module.graph.nodes if node.op == "call_function"]
        self._calls = {node.name: call_of(node) for node in nodes if not is_getitem(node)}
        self._kinds = Kinds(
            [(node.meta["module"], node.meta["key"], self._calls[node.name]) for node in nodes if not is_getitem(node)]
        )
        self._strategy_prices = StrategyPrices(prices)

    def build(self) -> tuple[Decision, ...]:
        inputs = {item.node: item for item in self.program.inputs}
        for node in self.program.graph_module.graph.nodes:
            if node.op == "placeholder":
                self._add_placeholder(node, inputs[node.name].kind, inputs[node.name].name)
            elif node.op == "output":
                self._add_results()
            elif is_getitem(node):
                producer, index = node.args
                self._at[node.name] = Source(self._at[producer.name].decision, index)
            else:
                self._add_op(node)
        return tuple(self.decisions)

    def _append(self, decision: Decision) -> int:
        self.decisions.append(decision)
        return len(self.decisions) - 1

    def _add_placeholder(self, node: fx.Node, kind: InputKind, name: str) -> None:
        spec = spec_of(node.meta["val"])
        strategies, held = self._stored(kind, spec)
        seconds, on_host = np.zeros(len(strategies)), None
        if kind is InputKind.PARAMETER and name in self._trained:
            held, seconds, on_host = self._updated(spec)
        module, own = owner(name) if kind in (InputKind.PARAMETER, InputKind.BUFFER) else ("", name)
        index = self._append(
            Decision(
                key=name if kind is InputKind.PARAMETER else f"{kind.value}:{name}",
                kind=kind.value,
                node=node.name,
                name=name,
                module=module,
                where="",
                phase=node.meta["phase"],
                strategies=strategies,
                seconds=seconds,
                bytes=held,
                specs=(spec,),
                group=(kind.value, self._kinds.of(module), own, spec),
                host_bytes=on_host,
            )
        )
        self._at[node.name] = Source(index, 0)

    def _stored(self, kind: InputKind, spec: TensorSpec) -> tuple[tuple[Strategy, ...], npt.NDArray[np.int64]]:
        """The strategies of a placeholder and the bytes that each holds: the same objects for all that are alike."""
        key = kind, spec
        if key not in self._placed:
            layouts = self._placeholder_layouts(kind, spec)
            held = np.array([local_bytes(spec, layout, self.mesh_shape) for layout in layouts], dtype=np.int64)
            self._placed[key] = tuple(_only_output(layout) for layout in layouts), held
        return self._placed[key]

    def _updated(self, spec: TensorSpec) -> tuple[npt.NDArray[np.int64], Seconds, npt.NDArray[np.int64] | None]:
        """Under each strategy of a parameter: its bytes with its optimizer's state, the seconds of its step that a
        microbatch bears, and the bytes of the state that lies on the host, if any does."""
        if spec not in self._updates:
            strategies, held = self._stored(InputKind.PARAMETER, spec)
            layouts = [strategy.outputs[0] for strategy in strategies]
            state = [self.optimizer.bytes(spec, layout, self.mesh_shape) for layout in layouts]
            step_s = [self.prices.optimizer(self.optimizer, spec, layout) for layout in layouts]
            seconds = np.array(step_s) / self.prices.microbatches
            away = [self.optimizer.host_bytes(spec, layout, self.mesh_shape) for layout in layouts]
            on_host = np.array(away, dtype=np.int64) if any(away) else None
            self._updates[spec] = held + np.array(state, dtype=np.int64), seconds, on_host
        return self._updates[spec]

    def _placeholder_layouts(self, kind: InputKind, spec: TensorSpec) -> list[Layout]:
        axes = len(self.mesh_shape)
        if kind is InputKind.PARAMETER:
            return [layout for layout in layouts_of(spec, self.mesh_shape) if storable(spec, layout, self.mesh_shape)]
        if kind in (InputKind.INPUT, InputKind.TANGENT, InputKind.ARRIVING):
            return list(self._even_layouts(spec))
        return [replicated(axes)]

    def _even_layouts(self, spec: TensorSpec) -> tuple[Layout, ...]:
        """Replicas and equal shards."""
        layouts = layouts_of(spec, self.mesh_shape)
        return tuple(layout for layout in layouts if shardable(spec, layout, self.mesh_shape, even=True))

    def _add_op(self, node: fx.Node) -> None:
        call = self._calls[node.name]
        if call not in self._priced:
            strategies = strategies_of(call, self._rules_of(node, call), self.mesh_shape)
            held = np.array([self._output_bytes(call, strategy) for strategy in strategies], dtype=np.int64)
            self._priced[call] = (strategies, self._strategy_prices.seconds(call, strategies), held)
        strategies, seconds, held = self._priced[call]
        sources = tuple(self._at[source.name] for source in tensor_inputs(node))
        key = node.meta["key"]
        index = self._append(
            Decision(
                key=key,
                kind="op",
                node=node.name,
                name=key,
                module=node.meta["module"],
                where=node.meta["where"],
                phase=node.meta["phase"],
                strategies=strategies,
                seconds=seconds,
                bytes=held,
                specs=call.outputs,
                sources=sources,
                call=call,
                group=(self._kinds.of(node.meta["module"]), key.partition("/")[2], call),
            )
        )
        self._at[node.name] = Source(index, 0)

    def _rules_of(self, node: fx.Node, call: OpCall) -> tuple[Rule, ...]:
        rules = self.rules.rules_of(call)
        if self.rules.is_random(call):
            raise UnsupportedRandomError(
                f"{call.name} gives two results for the same inputs: replicas of it would not agree",
                where=node.meta["where"],
                fix="draw the random numbers outside of the op, with functions of torch, and pass them in; if it is "
                "not random, or what differs is never read, give the op a rule with autopar.register_rule",
            )
        return rules

    def _output_bytes(self, call: OpCall, strategy: Strategy) -> int:
        pairs = zip(call.outputs, strategy.outputs, strict=True)
        return sum(local_bytes(spec, layout, self.mesh_shape) for spec, layout in pairs if spec is not None)

    def _add_results(self) -> None:
        """Gradients take their parameter's layout, or that of its optimizer's state (ZeRO-2); a loss, a buffer and an
        outside output are replicated.

        What goes to another pipeline stage leaves in any layout that the other can take.
        """
        parameters = {item.name: item for item in self.decisions if item.kind == "parameter"}
        has_loss = any(output.kind is OutputKind.LOSS for output in self.program.outputs)
        for output, value in zip(self.program.outputs, self.program.results, strict=True):
            source = self._at[value.name]
            producer = self.decisions[source.decision]
            if output.kind is OutputKind.OUTPUT and has_loss:
                continue
            spec = producer.specs[source.output]
            assert spec is not None
            parameter = parameters.get(output.name) if output.kind is OutputKind.GRADIENT else None
            layouts = tuple(self._gradient_layouts(parameter)) if parameter else ()
            if output.kind is OutputKind.LEAVING or output.is_between_stages:
                layouts = self._even_layouts(spec)
            layouts = layouts or (replicated(len(self.mesh_shape)),)
            strategies, seconds, held = self._result(spec, layouts)
            module = parameter.module if parameter else ""
            kind = "gradient" if output.kind is OutputKind.GRADIENT else "result"
            self._append(
                Decision(
                    key=result_key(output),
                    kind=kind,
                    node=value.name,
                    name=output.name,
                    module=module,
                    where="",
                    phase=value.meta["phase"],
                    strategies=strategies,
                    seconds=seconds,
                    bytes=held,
                    specs=(spec,),
                    sources=(source,),
                    group=(kind, parameter.group if parameter else output.name, producer.group),
                )
            )

    def _gradient_layouts(self, parameter: Decision) -> Iterator[Layout]:
        """How its gradient leaves under each strategy of a parameter."""
        spec = parameter.specs[0]
        assert spec is not None
        for strategy in parameter.strategies:
            yield self.optimizer.gradient_layout(spec, strategy.outputs[0], self.mesh_shape)

    def _result(
        self, spec: TensorSpec, layouts: tuple[Layout, ...]
    ) -> tuple[tuple[Strategy, ...], Seconds, npt.NDArray[np.int64]]:
        """The strategies of a result, their seconds and bytes: the same objects for all that are alike."""
        if layouts not in self._left:
            self._left[layouts] = tuple(map(_result, layouts)), np.zeros(len(layouts))
        if (spec, layouts) not in self._left_bytes:
            held = [local_bytes(spec, layout, self.mesh_shape) for layout in layouts]
            self._left_bytes[spec, layouts] = np.array(held, dtype=np.int64)
        return *self._left[layouts], self._left_bytes[spec, layouts]


def result_key(output: ProgramOutput) -> str:
    """The key of the decision in which layout an output leaves: `gradient:h.0.weight`, `loss:loss`, ..."""
    return f"{output.kind.value}:{output.name}"


def _only_output(layout: Layout) -> Strategy:
    return Strategy(tuple(Rule((), (placement,)) for placement in layout))


def _result(layout: Layout) -> Strategy:
    return Strategy(tuple(Rule((placement,), (placement,)) for placement in layout))


def layouts_of(spec: TensorSpec, mesh_shape: Sequence[int]) -> list[Layout]:
    """Every layout of replicas and shards; an axis of one rank only replicates."""
    per_axis = [
        [REPLICATE, *(Shard(dim) for dim in range(len(spec.shape)))] if ranks > 1 else [REPLICATE]
        for ranks in mesh_shape
    ]
    return list(product(*per_axis))


def storable(spec: TensorSpec, layout: Layout, mesh_shape: Sequence[int]) -> bool:
    """Whether a parameter may be stored so: where it is cut every rank holds something, though not all the same."""
    ways = ranks_per_dim(len(spec.shape), layout, mesh_shape)
    return all(count == 1 or size >= count for size, count in zip(spec.shape, ways, strict=True))
