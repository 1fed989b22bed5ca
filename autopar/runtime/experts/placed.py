"""The experts of one module on its ranks: their orders, and all that follows when these change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.capture.program import InputKind, Program
from autopar.errors import UnsupportedOptionError
from autopar.passes.observed import ExpertCount
from autopar.runtime.experts.load import ExpertLoad
from autopar.runtime.experts.optimizers import OptimizerWatch
from autopar.runtime.experts.order import ExpertOrder, inverse, slots_for
from autopar.runtime.experts.rebalance import Groups, Movable
from autopar.runtime.experts.row_moves import RowMover
from autopar.runtime.experts.weights import ExpertWeights, expert_weights
from autopar.runtime.mirror import Container


@dataclass
class PlacedExperts:
    """`orders`: by name of a parameter that holds experts' weights; empty until the first move."""

    device: str
    orders: dict[str, ExpertOrder] = field(default_factory=dict)
    watch: OptimizerWatch = field(default_factory=OptimizerWatch)
    mover: RowMover = field(default_factory=RowMover)

    def watch_weights(self, program: Program, parameters: Mapping[str, Tensor]) -> None:
        """Notice the optimizers of the experts' weights from here on."""
        for item in expert_weights(program):
            self.watch.parameters |= {id(parameters[name]): parameters[name] for name in item.parameters}

    def order_of(self, item: ExpertWeights) -> ExpertOrder | None:
        return next((self.orders[name] for name in item.parameters if name in self.orders), None)

    def moved(self, programs: Iterable[Program]) -> dict[str, tuple[int, ...]]:
        """By layer of these programs, the expert in each slot, of those whose experts were moved."""
        if not self.orders:
            return {}
        pairs = [(item, self.order_of(item)) for program in programs for item in expert_weights(program)]
        return {layer: order.experts for item, order in pairs if order is not None for layer in item.layers}

    def slots(self, program: Program) -> dict[str, Tensor]:
        """By layer of a program, what it reads the slots of its experts from; none before the first move.

        Raises UnsupportedOptionError for a program that could not be computed with the weights as they lie.
        """
        if not self.orders:
            return {}
        found, good = dict[str, Tensor](), set[str]()
        for item in expert_weights(program):
            order = self.order_of(item)
            if order is not None and not item.obstacle:
                found |= dict.fromkeys(item.layers, order.slots)
                good |= set(item.parameters)
        used = {node.name for node in program.graph_module.graph.nodes if node.op == "placeholder" and node.users}
        for slot in program.inputs:
            moved = slot.kind is InputKind.PARAMETER and slot.node in used and slot.name in self.orders
            if moved and slot.name not in good:
                raise UnsupportedOptionError(
                    f"experts of {slot.name!r} were moved, and this call reads it otherwise than as a layer of experts",
                    fix="make such calls before pmodel.rebalance(), or load the checkpoint into a module of its own",
                )
        return found

    def movable(
        self, programs: Sequence[Program], counts: Iterable[ExpertCount], load: ExpertLoad
    ) -> tuple[list[ExpertWeights], list[Movable], dict[str, str]]:
        """(weights and groups of the layers whose experts may move; by layer, why the others' may not).

        `counts`: of the first of the programs, which says who holds what. Raises UnsupportedOptionError without layers
        whose experts stand on several groups of ranks.
        """
        spans = {count.layer: count.spans for count in counts}
        obstacles = {name: item.obstacle for program in programs for item in expert_weights(program)
                     for name in item.parameters if item.obstacle}  # fmt: skip
        weights, items, kept = list[ExpertWeights](), list[Movable](), dict[str, str]()
        for item in expert_weights(programs[0]):
            held = spans[item.layers[0]]
            obstacle = next((obstacles[name] for name in item.parameters if name in obstacles), item.obstacle)
            reason = obstacle or _reason(held)
            if reason:
                kept |= dict.fromkeys(item.layers, reason)
                continue
            order = self.order_of(item)
            experts = order.experts if order is not None else tuple(range(item.experts))
            total = sum(load.counts[layer].double() for layer in item.layers)
            assert isinstance(total, Tensor)
            groups = tuple(experts[start:end] for start, end in held)
            weights.append(item)
            items.append(Movable(item.layers, tuple(total.tolist()), groups))
        if not items:
            reasons = [f"{layer}: {reason}" for layer, reason in kept.items()] or ["there is no layer of experts"]
            raise UnsupportedOptionError(
                f"no layer's experts can be moved: {'; '.join(reasons)}",
                fix="shard them by experts: constraints={'*/autopar.experts*': 'A'} sends tokens to them by all-to-all",
            )
        return weights, items, kept

    def check_states(self, weights: Sequence[ExpertWeights], parameters: Mapping[str, Tensor]) -> None:
        """Raise UnsupportedOptionError for a state of an optimizer that could not move along."""
        for item in weights:
            for name in item.parameters:
                self.watch.states(parameters[name])

    def move(
        self,
        weights: Sequence[ExpertWeights],
        groups: Sequence[Groups],
        parameters: Mapping[str, DTensor],
        root: Container,
    ) -> int:
        """Bring every layer's experts to its groups, with their gradients and optimizer state; bytes received."""
        received = 0
        for item, wanted in zip(weights, groups, strict=True):
            order = self.order_of(item) or ExpertOrder.natural(self.mover, item.experts, self.device)
            experts, before = slots_for(order.experts, wanted), inverse(order.experts)
            sources = [before[expert] for expert in experts]
            for name in item.parameters:
                if experts != order.experts:
                    received += self._move(parameters[name], sources)
                self.orders[name] = order
                self.watch.orders[id(parameters[name])] = order
            order.change(experts)
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
