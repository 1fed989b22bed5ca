"""Seconds of ops under strategies, local forms included: a form costs what the kernels cost that it emits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import fx

from autopar.cost_models.compute import memory_bound_price
from autopar.cost_models.formula import Priced
from autopar.fake_calls import FakeCalls
from autopar.passes.local_call import GraphBuilder, LocalCall
from autopar.passes.local_forms import local_form_of
from autopar.planner.node_prices import computes, origin_geometry, value_bytes
from autopar.planner.prices import Prices
from autopar.sharding.layout import Layout, shard_dim
from autopar.sharding.op_call import OpCall, TensorSpec
from autopar.sharding.rule import Rule
from autopar.sharding.strategies import Strategy
from autopar.sharding.windows import frames_are_chunks
from autopar.torch_compat import FakeTensorMode


@dataclass
class StrategyPrices:
    """Seconds of ops under strategies.

    A local form is emitted once for each op and set of forms; the kernels beside the op are then priced for every size,
    in proportion to the bytes that the op itself moves.
    """

    prices: Prices
    form_traits: TraitsOfForms = field(init=False)
    known: dict[tuple[str, tuple[str, ...]], tuple[FormTraits, float]] = field(init=False)

    def __post_init__(self) -> None:
        self.form_traits = TraitsOfForms(self.prices.mesh.shape)
        self.known = self.prices.form_traits  # of one `Prices`, so that all who ask it get one answer

    def seconds(self, call: OpCall, strategies: Sequence[Strategy]) -> npt.NDArray[np.float64]:
        """Seconds of one op under each strategy, on the largest shard, collectives of its form included."""
        seconds = self.prices.op(call, strategies)
        in_forms = [index for index, strategy in enumerate(strategies) if any(rule.form for rule in strategy.rules)]
        moved = self.prices.moved_bytes(call, strategies) if in_forms else seconds
        for index in in_forms:
            traits, beside = self._beside(call, strategies[index], float(moved[index]))
            own = float(seconds[index]) if traits.calls_op else 0.0
            kernels_s = traits.kernels * self.prices.kernel(beside) if traits.kernels else 0.0
            seconds[index] = own + kernels_s + self.prices.internal(call, strategies[index])
        return seconds

    def terms(self, call: OpCall, strategy: Strategy) -> tuple[Priced, ...]:
        """What `seconds` adds up for one strategy."""
        own = self.prices.op_prices(call, [strategy])
        if not any(rule.form for rule in strategy.rules):
            return tuple(price.at(0) for price in own)
        traits, beside = self._beside(call, strategy, float(self.prices.moved_bytes(call, [strategy])[0]))
        prices = own if traits.calls_op else []
        if traits.kernels:
            kernels = memory_bound_price(self.prices.device, beside)
            prices = [*prices, replace(kernels, times=traits.kernels, label="kernels of the local form")]
        return tuple(price.at(0) for price in [*prices, *self.prices.internal_prices(call, strategy)])

    def _beside(self, call: OpCall, strategy: Strategy, moved: float) -> tuple[FormTraits, float]:
        """The traits of a form, and the bytes that each kernel beside the op moves when the op moves `moved`."""
        traits, op_bytes = self._traits(call, strategy, moved)
        return traits, traits.moved_bytes * moved / max(1.0, op_bytes * traits.kernels)

    def _traits(self, call: OpCall, strategy: Strategy, op_bytes: float) -> tuple[FormTraits, float]:
        """The traits of a form, and the bytes that the op moved where they were found."""
        key = call.name, self.form_traits.key(strategy)
        if key not in self.known:
            self.known[key] = self.form_traits.of(call, strategy), op_bytes
        return self.known[key]


@dataclass(frozen=True, slots=True)
class FormTraits:
    """What a local form runs: the op itself or not, and how many kernels beside it that move how many bytes."""

    calls_op: bool
    kernels: int
    moved_bytes: int

    def continued(self, later: FormTraits, steps: int) -> FormTraits:
        """What comes out after `steps` more steps like the one from here to `later`."""
        kernels, moved_bytes = later.kernels - self.kernels, later.moved_bytes - self.moved_bytes
        return FormTraits(self.calls_op, self.kernels + steps * kernels, self.moved_bytes + steps * moved_bytes)


@dataclass
class TraitsOfForms:
    """The traits of local forms on one mesh, found by emitting them.

    A ring of many ranks is emitted as two smaller ones, of shards of the same size: every further rank adds the same.
    """

    mesh_shape: tuple[int, ...]
    fake_calls: FakeCalls = field(init=False)

    def __post_init__(self) -> None:
        self.fake_calls = FakeCalls(FakeTensorMode())

    def key(self, strategy: Strategy) -> tuple[str, ...]:
        """What of a strategy decides which kernels its form emits."""
        pairs = zip(strategy.rules, self.mesh_shape, strict=True)
        return *sorted({_key_of(rule, ranks) for rule, ranks in pairs}), f"{self._turns(strategy)} turns"

    def of(self, call: OpCall, strategy: Strategy) -> FormTraits:
        """What the form of `call` runs under a strategy."""
        turns, rings = self._turns(strategy), self._rings(strategy)
        few, more = (_smaller(self.mesh_shape, rings, first) for first in (FEW, FEW + 1))
        turns_of_few, turns_of_more = (math.prod(shape[axis] for axis in rings) - 1 for shape in (few, more))
        if turns <= turns_of_more:
            return self._emitted(call, strategy, self.mesh_shape)
        found = [
            self._emitted(_on_mesh(call, strategy, self.mesh_shape, shape), strategy, shape) for shape in (few, more)
        ]
        return found[0].continued(found[1], (turns - turns_of_few) // (turns_of_more - turns_of_few))

    def _rings(self, strategy: Strategy) -> list[int]:
        """The axes around which the strategy passes tensors, the longest first."""
        axes = [axis for axis, rule in enumerate(strategy.rules) if rule.ring is not None]
        return sorted(axes, key=lambda axis: -self.mesh_shape[axis])

    def _turns(self, strategy: Strategy) -> int:
        return math.prod(self.mesh_shape[axis] for axis in self._rings(strategy)) - 1

    def _emitted(self, call: OpCall, strategy: Strategy, mesh_shape: tuple[int, ...]) -> FormTraits:
        form = local_form_of(call.target)
        assert form is not None, f"{call.name} has rules in forms but no local form"
        build = GraphBuilder(fx.Graph(), self.fake_calls, origin_geometry(mesh_shape))
        arguments = _Arguments(build, iter(strategy.inputs))
        args, kwargs = arguments.of(call.args), {name: arguments.of(value) for name, value in call.kwargs}
        form(LocalCall(build, call, strategy, args, kwargs))
        return _traits_of(build.graph, call)


FEW = 3  # ranks of the longest ring, where others have two: its turns are neither the first nor the last alone


def _smaller(mesh_shape: tuple[int, ...], rings: Sequence[int], first: int) -> tuple[int, ...]:
    """The mesh with `first` ranks along the first of `rings`, and two along the others."""
    sizes = {axis: min(first if axis == rings[0] else 2, mesh_shape[axis]) for axis in rings}
    return tuple(sizes.get(axis, ranks) for axis, ranks in enumerate(mesh_shape))


def _on_mesh(call: OpCall, strategy: Strategy, mesh_shape: Sequence[int], smaller: Sequence[int]) -> OpCall:
    """The call whose shards on a smaller mesh are those of `call`."""
    inputs = iter(strategy.inputs)

    def resized(spec: TensorSpec, layout: Layout) -> TensorSpec:
        shape = list(spec.shape)
        for placement, ranks, fewer in zip(layout, mesh_shape, smaller, strict=True):
            dim = shard_dim(placement)
            if dim is not None:
                shape[dim] = -(-shape[dim] // ranks) * fewer
        return replace(spec, shape=tuple(shape))

    def of(value: Any) -> Any:
        if isinstance(value, TensorSpec):
            return resized(value, next(inputs))
        return tuple(of(item) for item in value) if isinstance(value, tuple) else value

    args, kwargs = of(call.args), tuple((name, of(value)) for name, value in call.kwargs)
    pairs = zip(call.outputs, strategy.outputs, strict=True)
    made = tuple(None if spec is None else resized(spec, layout) for spec, layout in pairs)
    return replace(call, args=args, kwargs=kwargs, outputs=made)


def _key_of(rule: Rule, ranks: int) -> str:
    """What of a rule decides which kernels its form emits: windows that lie side by side copy nothing."""
    still = rule.halo is not None and frames_are_chunks(rule.halo.window, ranks)
    return f"{rule.form}, still" if still else rule.form


def _traits_of(graph: fx.Graph, call: OpCall) -> FormTraits:
    """What the graph of a local form of `call` runs."""
    nodes = [node for node in graph.nodes if computes(node)]
    beside = [node for node in nodes if node.target is not call.target]
    moved = sum(value_bytes(value.meta["val"]) for node in beside for value in (node, *node.all_input_nodes))
    return FormTraits(len(beside) < len(nodes), len(beside), moved)


@dataclass
class _Arguments:
    """The arguments of a call, with a placeholder of one rank's shard for each tensor."""

    build: GraphBuilder
    layouts: Iterator[Layout]
    numbers: Iterator[int] = field(default_factory=count)

    def of(self, value: Any) -> Any:
        if isinstance(value, TensorSpec):
            node = self.build.graph.placeholder(f"tensor_{next(self.numbers)}")
            shape = self.build.geometry.chunk(value.shape, next(self.layouts))[1]
            device = torch.device(self.build.geometry.device)
            node.meta["val"] = self.build.fake_calls.empty(shape, value.dtype, device)
            return node
        if isinstance(value, torch.device):
            return torch.device(self.build.geometry.device)
        return tuple(self.of(item) for item in value) if isinstance(value, tuple) else value
