"""The emitted graphs of one rank as timed ops for the simulator: every node priced in its local shapes.

As PyTorch runs them: an op computes on the compute stream, in order; a collective is issued there, and runs on the
stream of its mesh axis once what was issued before it is done; a wait holds the compute stream until it is complete.
Copies to the host and back have a stream each.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from autopar.capture.program import InputKind, OutputKind, results_of
from autopar.cost_models.simulator import TimedOp
from autopar.passes.collectives import is_collective, is_wait
from autopar.passes.copies import OFFLOAD, is_copy, is_copy_wait
from autopar.passes.defer_reductions import last_sums
from autopar.passes.host_parameters import ON_HOST
from autopar.passes.pipeline import LocalProgram
from autopar.planner.node_prices import (
    collective_call,
    compute_seconds,
    computes,
    copied_bytes,
    copied_over_bytes,
    is_view,
)
from autopar.planner.optimizer_state import Optimizer
from autopar.planner.prices import Prices
from autopar.sharding.op_call import spec_of
from autopar.stages.assign import size_of

COMPUTE = "compute"
UPDATE, SENT = "update ", "send gradient of "
"""How the names of ops that run once a step begin, before a parameter's."""
VIEWS_PER_TENSOR = 10
"""What a call does with each parameter, buffer and gradient outside of the graphs (takes the shard of one, wraps the
other as a DTensor), in views: 25 to 40 microseconds beside 3 (ResNet and ViT on two gloo ranks of an x86_64, torch
2.13, 2026-12-01)."""
CHECK_BYTES = 24
"""Of the all-reduce that compares the ranks' calls."""


def emitted_ops(local: LocalProgram, prices: Prices, optimizer: Optimizer) -> tuple[TimedOp, ...]:
    """One step of one rank: the forward's nodes, the backward's, and the optimizer's step, in issue order."""
    walk = _Walk(local, prices)
    walk.add_call()
    for gm in (local.forward, local.backward):
        for node in gm.graph.nodes if gm is not None else ():
            walk.add(node)
    walk.add_optimizer(optimizer)
    return tuple(walk.ops)


