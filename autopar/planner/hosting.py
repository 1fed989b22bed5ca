"""Parameters on the host: which may lie there, what that costs, and when copies of them are on the device.

A parameter on the host takes its gradient and its optimizer's state along, which steps it there. Each phase that reads
it has a copy on the device (`passes.host_parameters`). A copy costs the host link's time, less what computation hides
of it: the parameters share the time between their first readers, and the gradients that from one to the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import numpy as np

from autopar.passes.host_copies import HEAVY_OPS
from autopar.passes.schedule_collectives import HEAVY_NAMES
from autopar.planner.decisions import NO_OPTIMIZER, Decision
from autopar.planner.optimizer_state import Optimizer
from autopar.planner.prices import Prices
from autopar.planner.residency import HOSTED
from autopar.planner.saved_values import late_decisions, moment, roots_of
from autopar.sharding.layout import Layout
from autopar.sharding.op_call import TensorSpec
from autopar.sharding.strategies import local_bytes

LEAST = 1e-3  # of the bytes of all parameters: a smaller one stays on the device, whatever happens
Life = tuple[int, int, float]
"""First moment, the moment after the last, bytes."""


@dataclass(frozen=True, slots=True)
class Window:
    """When a copy of a parameter, or its gradient, is on the device, in decisions: from `start` to before `end`.
    `hiding_s`: seconds of computation that its copy over the host link may run beside."""

    start: int
    end: int
    hiding_s: float


@dataclass(frozen=True, slots=True)
class SharedParameters:
    """What several programs of one step read, by name. Its gradient stays on the device to the end of the step, where
    the programs' parts of it are summed. `places`: whether it lies on the host, where another program has said so."""

    names: frozenset[str] = frozenset()
    places: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True)
