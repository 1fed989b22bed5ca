"""Runs on every rank: training steps of a model under several plans by turns, and what each took beside its price."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.distributed.device_mesh import DeviceMesh

import autopar
from autopar.cost_models.calibrate import MATMULS
from autopar.cost_models.compute import kernel_price, matmul_seconds
from autopar.cost_models.hardware import HardwareProfile
from autopar.cost_models.kernel_table import Shapes, bound_kernel
from autopar.mesh import as_mesh
from autopar.passes.collectives import is_collective, is_wait
from autopar.planner.node_prices import collective_call, computes, node_seconds
from autopar.planner.prices import Prices, kernel_class
from autopar.runtime.parallel_module import ParallelModule
from autopar.runtime.step import geometry_of
from autopar.sharding.op_call import call_of
from benchmarks.step_times.models import Made
from benchmarks.step_times.ticks import Clock, Notes, gathered, with_ticks

Record = dict[str, Any]
PROBED = ("aten.add", "aten.gelu", "aten._softmax", "aten.native_layer_norm", "aten.sum of rows")


@dataclass
class Subject:
    """A model under one plan, with a clock in its graphs."""

    pmodel: ParallelModule
    inputs: Mapping[str, Tensor]
    prices: Prices
    clock: Clock = field(default_factory=Clock)
    nodes: list[tuple[fx.Node, ...]] = field(default_factory=list)  # of each phase, as the clock ticks
    walls: list[tuple[float, float]] = field(default_factory=list)  # start and end of each step
    processor: list[tuple[float, float]] = field(default_factory=list)  # of all threads, and of this one
    noted: list[list[tuple[float, float]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        bound = self.pmodel._shown()
        local = bound.step.local
        assert local.backward is not None
        phases = {}
        for name, gm in (("forward", local.forward), ("backward", local.backward)):
            phases[name], names = with_ticks(gm, self.clock)
            by_name = {node.name: node for node in gm.graph.nodes}
            self.nodes.append(tuple(by_name[item] for item in names))
        bound.step = replace(bound.step, local=replace(local, **phases))

    def step(self) -> None:
        """One step: forward and backward."""
        self.pmodel.zero_grad(set_to_none=True)
        self.clock.noted = []
        dist.barrier()
        start, all_s, own_s = time.perf_counter(), time.process_time(), time.thread_time()
        out = self.pmodel(**self.inputs)
        getattr(out, "loss", out).backward()
        self.processor.append((time.process_time() - all_s, time.thread_time() - own_s))
        self.walls.append((start, time.perf_counter()))
        self.noted.append(self.clock.noted)
        self.pmodel.zero_grad(set_to_none=True)

    def record(self) -> Record:
        """The figures of all steps but the first, which warms up; of this rank, or the mean of all."""
        ranks, cut = dist.get_world_size(), len(self.nodes[0]) + 1
        ticks, edges = np.array(self.noted[1:]), np.array(self.walls[1:])
        rows = []
        for nodes, part in zip(self.nodes, (ticks[:, :cut], ticks[:, cut:]), strict=True):
            rows += self._rows(Notes(nodes, part))
        spans = (ticks[:, 0, 0] - edges[:, 0], ticks[:, cut, 0] - ticks[:, cut - 1, 0], edges[:, 1] - ticks[:, -1, 0])
        around_s = float(sum(span.min() for span in spans))
        processor = np.array(self.processor[1:])
        waited_s = sum(row["measured_s"] for row in rows if row["kind"].startswith("wait"))
        unhidden_s = max(0.0, float((processor[:, 0] - processor[:, 1]).min()) - waited_s)  # of the threads that carry
        undisturbed_s = around_s + unhidden_s + sum(row["measured_s"] for row in rows)
        means = gathered([undisturbed_s, processor[:, 0].min()], ranks).mean(axis=1)
        both = gathered(edges, ranks)
        plan: Any = self.pmodel.plan
        return {
            "predicted_s": plan.step_s,
            "undisturbed_s": float(means[0]),
            "step_s": float((both[..., 1].max(axis=1) - both[..., 0].min(axis=1)).min()),
            "processor_s": float(means[1]),
            "steps": len(edges),
            "around_s": around_s,
            "unhidden_s": unhidden_s,
            "kinds": _by_kind(rows),
        }

    def _rows(self, notes: Notes) -> list[Record]:
        geometry = geometry_of(self.pmodel.mesh)
        rows = []
        for node, seconds in zip(notes.nodes, notes.seconds().tolist(), strict=True):
            kind = "view"
            if is_collective(node):
                kind = collective_call(node, geometry).kind
            elif is_wait(node):
                kind = f"wait for {collective_call(node.all_input_nodes[0], geometry).kind}"
            elif computes(node):
                kind = kernel_class(call_of(node))
            priced_s = node_seconds(node, self.prices, geometry)
            rows.append({"kind": kind, "measured_s": seconds, "priced_s": priced_s})
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


class Probe:
    """Ops that calibration timed, timed again beside the steps: has the machine become faster or slower meanwhile?"""

    def __init__(self, prices: Prices) -> None:
        shapes = Shapes(2048, torch.device("cpu"))
        kernels = {name: bound_kernel(name, shapes) for name in PROBED}
        self.calls: list[Callable[[], object]] = [item.call for item in kernels.values() if item]
        device = prices.device
        self.priced_s = [
            float(kernel_price(device, name, item.moved_bytes).value) for name, item in kernels.items() if item
        ]
        for m, n, k in MATMULS[2:6]:
            left, right = torch.rand(m, k), torch.rand(k, n)
            self.calls.append(partial(torch.mm, left, right))
            self.priced_s.append(float(matmul_seconds(device, "float32", 1, m, n, k)))
        self.least_s = np.full(len(self.calls), np.inf)

    def run(self) -> None:
        for index, call in enumerate(self.calls):
            start = time.thread_time()
            call()
            self.least_s[index] = min(self.least_s[index], time.thread_time() - start)

    def drift(self) -> float:
        """Median of measured over priced time; the mean of all ranks."""
        own = float(np.median(self.least_s / np.array(self.priced_s)))
        return float(gathered([own], dist.get_world_size()).mean())


def measure(
    made: Made, searches: Sequence[str], mesh: DeviceMesh, profile: HardwareProfile, *, steps: int
) -> dict[str, Record]:
    """The record of each plan; the plans take turns, step by step."""
    model, inputs = made
    prices = Prices(as_mesh(mesh, profile))
    subjects = {}
    for search in searches:
        pmodel = autopar.compile(model, mesh, example_inputs=inputs, search=search, hardware=profile)
        subjects[search] = Subject(pmodel, inputs, prices)
    probe = Probe(prices)
    for _ in range(steps + 1):
        for subject in subjects.values():
            subject.step()
            probe.run()
    drift = probe.drift()
    return {search: {**subject.record(), "drift": drift} for search, subject in subjects.items()}
