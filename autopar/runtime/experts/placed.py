"""The experts of one module on its ranks: their orders, and all that follows when these change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.capture.program import InputKind, Program
from autopar.errors import UnsupportedOptionError
from autopar.passes.expert_places import ExpertPlaces
from autopar.passes.observed import ExpertCount
from autopar.runtime.experts.load import ExpertLoad
from autopar.runtime.experts.optimizers import OptimizerWatch
from autopar.runtime.experts.order import ExpertOrder, inverse
from autopar.runtime.experts.rebalance import Movable
from autopar.runtime.experts.row_moves import RowMover
from autopar.runtime.experts.weights import ExpertWeights, expert_weights
from autopar.runtime.mirror import Container

MovableExperts = tuple[list[ExpertWeights], list[Movable], dict[str, str]]
"""Weights and places of the layers whose experts may move; by layer, why the others' may not."""


@dataclass
class PlacedExperts:
    """`orders`: by name of a parameter that holds experts' weights; empty until the first move."""

    orders: dict[str, ExpertOrder] = field(default_factory=dict)
    watch: OptimizerWatch = field(default_factory=OptimizerWatch)
    mover: RowMover = field(default_factory=RowMover)

    def watch_weights(self, program: Program, parameters: Mapping[str, Tensor]) -> None:
        """Notice the optimizers of the experts' weights from here on."""
        for item in expert_weights(program):
            own = [parameters[name] for name in item.parameters if name in parameters]
            self.watch.parameters |= {id(parameter): parameter for parameter in own}

    def order_of(self, item: ExpertWeights) -> ExpertOrder | None:
        return next((self.orders[name] for name in item.parameters if name in self.orders), None)

    def placed(self, programs: Iterable[Program]) -> dict[str, ExpertPlaces]:
        """By layer of these programs, where its experts are, of those that were rebalanced."""
        if not self.orders:
            return {}
        pairs = [(item, self.order_of(item)) for program in programs for item in expert_weights(program)]
        return {layer: order.places for item, order in pairs if order is not None for layer in item.layers}

    def places(self, program: Program, wanted: Mapping[str, ExpertPlaces] | None = None) -> dict[str, ExpertPlaces]:
        """By layer of a program, where its experts are, or are to be; none before the first move.

        `wanted`: by name of a parameter. Raises UnsupportedOptionError for a program that could not be computed with
        the weights as they lie then.
        """
        known = {name: order.places for name, order in self.orders.items()} | dict(wanted or {})
        if not known:
            return {}
        found, good = dict[str, ExpertPlaces](), set[str]()
        for item in expert_weights(program):
            places = next((known[name] for name in item.parameters if name in known), None)
            if places is not None and not item.obstacle:
                found |= dict.fromkeys(item.layers, places)
                good |= set(item.parameters)
        used = {node.name for node in program.graph_module.graph.nodes if node.op == "placeholder" and node.users}
        for slot in program.inputs:
            moved = slot.kind is InputKind.PARAMETER and slot.node in used and slot.name in known
            if moved and slot.name not in good:
                raise UnsupportedOptionError(
                    f"experts of {slot.name!r} were moved, and this call reads it otherwise than as a layer of experts",
                    fix="make such calls before pmodel.rebalance(), or load the checkpoint into a module of its own",
                )
        return found

    def movable(
        self,
        programs: Sequence[Program],
        counts: Iterable[ExpertCount],
        load: ExpertLoad,
        shared: Mapping[str, str] = MappingProxyType({}),
    ) -> MovableExperts:
        """What may be moved.

        `counts`: of the first of the programs, which says who holds what. `shared`: by name of a parameter, what else
        keeps it where it is. Raises UnsupportedOptionError without layers whose experts stand on several groups of
        ranks.
        """
        known = {count.layer: count for count in counts}
        obstacles = {name: item.obstacle for program in programs for item in expert_weights(program)
                     for name in item.parameters if item.obstacle} | dict(shared)  # fmt: skip
        weights, items, kept = list[ExpertWeights](), list[Movable](), dict[str, str]()
        for item in expert_weights(programs[0]):
            held, axes = known[item.layers[0]].spans, known[item.layers[0]].holders
            obstacle = next((obstacles[name] for name in item.parameters if name in obstacles), item.obstacle)
            reason = obstacle or _reason(held)
            if reason:
                kept |= dict.fromkeys(item.layers, reason)
                continue
            total = sum(load.counts[layer].double() for layer in item.layers)
            assert isinstance(total, Tensor)
            weights.append(item)
            items.append(Movable(item.layers, tuple(total.tolist()), self._places_on(item, held, axes)))
        if not items:
            reasons = [f"{layer}: {reason}" for layer, reason in kept.items()] or ["there is no layer of experts"]
            raise UnsupportedOptionError(
                f"no layer's experts can be moved: {'; '.join(reasons)}",
                fix="shard them by experts: constraints={'*/autopar.experts*': 'A'} sends tokens to them by all-to-all",
            )
        return weights, items, kept

    def _places_on(self, item: ExpertWeights, spans: Sequence[tuple[int, int]], axes: tuple[int, ...]) -> ExpertPlaces:
        """Where the experts are, for groups of ranks along these axes: copies for other groups are none."""
        order = self.order_of(item)
        experts = order.experts if order is not None else tuple(range(item.experts))
        if order is not None and order.places.axes == axes and len(order.places.computed) == len(spans):
            return order.places
        return ExpertPlaces(experts, tuple(experts[start:end] for start, end in spans), axes)

    def check_states(self, weights: Sequence[ExpertWeights], parameters: Mapping[str, Tensor]) -> None:
        """Raise UnsupportedOptionError for a state of an optimizer that could not move along."""
        for name in {name for item in weights for name in item.parameters} & set(parameters):
            self.watch.states(parameters[name])

    def move(
        self,
        weights: Sequence[ExpertWeights],
        wanted: Sequence[ExpertPlaces],
        parameters: Mapping[str, DTensor],
        root: Container,
    ) -> int:
        """Bring every layer's experts to the rows that are wanted, with their gradients and optimizer state; bytes
        received. `parameters`: those of this rank; what other stages hold, these move."""
        received = 0
        for item, places in zip(weights, wanted, strict=True):
            order = self.order_of(item)
            before = inverse(order.experts) if order is not None else range(item.experts)
            sources = [before[expert] for expert in places.experts]
            order = order or ExpertOrder(self.mover, places)
            self.orders |= dict.fromkeys(item.parameters, order)
            for held in (parameters[name] for name in item.parameters if name in parameters):
                if sources != list(range(item.experts)):
                    received += self._move(held, sources)
                self.watch.orders[id(held)] = order
            order.places = places
        for module in root.modules():
            assert isinstance(module, Container)
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in self.watch.orders:
                    module.orders[name] = self.watch.orders[id(parameter)]
        return received

    def _move(self, parameter: DTensor, sources: Sequence[int]) -> int:
        held = [parameter, *self.watch.states(parameter)]
        if parameter.grad is not None:
            held.append(parameter.grad)
        received = sum(self.mover.reorder(value, sources) for value in held)
        torch.autograd.graph.increment_version(parameter)  # a backward of a call before the move is an error
        return received


def _reason(spans: Sequence[tuple[int, int]]) -> str:
    """Why experts that stand so cannot be moved, or ""."""
    if len(spans) == 1:
        return "every rank holds all of its experts"
    if len({end - start for start, end in spans}) > 1:
        return f"its experts do not divide over the {len(spans)} groups of ranks"
    return ""
