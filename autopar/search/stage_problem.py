"""Cutting a chain of layers into pipeline stages, as numbers: what each choice costs, and what it may not exceed.

Takes in layers, ways to run a stage (`StageOption`: some devices of one kind, in some layout) with tables of what every
layer costs under each, and how many devices there are. A `Cut` is an answer; `evaluate` prices it, sharing no code with
the solver.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from autopar.errors import InfeasibleProblemError, ProblemFormatError

Numbers: TypeAlias = npt.NDArray[np.float64]
InFlight: TypeAlias = Literal["all", "remaining", "stages", "twice the stages"]


@dataclass(frozen=True, slots=True)
class StageOption:
    """One way to run a stage, by layer: seconds of a microbatch, bytes on one of its devices."""

    name: str
    kind: str  # of device
    devices: int
    memory_bytes: float  # of one device
    work_s: Numbers  # forward and backward of one microbatch
    fixed_bytes: Numbers  # weights, gradients, optimizer state
    activation_bytes: Numbers  # saved for one microbatch
    sync_s: Numbers  # once a step: the sum of gradients over replicas
    send_bytes_per_s: float = float("inf")  # to the next stage
    send_latency_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StageProblem:
    """Layers in order, the options of a stage, the devices of each kind, and what the schedule makes of them.

    A step takes `(microbatches - 1) T + sum of stages and sends + longest sync`, T the longest stage or transfer: the
    first microbatch fills the pipeline, then one leaves every T. An asynchronous one never drains: T, syncs included.
    """

    crossing_bytes: Numbers  # by layer: all that later layers read of it and of those before, one way
    options: tuple[StageOption, ...]
    device_counts: tuple[tuple[str, int], ...]
    microbatches: int
    in_flight: InFlight = "remaining"  # microbatches whose activations a stage holds at once
    asynchronous: bool = False
    stages: int = 0  # 0: any number
    in_order: bool = False  # the n-th stage runs on the n-th kind of device: where each stage lies is given

    def __post_init__(self) -> None:
        layers = len(self.crossing_bytes)
        tables = [table for it in self.options for table in (it.work_s, it.fixed_bytes, it.activation_bytes, it.sync_s)]
        if not layers or not self.options or any(len(table) != layers for table in tables):
            raise ProblemFormatError(
                "a stage problem needs layers, options, and a number in every table for each layer",
                fix="give each option as many numbers as there are layers",
            )

    @property
    def layers(self) -> int:
        """How many layers there are to cut."""
        return len(self.crossing_bytes)

    def held(self, stages_from_here: int, stages: int) -> int:
        """Microbatches in flight in a stage, by how many stages follow it, itself included."""
        wanted = {"all": self.microbatches, "remaining": stages_from_here, "stages": stages,
                  "twice the stages": 2 * stages - 1}[self.in_flight]  # fmt: skip
        return wanted if self.asynchronous else min(self.microbatches, wanted)


@dataclass(frozen=True, slots=True)
class Cut:
    """Stages in order: the layer after each one's last, and the option it runs in."""

    ends: tuple[int, ...]
    options: tuple[int, ...]

    def spans(self) -> list[tuple[int, int, int]]:
        """(first layer, the one after the last, option) of each stage."""
        return list(zip((0, *self.ends[:-1]), self.ends, self.options, strict=True))


@dataclass(frozen=True, slots=True)
class CutCost:
    """What a cut takes, and what it may not be."""

    step_s: float
    longest_s: float  # T
    stage_s: tuple[float, ...]  # one microbatch
    send_s: tuple[float, ...]  # one way, after each stage but the last
    peak_bytes: tuple[float, ...]  # of a device of each stage
    violations: tuple[str, ...]


