"""The stage search: mesh factorization, number of microbatches, cuts and schedule of a chain of layers, in numbers.

Takes in layers and a cluster; gives back the fastest `StageChoice`. For each mesh (data x tensor parallel devices of
a stage) and number of microbatches the stage ILP cuts the chain; the best few, and the even cuts beside them, are then
run by the simulator under every schedule that their memory admits: the ILP proposes, the simulator disposes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.cost_models.pipeline import StageTimes
from autopar.errors import InfeasibleProblemError, MemoryLimitError, ScheduleError
from autopar.schedules.actions import Schedule
from autopar.schedules.generate import GENERATORS, Request
from autopar.schedules.memory import StageMemory, check_memory
from autopar.schedules.timing import longest_rank_seconds, simulate_schedule
from autopar.search.stage_bounds import step_bound
from autopar.search.stage_ilp import CutSolution, solve_cut
from autopar.search.stage_problem import Cut, StageOption, StageProblem, best_even_cut, crossing

SCHEDULES = ("1f1b", "zb-h1", "zb-h2")
EFFORT, GAP = 0.25, 0.005  # of the ILP for one mesh
SIMULATED = 3  # meshes whose cuts the simulator runs
SHARE = 1 / 3  # of forward, backward for inputs and backward for weights each, in the work of matrix products


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer for the whole batch of a step, on one device of speed 1."""

    name: str
    work_s: float  # forward and backward
    parameter_bytes: float  # as gradients are summed
    state_bytes: float  # weights, gradients, optimizer state
    activation_bytes: float  # saved between forward and backward
    output_bytes: float  # what the next layer reads
    tensor_parallel_bytes: float = 0.0  # all-reduced over the ranks that share the layer's tensors


@dataclass(frozen=True, slots=True)
class Level:
    """A level of the network: groups of so many devices, neighbours in rank, and the link that joins a group."""

    devices: int
    bytes_per_s: float
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """Devices that are alike. Speed 2 halves the seconds of the layers."""

    name: str
    count: int
    memory_bytes: float
    speed: float = 1.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """Devices and the levels of their network, the innermost first."""

    kinds: tuple[DeviceKind, ...]
    levels: tuple[Level, ...]

    def level_of(self, devices: int) -> Level:
        """The innermost level whose groups hold so many neighbours."""
        return next((level for level in self.levels if level.devices >= devices), self.levels[-1])


@dataclass(frozen=True, slots=True)
class StageChoice:
    """The answer, with its price by the simulator and by the ILP's formula, and how much was looked at."""

    tensor_parallel: int
    data_parallel: int
    microbatches: int
    schedule: str
    cut: Cut
    step_s: float
    formula_s: float
    considered: int


@dataclass(frozen=True, slots=True)
class _Mesh:
    tensor: int
    data: int
    microbatches: int


def search_stages(
    layers: Sequence[Layer],
    cluster: Cluster,
    *,
    batch: int,
    skips: Sequence[tuple[int, int]] = (),
    schedules: Sequence[str] = SCHEDULES,
) -> StageChoice:
    """The fastest way found to run a step of `batch` samples, one stage being `data x tensor` devices of one kind."""
    best: list[tuple[float, int, _Mesh, StageProblem, CutSolution]] = []
    meshes = sorted(_bounded(layers, cluster, batch, skips), key=lambda item: item[0])
    considered = 0
    for bound_s, mesh, problem in meshes:
        if len(best) == SIMULATED and bound_s >= -best[0][0]:
            break  # no later one can be among the best
        considered += 1
        try:
            found = solve_cut(problem, effort=EFFORT, gap=GAP)
        except InfeasibleProblemError:
            continue
        heapq.heappush(best, (-found.cost.step_s, -considered, mesh, problem, found))
        if len(best) > SIMULATED:
            heapq.heappop(best)
    choices = [choice for _, _, mesh, problem, found in best
               for choice in _simulated(mesh, problem, found, schedules, considered)]  # fmt: skip
    if not choices:
        raise InfeasibleProblemError(
            f"no mesh of {sum(kind.count for kind in cluster.kinds)} devices holds these {len(layers)} layers",
            fix="use more devices, a smaller batch, or recomputation",
        )
    return min(choices, key=lambda choice: (choice.step_s, choice.formula_s))


