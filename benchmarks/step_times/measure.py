"""Runs on every rank: training steps of a model under several plans by turns, and what each took beside its price."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor, fx
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar.cost_models.hardware import HardwareProfile
from autopar.mesh import as_mesh
from autopar.passes.collectives import is_collective, is_wait
from autopar.planner.node_prices import collective_call, computes, node_seconds
from autopar.planner.prices import Prices, kernel_class
from autopar.runtime.parallel_module import ParallelModule
from autopar.runtime.step import geometry_of
from autopar.sharding.op_call import call_of
from benchmarks.step_times.models import Made
from benchmarks.step_times.ticks import Clock, Times, gathered, with_ticks

Record = dict[str, Any]


@dataclass
class Subject:
    """A model under one plan."""

    pmodel: ParallelModule
    inputs: Mapping[str, Tensor]
    prices: Prices
    walls: list[tuple[float, float]] = field(default_factory=list)  # start and end of each step
    processor_s: list[float] = field(default_factory=list)  # of all threads

    def step(self) -> None:
        """One step: forward and backward."""
        self.pmodel.zero_grad(set_to_none=True)
        dist.barrier()
        start, worked = time.perf_counter(), time.process_time()
        out = self.pmodel(**self.inputs)
        getattr(out, "loss", out).backward()
        self.processor_s.append(time.process_time() - worked)
        self.walls.append((start, time.perf_counter()))
        self.pmodel.zero_grad(set_to_none=True)

    def record(self) -> Record:
        """The figures of all steps but the first, which warms up; a step lasts from when the first rank begins until
        the last one is done."""
        ranks = dist.get_world_size()
        both = gathered(np.array(self.walls[1:]), ranks)
        seconds = both[..., 1].max(axis=1) - both[..., 0].min(axis=1)
        plan: Any = self.pmodel.plan
        return {
            "predicted_s": plan.step_s,
            "step_s": float(np.median(seconds)),
            "fastest_s": float(seconds.min()),
            "processor_s": float(gathered([np.median(self.processor_s[1:])], ranks).mean()),
            "steps": len(seconds),
        }

    def by_kind(self, steps: int) -> dict[str, list[float]]:
        """Of further steps that note the time after every node, by kind of op; see `_by_kind`."""
        with self._ticking() as (clock, phases):
            noted = []
            for _ in range(steps):
                clock.noted = []
                self.step()
                noted.append(clock.noted)
        ticks, at, rows = np.array(noted[1:]), 0, list[Record]()
        for nodes in phases:
            rows += self._rows(nodes, np.diff(ticks[:, at : at + len(nodes) + 1], axis=1))
            at += len(nodes) + 1
        return _by_kind(rows)

    @contextmanager
    def _ticking(self) -> Iterator[tuple[Clock, list[tuple[fx.Node, ...]]]]:
        """In here the graphs note the time; (where, the nodes of each phase that are timed)."""
        bound, clock, phases, timed = self.pmodel._shown(), Clock(), {}, []
        local = bound.step.local
        assert local.backward is not None
        for name, gm in (("forward", local.forward), ("backward", local.backward)):
            phases[name], names = with_ticks(gm, clock)
            by_name = {node.name: node for node in gm.graph.nodes}
            timed.append(tuple(by_name[item] for item in names))
        plain, bound.step = bound.step, replace(bound.step, local=replace(local, **phases))
        try:
            yield clock, timed
        finally:
            bound.step = plain

    def _rows(self, nodes: Sequence[fx.Node], spent: Times) -> list[Record]:
        """`spent`: [steps, nodes, (wall, processor)] seconds. A wait counts by the wall, other nodes by the
        processor."""
        geometry = geometry_of(self.pmodel.mesh)
        usual, rows = np.median(spent, axis=0), []
        for node, (wall_s, worked_s) in zip(nodes, usual.tolist(), strict=True):
            kind = "view"
            if is_collective(node):
                kind = collective_call(node, geometry).kind
            elif is_wait(node):
                kind = f"wait for {collective_call(node.all_input_nodes[0], geometry).kind}"
            elif computes(node):
                kind = kernel_class(call_of(node))
            priced_s = node_seconds(node, self.prices, geometry)
            rows.append({"kind": kind, "measured_s": wall_s if is_wait(node) else worked_s, "priced_s": priced_s})
        return rows


def _by_kind(rows: Sequence[Record]) -> dict[str, list[float]]:
    """By kind of op: how many, measured and priced seconds; a wait counts to its collective."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for row in rows:
        cell = sums[row["kind"].removeprefix("wait for ")]
        cell[0] += not row["kind"].startswith("wait")
        cell[1] += row["measured_s"]
        cell[2] += row["priced_s"]
    return dict(sums)


def measure(
    made: Made, searches: Sequence[str], mesh: DeviceMesh, profile: HardwareProfile, *, steps: int, ops: bool
) -> dict[str, Record]:
    """The record of each plan; the plans take turns, step by step. `ops`: what each kind of op took, too."""
    model, inputs = made
    prices = Prices(as_mesh(mesh, profile))
    subjects = {}
    for search in searches:
        pmodel = autopar.compile(model, mesh, example_inputs=inputs, search=search, hardware=profile)
        subjects[search] = Subject(pmodel, inputs, prices)
    for _ in range(steps + 1):
        for subject in subjects.values():
            subject.step()
    records = {search: subject.record() for search, subject in subjects.items()}
    if ops:
        records = {search: {**records[search], "kinds": item.by_kind(steps)} for search, item in subjects.items()}
    return records
