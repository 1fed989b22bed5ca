"""A microbatch as a chain of segments between the places where it may be cut, in numbers for the stage search.

Times and bytes of an op are those of the layouts that a plan of the whole microbatch gave it on the mesh of one stage;
without such a plan (one rank, or none that fits) those of the whole op, shared evenly by the ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import fx

from autopar.capture.program import InputKind
from autopar.passes.storages import view_root
from autopar.plan_entries import PlanEntry
from autopar.planner.cuts import Places
from autopar.planner.node_prices import compute_seconds, computes
from autopar.planner.optimizer_state import Optimizer
from autopar.planner.prices import Prices
from autopar.sharding.layout import replicated
from autopar.sharding.op_call import spec_of
from autopar.stages.assign import Anatomy, assign_stages, size_of

MOST_SEGMENTS = 96
GRADIENT_COPIES = 2  # the sum so far, and what the microbatch adds
SUMS = ("all_reduce", "reduce_scatter")

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Shares:
    """What a plan made of a microbatch's ops: `seconds` by key, moves included, where the whole ops take `whole_s` in
    all; the share of parameters and of saved values that one rank holds; `sync_s` by parameter, to sum its gradient."""

    state: float
    saved: float
    seconds: Mapping[str, float] = field(default_factory=dict)
    whole_s: float = 0.0
    sync_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Segments:
    """By segment: seconds of forward and backward of one microbatch, bytes on one rank, bytes that cross its end.

    Segment i ends before the op `cuts[i]` of the forward; the last one at the program's end.
    """

    cuts: tuple[int, ...]
    forward_s: Numbers
    backward_s: Numbers
    fixed_bytes: Numbers  # parameters, gradients, optimizer state
    saved_bytes: Numbers
    crossing_bytes: Numbers
    sync_s: Numbers  # once a step


def segments_of(
    found: Anatomy,
    known: Places,
    prices: Prices,
    optimizer: Optimizer,
    shares: Shares,
    hosted: Set[str] = frozenset(),
) -> Segments:
    """The segments of a microbatch between places where it may be cut. `hosted`: the parameters that lie on the host,
    which are copied beside what computes in their segment."""
    table = _Table(found, known, prices, hosted)
    forward_s, backward_s = table.seconds(shares)
    forward_copies_s, backward_copies_s, sums_s, step_s = table.hosting(optimizer, shares)
    exposed = 1 - prices.mesh.profile.overlap
    crossing = np.concatenate([known.sent_bytes, [0.0]])
    return Segments(
        known.cuts,
        np.maximum(forward_s, forward_copies_s) + exposed * np.minimum(forward_s, forward_copies_s),
        np.maximum(backward_s, backward_copies_s) + exposed * np.minimum(backward_s, backward_copies_s) + sums_s,
        table.fixed(optimizer) * shares.state,
        table.saved() * shares.saved,
        crossing * shares.saved,
        table.sync(shares) + step_s,
    )


def shares_of(found: Anatomy, entries: Iterable[PlanEntry], prices: Prices) -> Shares:
    """What the entries of a plan of a microbatch, on the mesh of one stage, made of it."""
    seconds, sync_s = dict[str, float](), dict[str, float]()
    parameters = {name: size_of(node) for name, node in found.program.named_inputs(InputKind.PARAMETER).items()}
    values = {node.meta["key"]: size_of(node) for node in found.forward}
    stored: list[tuple[int, int]] = []
    kept: list[tuple[int, int]] = []
    for entry in entries:
        if entry.kind == "parameter":
            sync_s[entry.key] = sum(move.seconds for move in entry.moves if move.collective in SUMS)
            stored.append((entry.bytes, parameters[entry.key]))
        elif entry.kind == "op":
            seconds[entry.key] = entry.total_s
            if entry.residency and entry.key in values:
                kept.append((entry.bytes, values[entry.key]))
    whole_s = sum(compute_seconds(node, prices) for node in _ops(found) if computes(node))
    return Shares(_share(stored), _share(kept), seconds, whole_s, sync_s)


def _share(pairs: Sequence[tuple[int, int]]) -> float:
    whole = sum(full for _, full in pairs)
    return sum(own for own, _ in pairs) / whole if whole else 1.0


def _ops(found: Anatomy) -> list[fx.Node]:
    return [node for node in found.program.graph_module.graph.nodes if node.op == "call_function"]


def merged(found: Places) -> Places:
    """Without the places whose segments are shortest together, until few are left; no segment lacks a parameter."""
    cuts, seconds = list(found.cuts), list(found.seconds)
    sent, readers = list(found.sent_bytes), list(found.readers)

    def join(place: int) -> None:
        seconds[place : place + 2] = [seconds[place] + seconds[place + 1]]
        readers[place : place + 2] = [readers[place] + readers[place + 1]]
        del cuts[place], sent[place]

    segment = 0
    while segment < len(readers) and len(readers) > 1:
        if readers[segment]:
            segment += 1
        else:
            join(max(0, segment - 1))
            segment = max(0, segment - 1)
    while len(seconds) > MOST_SEGMENTS:
        join(min(range(len(cuts)), key=lambda place: seconds[place] + seconds[place + 1]))
    return Places(tuple(cuts), np.array(seconds), np.array(sent), np.array(readers))


class _Table:
    """Sums over the ops of each segment."""

    def __init__(self, found: Anatomy, known: Places, prices: Prices, hosted: Set[str]) -> None:
        self.found, self.prices, self.count = found, prices, len(known.seconds)
        self.assignment = assign_stages(found, known.cuts)
        self.parameters = found.program.named_inputs(InputKind.PARAMETER)
        self.home = {name: min(self.assignment.parameter_stages[node]) for name, node in self.parameters.items()
                     if self.assignment.parameter_stages[node]}  # fmt: skip
        self.hosted = hosted & self.home.keys()

    def seconds(self, shares: Shares) -> tuple[Numbers, Numbers]:
        """(of the forward, of the backward)."""
        whole: dict[fx.Node, float] = {
            node: compute_seconds(node, self.prices) for node in self.assignment.stage if computes(node)
        }
        scale = sum(whole.values()) / shares.whole_s if shares.whole_s else shares.saved
        found = np.zeros((2, self.count))
        for node, stage in self.assignment.stage.items():
            planned = shares.seconds.get(node.meta.get("key", "")) if shares.whole_s else whole.get(node)
            found[int(node in self.found.late), stage] += (planned or 0.0) * scale
        return found[0], found[1]

    def fixed(self, optimizer: Optimizer) -> Numbers:
        """Bytes of parameters, with optimizer state; of those that are trained, with gradients. A parameter that
        several segments read counts with each that is not next to one that reads it too; on the host its gradient."""
        trained = set(self.assignment.addends)
        found, one = np.zeros(self.count), replicated(1)
        for name, node in self.parameters.items():
            readers, gradients = self.assignment.parameter_stages[node], 0
            bytes_ = 0 if name in self.hosted else size_of(node)
            if name in trained:
                gradients = GRADIENT_COPIES * size_of(node)
                bytes_ += 0 if name in self.hosted else optimizer.bytes(spec_of(node.meta["val"]), one, (1,))
            bytes_ += 0 if name in self.hosted and len(readers) == 1 else gradients
            for stage in readers:
                found[stage] += 0 if stage - 1 in readers else bytes_
        return found

    def hosting(self, optimizer: Optimizer, shares: Shares) -> Numbers:
        """What parameters on the host take: (copies of the forward, of the backward, sums of gradients there, once a
        step the optimizer's). Copies there and back run at once."""
        trained, found = set(self.assignment.addends), np.zeros((4, self.count))
        whole = replicated(len(self.prices.mesh.shape))
        for name in sorted(self.hosted):
            node, readers = self.parameters[name], self.assignment.parameter_stages[self.parameters[name]]
            bytes_ = size_of(node) * shares.state
            copy_s, sums_s, step_s = self.prices.host_copy(bytes_), 0.0, 0.0
            if name in trained:
                step_s = self.prices.hosted_optimizer(optimizer, spec_of(node.meta["val"]), whole) * shares.state
                if len(readers) == 1:
                    sums_s = self.prices.hosted_sum(bytes_)
                else:  # the sum is sent once
                    step_s += copy_s
            for stage in readers:
                found[:2, stage] += [copy_s, copy_s if self.found.late else 0.0]
            found[2:, self.home[name]] += [sums_s, step_s]
        return found

    def sync(self, shares: Shares) -> Numbers:
        found = np.zeros(self.count)
        for name, stage in self.home.items():
            found[stage] += shares.sync_s.get(name, 0.0)
        return found

    def saved(self) -> Numbers:
        """Bytes that the backward reads of the forward, each storage once."""
        found, seen = np.zeros(self.count), set[fx.Node]()
        for node in self.found.forward:
            root = view_root(node)
            if root not in self.assignment.stage or root in seen:
                continue
            if any(user in self.found.late for user in node.users):
                seen.add(root)
                found[self.assignment.stage[root]] += size_of(root)
        return found


def intervals(table: Numbers, ends: Sequence[int]) -> Numbers:
    """The sums of a table over stages that end before these segments."""
    sums = np.concatenate([[0.0], np.cumsum(table)])
    result: Numbers = np.diff(sums[[0, *ends]])
    return result