def evaluate_cut(problem: StageProblem, cut: Cut) -> CutCost:
    """Price a cut from the tables alone."""
    spans, count = cut.spans(), len(cut.ends)
    broken = [] if cut.ends and cut.ends[-1] == problem.layers else ["the stages do not cover the layers"]
    broken += [f"stage {nth} is empty" for nth, (first, end, _) in enumerate(spans) if end <= first]
    if problem.stages and problem.stages != count:
        broken.append(f"{count} stages, not {problem.stages}")
    stage_s, send_s, peak, sync = [], [], [], []
    for nth, (first, end, chosen) in enumerate(spans):
        option = problem.options[chosen]
        stage_s.append(float(option.work_s[first:end].sum()))
        sync.append(float(option.sync_s[first:end].sum()))
        if nth < count - 1:
            send_s.append(option.send_latency_s + float(problem.crossing_bytes[end - 1]) / option.send_bytes_per_s)
        held = problem.held(count - nth, count) * float(option.activation_bytes[first:end].sum())
        peak.append(float(option.fixed_bytes[first:end].sum()) + held)
        if peak[-1] > option.memory_bytes * (1 + 1e-9):
            broken.append(f"stage {nth} holds {peak[-1]:.4g} bytes of {option.memory_bytes:.4g}")
    for kind, available in problem.device_counts:
        used = sum(problem.options[chosen].devices for chosen in cut.options if problem.options[chosen].kind == kind)
        if used > available:
            broken.append(f"{used} devices of {available} of kind {kind}")
    if problem.in_order:
        wanted = [kind for kind, _ in problem.device_counts]
        order = [problem.options[chosen].kind for chosen in cut.options]
        broken += [] if order == wanted else [f"devices in the order {', '.join(order)}"]
    if problem.asynchronous:
        longest = max([work + wait for work, wait in zip(stage_s, sync, strict=True)] + [2 * it for it in send_s])
        step = longest
    else:
        longest = max([*stage_s, *(2 * it for it in send_s)])
        step = (problem.microbatches - 1) * longest + sum(stage_s) + 2 * sum(send_s) + max(sync)
    return CutCost(step, longest, tuple(stage_s), tuple(send_s), tuple(peak), tuple(broken))


def even_cuts(problem: StageProblem) -> list[Cut]:
    """What one would do by hand: as many layers in every stage, all stages alike; each number of stages and option."""
    if problem.in_order:
        return _even_in_order(problem)
    available = dict(problem.device_counts)
    cuts = []
    for number, option in enumerate(problem.options):
        most = min(problem.layers, available.get(option.kind, 0) // option.devices)
        for count in (problem.stages,) if problem.stages else range(1, most + 1):
            if count <= most:
                ends = tuple(round((nth + 1) * problem.layers / count) for nth in range(count))
                cuts.append(Cut(ends, (number,) * count))
    return cuts


def _even_in_order(problem: StageProblem) -> list[Cut]:
    """As many layers on each kind of device; each kind's n-th option, for every n."""
    kinds = [kind for kind, _ in problem.device_counts]
    own = [[number for number, option in enumerate(problem.options) if option.kind == kind] for kind in kinds]
    if problem.layers < len(kinds) or not all(own):
        return []
    ends = tuple(round((nth + 1) * problem.layers / len(kinds)) for nth in range(len(kinds)))
    most = max(map(len, own))
    return [Cut(ends, tuple(numbers[min(nth, len(numbers) - 1)] for numbers in own)) for nth in range(most)]


def best_even_cut(problem: StageProblem) -> tuple[Cut, CutCost] | None:
    """The best even cut that breaks nothing."""
    priced = [(cut, evaluate_cut(problem, cut)) for cut in even_cuts(problem)]
    sound = [item for item in priced if not item[1].violations]
    return min(sound, key=lambda item: item[1].step_s) if sound else None


def infeasible(problem: StageProblem) -> InfeasibleProblemError:
    """What to raise where nothing fits."""
    counts = ", ".join(f"{count} {kind}" for kind, count in problem.device_counts)
    return InfeasibleProblemError(
        f"no cut of {problem.layers} layers into stages fits the memory of {counts}",
        fix="use more devices, smaller microbatches, recomputation, or a schedule with fewer microbatches in flight",
    )


def crossing(output_bytes: Sequence[float], readers: Sequence[tuple[int, int]] = ()) -> Numbers:
    """By layer: the bytes that pass a cut after it, if every stage forwards what later ones read.

    Each layer is read by the next one; `readers` adds skip connections, whose tensors pass every cut up to their last
    reader.
    """
    last = {layer: layer + 1 for layer in range(len(output_bytes))}
    for layer, reader in readers:
        last[layer] = max(last[layer], reader)
    passing = np.zeros(len(output_bytes))
    for layer, reader in last.items():
        passing[layer : min(reader, len(output_bytes))] += output_bytes[layer]
    return passing