def make_problem(
    layers: Sequence[Layer], cluster: Cluster, mesh: tuple[int, int, int], skips: Sequence[tuple[int, int]] = ()
) -> StageProblem:
    """The stage problem of one (tensor, data, microbatches): an option for each kind of device."""
    tensor, data, count = mesh
    inside, over = cluster.level_of(tensor), cluster.level_of(tensor * data)
    beside = cluster.level_of(2 * tensor * data)
    share = tensor * data * count

    def table(name: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return np.array([float(getattr(layer, name)) for layer in layers])

    reduced_s = 2 * (tensor - 1) / tensor * table("tensor_parallel_bytes") / (data * count) / inside.bytes_per_s
    summed_s = 2 * (data - 1) / data * table("parameter_bytes") / tensor / over.bytes_per_s
    options = tuple(
        StageOption(f"{kind.name} {data}x{tensor}", kind.name, tensor * data, kind.memory_bytes,
                    table("work_s") / share / kind.speed + reduced_s, table("state_bytes") / tensor,
                    table("activation_bytes") / share, summed_s, beside.bytes_per_s, beside.latency_s)
        for kind in cluster.kinds
    )  # fmt: skip
    passing = crossing([layer.output_bytes / (data * count) for layer in layers], skips)
    return StageProblem(passing, options, tuple((kind.name, kind.count) for kind in cluster.kinds), count)


def _bounded(
    layers: Sequence[Layer], cluster: Cluster, batch: int, skips: Sequence[tuple[int, int]]
) -> Iterator[tuple[float, _Mesh, StageProblem]]:
    """Every mesh with a quick bound on its step: no stage is shorter than its share of the work, or than a layer."""
    for mesh in _meshes(cluster, batch):
        problem = make_problem(layers, cluster, (mesh.tensor, mesh.data, mesh.microbatches), skips)
        fastest_s = np.min([option.work_s for option in problem.options], axis=0)
        most = sum(kind.count // (mesh.tensor * mesh.data) for kind in cluster.kinds)
        if most:
            longest_s = max(float(fastest_s.max()), float(fastest_s.sum()) / min(most, problem.layers))
            yield step_bound(problem, longest_s), mesh, problem


def _meshes(cluster: Cluster, batch: int) -> Iterator[_Mesh]:
    """Powers of two: tensor parallel within the innermost level, then data parallel, then pipeline with the rest."""
    most = max(kind.count for kind in cluster.kinds)
    for tensor in _powers(min(most, cluster.levels[0].devices)):
        for data in _powers(most // tensor):
            for count in _powers(batch // data):
                if batch % (data * count) == 0:
                    yield _Mesh(tensor, data, count)


def _powers(most: int) -> Iterator[int]:
    power = 1
    while power <= most:
        yield power
        power *= 2


def _simulated(
    mesh: _Mesh, problem: StageProblem, found: CutSolution, schedules: Sequence[str], considered: int
) -> Iterator[StageChoice]:
    """The found cut and the best even one, under each schedule that their memory admits."""
    even = best_even_cut(problem)
    cuts = [(found.cut, found.cost), *([even] if even and even[0] != found.cut else [])]
    for cut, cost in cuts:
        for name in schedules:
            step_s = simulated_step_seconds(problem, cut, name)
            if step_s is not None:
                yield StageChoice(mesh.tensor, mesh.data, mesh.microbatches, name, cut, step_s, cost.step_s, considered)


def simulated_step_seconds(problem: StageProblem, cut: Cut, name: str) -> float | None:
    """Seconds of a step of this cut under a schedule; None where the schedule's memory or rules do not admit it."""
    times, memory, limits = {}, {}, []
    sync_s = 0.0
    for stage, (first, end, chosen) in enumerate(cut.spans()):
        option = problem.options[chosen]
        work_s = float(option.work_s[first:end].sum())
        send_s = option.send_latency_s + float(problem.crossing_bytes[end - 1]) / option.send_bytes_per_s
        times[stage] = StageTimes(SHARE * work_s, SHARE * work_s, SHARE * work_s, send_s)
        memory[stage] = StageMemory(
            float(option.fixed_bytes[first:end].sum()), float(option.activation_bytes[first:end].sum())
        )
        limits.append(option.memory_bytes)
        sync_s = max(sync_s, float(option.sync_s[first:end].sum()))
    request = Request(len(cut.ends), problem.microbatches, times=times)
    try:
        schedule: Schedule = GENERATORS[name].make(request)  # transfers would change neither times nor memory here
        check_memory(schedule, memory, limits)
    except (ScheduleError, MemoryLimitError):
        return None
    return longest_rank_seconds(simulate_schedule(schedule, times)) + sync_s
