"""The formulas behind the prices of decisions, with their numbers: they add up to the very prices that were used."""

from __future__ import annotations

from dataclasses import replace

from autopar.cost_models.formula import Numeric, Priced
from autopar.cost_models.memory import SHARD, TRAINED_SHARD
from autopar.plan_details import MoveCost
from autopar.planner.decisions import Decision
from autopar.planner.optimizer_state import Optimizer
from autopar.planner.prices import Prices
from autopar.planner.strategy_prices import StrategyPrices
from autopar.sharding.strategies import local_bytes


class Formulas:
    """Of decisions on one mesh."""

    def __init__(self, prices: Prices, optimizer: Optimizer) -> None:
        self.prices, self.optimizer, self.strategies = prices, optimizer, StrategyPrices(prices)

    def of(self, decision: Decision, pick: int) -> tuple[tuple[Priced, ...], tuple[Priced, ...]]:
        """(of its seconds, of its memory) under one strategy."""
        return self._seconds(decision, pick), self._held(decision, pick)

    def of_move(self, move: MoveCost) -> tuple[Priced, ...]:
        """Of a move into it."""
        prices = self.prices.move_prices(move.collective, move.bytes, move.axis, move.copied)
        return tuple(price.at(0) for price in prices)

    def _seconds(self, decision: Decision, pick: int) -> tuple[Priced, ...]:
        if decision.call is not None:
            return self.strategies.terms(decision.call, decision.strategies[pick])
        if decision.kind != "parameter" or not decision.seconds[pick] > 0:
            return ()
        spec, layout = decision.specs[0], decision.strategies[pick].outputs[0]
        assert spec is not None
        prices = self.prices.optimizer_prices(self.optimizer, spec, layout)
        return tuple(replace(price.at(0), times=price.at(0).times / self.prices.microbatches) for price in prices)

    def _held(self, decision: Decision, pick: int) -> tuple[Priced, ...]:
        """Of its values on the largest rank; of a parameter that is trained, with what training adds."""
        terms = []
        for itemsize, bytes_ in self._shards(decision, pick):
            price = Priced(SHARD, {"element_bytes": itemsize, "elements": bytes_ / itemsize})
            if decision.kind == "parameter" and decision.seconds[pick] > 0:
                copies = _state_copies(decision, pick, bytes_)
                numbers: dict[str, Numeric] = {**price.numbers, "gradient_copies": 1, "state_copies": copies}
                price = replace(price, formula=TRAINED_SHARD, numbers=numbers)
            terms.append(price)
        return tuple(terms)

    def _shards(self, decision: Decision, pick: int) -> list[tuple[int, int]]:
        """(bytes of an element, bytes of the largest shard) of each of its outputs."""
        pairs = zip(decision.specs, decision.strategies[pick].outputs, strict=True)
        shape = self.prices.mesh.shape
        return [(spec.dtype.itemsize, local_bytes(spec, layout, shape)) for spec, layout in pairs if spec is not None]


def _state_copies(decision: Decision, pick: int, shard_bytes: float) -> float:
    """How many times the parameter's bytes the optimizer's state takes."""
    return float(decision.bytes[pick]) / max(1.0, shard_bytes) - 1.0