class _Walk:
    def __init__(self, local: LocalProgram, prices: Prices) -> None:
        self.local, self.prices = local, prices
        self.ops: list[TimedOp] = []
        self.last_compute: tuple[int, ...] = ()
        self.waited: tuple[int, ...] = ()  # collectives that the compute stream has waited for since its last op
        self.started: dict[fx.Node, int] = {}
        self.once = self._once()
        self.after_s = prices.mesh.profile.overlap_after_s
        self.computed_s = 0.0
        self.pending: dict[str, list[tuple[int, float]]] = {}  # by stream: collectives, and what was computed before

    def _once(self) -> frozenset[fx.Node]:
        """What is left to the end of a step of several microbatches: one bears its share."""
        if self.prices.microbatches == 1 or self.local.backward is None:
            return frozenset()
        tails = last_sums(self.local.backward, self.local.program).values()
        return frozenset(node for tail in tails for node in tail)

    def add_call(self) -> None:
        """What surrounds the graphs of a call, where the processors that compute do it."""
        view_s = self.prices.device.view_s
        if view_s and self.prices.microbatches == 1:
            kinds = (InputKind.PARAMETER, InputKind.BUFFER)
            tensors = sum(item.kind in kinds for item in self.local.program.inputs)
            tensors += sum(item.kind is OutputKind.GRADIENT for item in self.local.program.outputs)
            checks = [self.prices.collective("all_reduce", CHECK_BYTES, axis) for axis in range(len(self.prices.axes))]
            self._compute("call", max(checks) + VIEWS_PER_TENSOR * tensors * view_s, "outside of the graphs")

    def add(self, node: fx.Node) -> None:
        if is_collective(node):
            self._add_collective(node)
        elif is_copy(node):
            self._add_copy(node)
        elif is_wait(node) or is_copy_wait(node):
            started = [self.started[source] for source in node.all_input_nodes if source in self.started]
            for index in started:
                self._settle(index)
            self.waited += tuple(started)
        elif computes(node):
            self._compute(node.name, compute_seconds(node, self.prices), _detail(node))
        elif self.prices.device.view_s and is_view(node):
            self._compute(node.name, self.prices.device.view_s, _detail(node))

    def _compute(self, name: str, seconds: float, detail: str) -> None:
        self.ops.append(TimedOp(name, seconds, "compute", 0, COMPUTE, self.waited, detail=detail))
        self.last_compute, self.waited = (len(self.ops) - 1,), ()
        self.computed_s += seconds

    def _add_collective(self, node: fx.Node) -> None:
        call, detail = collective_call(node, self.local.geometry), _detail(node)
        copied, share = copied_bytes(call), 1 / self.prices.microbatches if node in self.once else 1.0
        if copied:
            self._compute(f"{node.name}_copy", self.prices.copy(copied) * share, detail)
        seconds = self.prices.collective(call.kind, call.bytes_, call.axis) * share
        stream = f"communication, axis {self.prices.mesh.axis_names[call.axis]}"
        link = "link inside nodes" if self.prices.axes[call.axis].nodes == 1 else "link between nodes"
        after, detail = self.last_compute + self.waited, f"{detail}; {call.bytes_} bytes"
        self.started[node] = len(self.ops)
        self.pending.setdefault(stream, []).append((len(self.ops), self.computed_s))
        self.ops.append(TimedOp(node.name, seconds, "communication", 0, stream, after, "", link, call.axis, detail))

    def _settle(self, waited: int) -> None:
        """A collective is waited for: it and what was issued before it on its stream get going now, at the latest.

        Where computation does not pass for long enough, they have not been going before.
        """
        pending = self.pending.get(self.ops[waited].stream, [])
        while pending and pending[0][0] <= waited:
            index, before_s = pending.pop(0)
            if self.computed_s - before_s < self.after_s:
                op = self.ops[index]
                self.ops[index] = replace(op, after=tuple(dict.fromkeys((*op.after, *self.last_compute, *self.waited))))

    def _add_copy(self, node: fx.Node) -> None:
        """Behind what was issued before it, on the stream of its direction."""
        bytes_, direction = copied_over_bytes(node), "to the host" if node.target is OFFLOAD else "from the host"
        after, detail = self.last_compute + self.waited, f"{_detail(node)}; {bytes_} bytes"
        self.started[node] = len(self.ops)
        seconds = self.prices.host_copy(bytes_)
        self.ops.append(TimedOp(node.name, seconds, "communication", 0, f"copies {direction}", after, detail=detail))

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """One op per parameter that is trained, on its shard."""
        trained = {item.name for item in self.local.program.outputs if item.kind is OutputKind.GRADIENT}
        names = {item.node: item.name for item in self.local.program.inputs if item.kind is InputKind.PARAMETER}
        parameters = self.local.program.named_inputs(InputKind.PARAMETER).values()
        full = {node.name: spec_of(node.meta["val"]) for node in parameters}
        staying = self._staying()
        for node in self.local.forward.graph.nodes:
            if node.op == "placeholder" and names.get(node.name) in trained:
                step = self.prices.hosted_optimizer if node.meta.get(ON_HOST) else self.prices.optimizer
                seconds = step(optimizer, full[node.name], node.meta["layout"]) / self.prices.microbatches
                stays = names[node.name] in staying
                if node.meta.get(ON_HOST) and stays:
                    self._send_gradient(names[node.name], size_of(node))
                self._compute(f"{UPDATE}{names[node.name]}", seconds, f"optimizer {optimizer.name}")
                if node.meta.get(ON_HOST) and self.prices.microbatches > 1 and not stays:
                    added_s = self.prices.hosted_sum(size_of(node))
                    self._compute(f"add to the gradient of {names[node.name]}", added_s, "on the host")

    def _staying(self) -> set[str]:
        """The parameters whose gradients the backward does not send to the host by itself."""
        backward, outputs = self.local.backward, self.local.program.gradients
        results = results_of(backward.graph) if backward is not None else ()
        pairs = zip(outputs, results, strict=False)
        return {output.name for output, node in pairs if node is not None and not is_copy_wait(node)}

    def _send_gradient(self, name: str, bytes_: int) -> None:
        """To the host once a step, of which a microbatch bears its share; the update waits for it."""
        seconds = self.prices.host_copy(bytes_) / self.prices.microbatches
        after, stream = self.last_compute + self.waited, "copies to the host"
        self.waited += (len(self.ops),)
        self.ops.append(TimedOp(f"{SENT}{name}", seconds, "communication", 0, stream, after, detail=f"{bytes_} bytes"))


def _detail(node: fx.Node) -> str:
    parts = (str(node.target), node.meta.get("module", ""), node.meta.get("where", ""))
    return "; ".join(part for part in parts if part)
