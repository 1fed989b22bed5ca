"""Times a run, and counts what it holds: whole steps, and every second one op by op; of a pipeline, action by action.

Ranks of one machine have one clock; others are laid together where they have just agreed on a call. Each step counts
from there.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import NotPlannedError
from autopar.passes.collectives import is_collective, is_wait
from autopar.recording import COLLECTIVE, COMPUTE, STAGE_KINDS, WAIT, Recording, Span
from autopar.runtime.held_memory import HeldMemory, held_memory

Standing = tuple[Sequence[Tensor], Sequence[Tensor]]
"""Tensors on a rank's device, and tensors on its host."""
FORWARD = ("forward", "send_activation", "recv_activation")


class Recorder:
    """What `ParallelModule.record` gives; `recording` is there once its `with` block has ended."""

    def __init__(self, mesh: DeviceMesh, rank: int, standing: Callable[[], Standing]) -> None:
        """`standing`: what the rank holds between two steps, on its device and on the host."""
        self.mesh, self.rank, self.standing = mesh, rank, standing
        self.spans: list[Span] = []
        self.step_s: list[float | None] = []
        self.made: Recording | None = None
        self.begins: list[float] = []  # of each step, by this rank's clock
        self._whole = True  # of the step that runs: not looked into
        self._memory: HeldMemory | None = None  # of a step that is looked into

    @property
    def recording(self) -> Recording:
        """What was recorded on all ranks."""
        if self.made is None:
            raise NotPlannedError("the recording is not complete", fix="ask for it after the `with` block")
        return self.made

    def begin_step(self) -> None:
        """A call begins: the step before it is over."""
        self.end_step()
        self.step_s.append(0.0)
        self._whole = len(self.step_s) % 2 == 1
        self._memory = None if self._whole else held_memory(self.mesh.device_type, *self.standing())
        self.begins.append(self.now())

    def end_step(self) -> None:
        """The last step is over: note how long it took, if it was not slowed by being looked at."""
        if self.step_s:
            self.step_s[-1] = self.now() - self.begins[-1] if self._whole else None

    def run(self, graph: Any, values: list[Tensor], phase: str) -> Sequence[Tensor]:
        """The outputs of a boxed graph; op by op in every second step."""
        if self._memory is None or not isinstance(graph, fx.GraphModule):
            outputs: Sequence[Tensor] = graph(values)
            return outputs
        return _OpByOp(graph, self, self._memory, phase).on(values)

    @contextmanager
    def action(self, kind: str, stage: int, microbatch: int) -> Iterator[None]:
        """One action of a pipeline; in every second step, what a computing one holds is counted too."""
        memory, start = self._memory if kind in STAGE_KINDS else None, self.now()
        if memory is None:
            yield
        else:
            with memory.of_program():
                yield
        more = {"phase": "forward" if kind in FORWARD else "backward", "stage": stage, "microbatch": microbatch}
        self._note(kind, kind, start, self.now(), **more, held_bytes=-1 if memory is None else memory.most_bytes())

    def note_node(self, node: fx.Node, kind: str, start: float, end: float, **more: Any) -> None:
        """One op of a graph."""
        self._note(node.name, kind, start, end, module=node.meta.get("module", ""), **more)

    def _note(self, name: str, kind: str, start: float, end: float, **more: Any) -> None:
        step, began = len(self.step_s) - 1, self.begins[-1]
        self.spans.append(Span(name, kind, start - began, end - began, self.rank, step, **more))

    @property
    def notes(self) -> Notes:
        """What is told to the other ranks."""
        return Notes(_clock(), tuple(self.begins), tuple(self.spans))

    def now(self) -> float:
        """Seconds, when all that was asked of the device is done."""
        if self.mesh.device_type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()


@dataclass(frozen=True, slots=True)
class Notes:
    """What one rank timed. `clock`: equal on ranks that read one clock; `begins`: by it, of each step."""

    clock: str
    begins: tuple[float, ...]
    spans: tuple[Span, ...]


def merged(every: Sequence[Notes]) -> tuple[Span, ...]:
    """The spans of all ranks; a step of ranks that read one clock counts from when the first of them began it."""
    first: dict[tuple[str, int], float] = {}
    for notes in every:
        for step, began in enumerate(notes.begins):
            first[notes.clock, step] = min(began, first.get((notes.clock, step), began))
    return tuple(
        _later(span, notes.begins[span.step] - first[notes.clock, span.step]) for notes in every for span in notes.spans
    )


def _later(span: Span, seconds: float) -> Span:
    return replace(span, start_s=span.start_s + seconds, end_s=span.end_s + seconds)


def _clock() -> str:
    """Of the running system, whose processes read one clock."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.is_file() else platform.node()


class _OpByOp(fx.Interpreter):
    """Runs a graph node by node and notes each."""

    def __init__(self, graph: fx.GraphModule, recorder: Recorder, memory: HeldMemory, phase: str) -> None:
        super().__init__(graph, garbage_collect_values=True)
        self.recorder, self.memory, self.phase = recorder, memory, phase
        self.issued: dict[fx.Node, tuple[float, int]] = {}  # when, and the bytes held then

    def on(self, values: list[Tensor]) -> Sequence[Tensor]:
        """The outputs; `values` is emptied, so that each tensor dies at its last use."""
        placeholders = [node for node in self.graph.nodes if node.op == "placeholder"]
        self.memory.hold(values)
        given = dict(zip(placeholders, values, strict=True))
        values.clear()
        outputs: Sequence[Tensor] = self.run(initial_env=given, enable_io_processing=False)
        return outputs

    def run_node(self, node: fx.Node) -> Any:
        if node.op == "output":
            return super().run_node(node)
        self.memory.begin()
        recorder, start = self.recorder, self.recorder.now()
        value = super().run_node(node)
        end = recorder.now()
        held_bytes = self.memory.after(node, value)
        if is_collective(node):
            self.issued[node] = start, held_bytes
            return value
        if is_wait(node):
            for source in node.all_input_nodes:
                if source in self.issued:
                    issued, bytes_ = self.issued[source]
                    recorder.note_node(source, COLLECTIVE, issued, end, phase=self.phase, held_bytes=bytes_)
        kind = WAIT if is_wait(node) else COMPUTE
        recorder.note_node(node, kind, start, end, phase=self.phase, held_bytes=held_bytes)
        return value
