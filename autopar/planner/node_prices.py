"""Seconds of the nodes of emitted graphs, and of the local forms that the planner has yet to choose among.

A local form's price is that of the kernels that it emits, not of the op that it stands for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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
from autopar.passes.collectives import collective_kind, collective_splits, is_collective, is_wait
from autopar.passes.local_call import WORK_SHARE, GraphBuilder, LocalCall, RankGeometry
from autopar.passes.local_forms import local_form_of
from autopar.passes.storages import view_base
from autopar.planner.prices import Prices
from autopar.runtime.virtual_groups import virtual_group_names
from autopar.sharding.assignment import is_getitem
from autopar.sharding.layout import Layout
from autopar.sharding.op_call import OpCall, TensorSpec, call_of, walk
from autopar.sharding.rule import Rule
from autopar.sharding.strategies import Strategy
from autopar.sharding.windows import frames_are_chunks
from autopar.torch_compat import FakeTensorMode

NEIGHBOURS = 2  # a rank of a ring has one on either side


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """A collective of an emitted graph. `bytes_` as `Step.bytes` counts them: of the full tensor over the group."""

    kind: str
    axis: int
    bytes_: int


def computes(node: fx.Node) -> bool:
    """Whether a node runs a kernel on the device: no collective, no view, no pick of one of several outputs."""
    if node.op != "call_function" or is_getitem(node) or is_collective(node) or is_wait(node):
        return False
    return view_base(node) is None


def compute_seconds(node: fx.Node, prices: Prices) -> float:
    """Seconds of a node that computes: of the part of its rows that it works on, where its local form noted one."""
    share: float = node.meta.get(WORK_SHARE, 1.0)
    return share * prices.local_op(call_of(node))


def collective_call(node: fx.Node, geometry: RankGeometry) -> CollectiveCall:
    """What a node that starts a collective does, and over which axis."""
    kind = collective_kind(node)
    axis = next(index for index, name in enumerate(geometry.group_names) if name in node.args)
    value = node if kind == "all_gather" else node.all_input_nodes[0]
    if kind == "all_to_all" and collective_splits(node) is not None:
        return exchange_call(node, axis, geometry.coordinates[axis])
    return CollectiveCall(kind, axis, _bytes(value.meta["val"]))


def exchange_call(node: fx.Node, axis: int, here: int) -> CollectiveCall:
    """An all-to-all, or what it is where a rank keeps its own share to itself: messages to a neighbour or two."""
    splits = collective_splits(node)
    assert splits is not None
    source, (coming, sent) = node.all_input_nodes[0], splits
    own, arriving = (_bytes(value.meta["val"]) for value in (source, node))
    if sent[here]:  # in equal shares, the buffer holds what stays here too
        return CollectiveCall("all_to_all", axis, own)
    messages = max(sum(count > 0 for count in counts) for counts in (coming, sent))
    bytes_ = max(own, arriving)
    if messages <= NEIGHBOURS:
        return CollectiveCall("send", axis, bytes_)
    return CollectiveCall("all_to_all", axis, bytes_ * len(sent) // (len(sent) - 1))


def copied_bytes(call: CollectiveCall) -> int:
    """Bytes that a functional collective copies before it starts: all_reduce works on a copy of its input."""
    return call.bytes_ if call.kind == "all_reduce" else 0


def node_seconds(node: fx.Node, prices: Prices, geometry: RankGeometry) -> float:
    """Seconds of any node, nothing hidden."""
    if is_collective(node):
        call = collective_call(node, geometry)
        copied = copied_bytes(call)
        return prices.collective(call.kind, call.bytes_, call.axis) + (prices.copy(copied) if copied else 0.0)
    return compute_seconds(node, prices) if computes(node) else 0.0


def origin_geometry(mesh_shape: tuple[int, ...], device: str = "cpu") -> RankGeometry:
    """The rank at the origin, which holds the largest shards, in virtual groups."""
    return virtual_geometry((0,) * len(mesh_shape), mesh_shape, device)


def virtual_geometry(coordinates: tuple[int, ...], mesh_shape: tuple[int, ...], device: str = "cpu") -> RankGeometry:
    """The rank at `coordinates`, in virtual groups."""
    return RankGeometry(mesh_shape, coordinates, virtual_group_names(coordinates, mesh_shape), device)


@dataclass(frozen=True, slots=True)
class FormTraits:
    """What a local form runs: the op itself or not, and how many kernels beside it that move how many bytes."""

    calls_op: bool
    kernels: int
    moved_bytes: int


@dataclass
class StrategyPrices:
    """Seconds of ops under strategies.

    A local form is emitted once for each op and set of forms; the kernels beside the op are then priced for every size,
    in proportion to the bytes that the op itself moves.
    """

    prices: Prices
    geometry: RankGeometry = field(init=False)
    fake_calls: FakeCalls = field(init=False)
    known: dict[tuple[str, tuple[str, ...]], tuple[FormTraits, float]] = field(init=False)

    def __post_init__(self) -> None:
        self.geometry = origin_geometry(self.prices.mesh.shape)
        self.fake_calls = FakeCalls(FakeTensorMode())
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
        key = call.name, tuple(sorted({traits_key(rule, ranks) for rule, ranks in self._per_axis(strategy)}))
        if key not in self.known:
            self.known[key] = traits_of(self._emitted(call, strategy), call), op_bytes
        return self.known[key]

    def _per_axis(self, strategy: Strategy) -> Iterable[tuple[Rule, int]]:
        return zip(strategy.rules, self.prices.mesh.shape, strict=True)

    def _emitted(self, call: OpCall, strategy: Strategy) -> fx.Graph:
        form = local_form_of(call.target)
        assert form is not None, f"{call.name} has rules in forms but no local form"
        build = GraphBuilder(fx.Graph(), self.fake_calls, self.geometry)
        arguments = _Arguments(build, iter(strategy.inputs))
        args, kwargs = arguments.of(call.args), {name: arguments.of(value) for name, value in call.kwargs}
        form(LocalCall(build, call, strategy, args, kwargs))
        return build.graph


def traits_key(rule: Rule, ranks: int) -> str:
    """What of a rule decides which kernels its form emits: windows that lie side by side copy nothing."""
    still = rule.halo is not None and frames_are_chunks(rule.halo.window, ranks)
    return f"{rule.form}, still" if still else rule.form


def traits_of(graph: fx.Graph, call: OpCall) -> FormTraits:
    """What the graph of a local form of `call` runs."""
    nodes = [node for node in graph.nodes if computes(node)]
    beside = [node for node in nodes if node.target is not call.target]
    moved = sum(_bytes(value.meta["val"]) for node in beside for value in (node, *node.all_input_nodes))
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


def _bytes(value: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in walk(value) if isinstance(leaf, torch.Tensor))