class Hosting:
    """The parameters of a program that may lie on the host. `fixed`: names, where they lie there already and no others
    do. `kept`: by name, why a parameter stays on its device whatever is asked. `shared`: with other programs."""

    decisions: Sequence[Decision]
    prices: Prices
    optimizer: Optimizer = NO_OPTIMIZER
    fixed: Set[str] | None = None
    kept: Mapping[str, str] = field(default_factory=dict)
    shared: SharedParameters = SharedParameters()

    def why_not(self, index: int) -> str:
        """Why a decision is of no parameter that may lie on the host; nothing where it is."""
        decision = self.decisions[index]
        if decision.kind != "parameter":
            return "it is no parameter"
        if decision.name in self.kept:
            return self.kept[decision.name]
        if self.shared.places.get(decision.name) is False:
            return "it lies on the device in another stage"
        if not decision.specs[0] or not decision.specs[0].shape or index not in self._copies:
            return "it has no dims, or nothing reads it"
        return ""

    @cached_property
    def candidates(self) -> tuple[int, ...]:
        """The parameters that a search may put on the host."""
        if self.fixed is not None or self.prices.device.is_host:
            return ()
        sizes = {
            index: decision.specs[0].nbytes
            for index, decision in enumerate(self.decisions)
            if decision.kind == "parameter" and decision.specs[0] is not None
        }
        enough = LEAST * sum(sizes.values())
        large = [index for index, bytes_ in sizes.items() if bytes_ >= enough]
        return tuple(index for index in large if not self._is_elsewhere(index) and not self.why_not(index))

    def _is_elsewhere(self, index: int) -> bool:
        """Whether a parameter lies on the host because another program has it there."""
        decision = self.decisions[index]
        return decision.kind == "parameter" and self.shared.places.get(decision.name, False)

    def given(self, pins: Mapping[int, str]) -> frozenset[int]:
        """The parameters that lie on the host whatever is chosen."""
        if self.fixed is not None:
            named = (index for index, item in enumerate(self.decisions) if item.name in (self.fixed or ()))
            return frozenset(index for index in named if self.decisions[index].kind == "parameter")
        pinned = (index for index, pin in pins.items() if pin == HOSTED and not self.why_not(index))
        return frozenset(pinned) | frozenset(filter(self._is_elsewhere, range(len(self.decisions))))

    def open(self, pins: Mapping[int, str]) -> tuple[int, ...]:
        """The candidates that no pin has decided about: one to gather again what is stored does not say where."""
        return tuple(index for index in self.candidates if pins.get(index) in (None, "recompute"))

    def seconds(self, index: int, pick: int) -> float:
        """What it costs that a parameter lies on the host, in a layout: its copies, and a microbatch's share of the sum
        of gradients and of the step there."""
        copy_s = self.prices.host_copy(self._shard_bytes(index, pick))
        sent_s = self.prices.host_copy(self._gradient_bytes(index, pick))
        found = [(copy_s, self._copies.get(index, ())), (sent_s, self._sent.get(index, ()))]
        overlap = self.prices.mesh.profile.overlap
        total = sum(each - overlap * min(each, window.hiding_s) for each, windows in found for window in windows)
        if index in self._gradients:
            spec, layout = self._place(index, pick)
            step_s = self.prices.hosted_optimizer(self.optimizer, spec, layout)
            step_s -= self.prices.optimizer(self.optimizer, spec, layout)
            stays = index not in self._sent
            total += (step_s + (sent_s if stays else 0.0)) / self.prices.microbatches
            total += 0.0 if stays else self.prices.hosted_sum(self._gradient_bytes(index, pick))
        return total

    def hidden_s(self, index: int) -> tuple[float, ...]:
        """What of its copies computation may hide, in whole nanoseconds: alike in layers that are."""
        return tuple(round(it.hiding_s, 9) for it in (*self._copies.get(index, ()), *self._sent.get(index, ())))

    def bytes(self, index: int, pick: int) -> int:
        """What leaves the device with a parameter, at the end of the step: its shard, state, gradient if it is sent."""
        gradient = self._gradient_bytes(index, pick) if index in self._sent else 0
        return int(self.decisions[index].bytes[pick]) + gradient

    def away(self, index: int, pick: int) -> Iterator[Life]:
        """What a parameter on the device holds that one on the host does not."""
        count = len(self.decisions)
        yield 0, moment(count, 0, count), float(self.decisions[index].bytes[pick])
        for window in self._sent.get(index, ()):
            yield moment(window.end, 0, count), moment(count, 0, count), float(self._gradient_bytes(index, pick))

    def copies(self, index: int, pick: int) -> Iterator[Life]:
        """What a parameter on the host holds on the device: its copies."""
        count = len(self.decisions)
        for window in self._copies.get(index, ()):
            yield moment(window.start, 0, count), moment(window.end, 0, count), float(self._shard_bytes(index, pick))

    @cached_property
    def _sent(self) -> dict[int, list[Window]]:
        """By parameter, its gradient on the device until it is copied to the host; none of those that stay."""
        staying = self.shared.names
        return {index: item for index, item in self._gradients.items() if self.decisions[index].name not in staying}

    def _shard_bytes(self, index: int, pick: int) -> int:
        return local_bytes(*self._place(index, pick), self.prices.mesh.shape)

    def _gradient_bytes(self, index: int, pick: int) -> int:
        """Of the gradient that is sent, of which a rank may have a part alone."""
        (spec, layout), shape = self._place(index, pick), self.prices.mesh.shape
        return local_bytes(spec, self.optimizer.gradient_layout(spec, layout, shape), shape)

    def _place(self, index: int, pick: int) -> tuple[TensorSpec, Layout]:
        """A parameter, and how it lies."""
        spec = self.decisions[index].specs[0]
        assert spec is not None
        return spec, self.decisions[index].strategies[pick].outputs[0]

    @cached_property
    def _late(self) -> list[bool]:
        return late_decisions(self.decisions)

    @cached_property
    def _clock(self) -> list[float]:
        """When each decision starts, if nothing communicates."""
        return [0.0, *accumulate(float(it.seconds.min()) if it.kind == "op" else 0.0 for it in self.decisions)]

    @cached_property
    def _heavy(self) -> tuple[list[int], list[int]]:
        """The heavy ops of the forward, and of the backward."""
        found: tuple[list[int], list[int]] = ([], [])
        for index, decision in enumerate(self.decisions):
            if decision.call is not None and decision.call.name.split(".")[1] in HEAVY_NAMES:
                found[self._late[index]].append(index)
        return found

    @cached_property
    def _starts(self) -> tuple[int, int]:
        """The first op of the forward, and of the backward."""
        ops = [index for index, decision in enumerate(self.decisions) if decision.kind == "op"]
        late = [index for index in ops if self._late[index]]
        return min(ops, default=0), min(late, default=len(self.decisions))

    @cached_property
    def _copies(self) -> dict[int, list[Window]]:
        """By parameter: its copies, of the forward and of the backward."""
        roots = roots_of(self.decisions)
        reads: tuple[dict[int, list[int]], dict[int, list[int]]] = ({}, {})
        for index, decision in enumerate(self.decisions):
            for source in decision.sources if decision.kind == "op" else ():
                root = roots[source.decision]
                if self.decisions[root].kind == "parameter":
                    reads[self._late[index]].setdefault(root, []).append(index)
        found: dict[int, list[Window]] = {}
        for is_late, readers in enumerate(reads):
            before_s = self._clock[min(self._starts[is_late], len(self.decisions))]
            for root, own in sorted(readers.items(), key=lambda item: item[1][0]):
                start, now_s = self._prefetched(own[0], is_late), self._clock[own[0]]
                hiding_s = min(now_s - self._clock[start], max(0.0, now_s - before_s))
                found.setdefault(root, []).append(Window(start, own[-1] + 1, hiding_s))
                before_s = max(before_s, now_s)
        return found

    def _prefetched(self, reader: int, is_late: int) -> int:
        """Where a copy may start that is first read at `reader`."""
        place = int(np.searchsorted(self._heavy[is_late], reader)) - HEAVY_OPS
        return self._heavy[is_late][place] if place >= 0 else min(reader, self._starts[is_late])

    @cached_property
    def _gradients(self) -> dict[int, list[Window]]:
        """By parameter that is trained: its gradient on the device until it is copied to the host."""
        own = {item.name: index for index, item in enumerate(self.decisions) if item.kind == "parameter"}
        made = [
            (item.sources[0].decision, own[item.name])
            for item in self.decisions
            if item.kind == "gradient" and item.name in own
        ]
        found: dict[int, list[Window]] = {}
        next_s, waits = self._clock[-1], 2 if self.prices.mesh.size > 1 else 1  # for a sum over the ranks, for the copy
        for start, index in sorted(made, reverse=True):
            place = int(np.searchsorted(self._heavy[1], start, side="right")) + waits * HEAVY_OPS - 1
            end = self._heavy[1][place] + 1 if place < len(self._heavy[1]) else len(self.decisions)
            now_s = self._clock[start + 1]
            found.setdefault(index, []).append(Window(start, end, max(0.0, next_s - now_s)))
            next_s = min(next_s, now_s)
        return found
