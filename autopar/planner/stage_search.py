"""Where to cut, how many microbatches, which schedule: proposals for a pipeline, the best first.

The stage ILP cuts the chain of segments for each number of microbatches and each schedule, on the pipeline's ranks as
they stand, with what each stage may recompute; the simulator then runs every proposal under its schedule, on the same
numbers. Whoever plans the stages takes the first that holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from autopar.cost_models.hardware import AxisLinks
from autopar.cost_models.pipeline import StageTimes
from autopar.errors import InfeasibleProblemError, MemoryLimitError, PlanError, ScheduleError
from autopar.planner.cuts import Places, balanced_cuts
from autopar.planner.segments import Segments, intervals
from autopar.planner.stage_plans import send_seconds
from autopar.schedules.actions import Placement, rank_of
from autopar.schedules.generate import GENERATORS, Request
from autopar.schedules.memory import StageMemory, check_memory
from autopar.schedules.timing import simulate_schedule
from autopar.search.stage_ilp import solve_cut
from autopar.search.stage_problem import Cut, InFlight, StageOption, StageProblem, evaluate_cut

MOST_SOLVED = 4  # ways to run a pipeline whose cuts the ILP finds: the others are cut into stages of equal time
EFFORT, GAP = 0.25, 0.002  # of the ILP for one schedule and number of microbatches
IN_FLIGHT: Mapping[str, InFlight] = MappingProxyType(
    {"gpipe": "all", "1f1b": "remaining", "zb-h1": "stages", "zb-h2": "twice the stages", "interleaved": "stages",
     "zb-v": "stages", "auto": "remaining", "pipedream": "remaining", "pipedream-vertical": "remaining",
     "pipedream-2bw": "remaining"}
)  # fmt: skip


@dataclass(frozen=True)
class Proposal:
    """A way to run a pipeline, with its step by the tables."""

    microbatches: int
    schedule: str
    cuts: tuple[int, ...]
    step_s: float


@dataclass(frozen=True)
class Line:
    """The pipeline's ranks: their speeds, what each may hold of parameters and activations, the link between two."""

    speeds: Sequence[float]
    memory_bytes: Sequence[float]
    link: AxisLinks

    @property
    def alike(self) -> bool:
        """Whether it makes no difference which rank has which stage."""
        return len(set(self.speeds)) == 1 and len(set(self.memory_bytes)) == 1


def proposals(
    counts: Sequence[int],
    segments: Callable[[int], Segments],
    line: Line,
    shapes: Sequence[tuple[int, str]],
) -> list[Proposal]:
    """The fastest first. `segments`: of a microbatch, by how many there are; `shapes`: (stages, schedule) to try.
    Of many ways the ILP cuts a few; the others are cut into stages of equal time.

    Raises PlanError where there are fewer segments than stages, MemoryLimitError where nothing fits.
    """
    found: list[Proposal] = []
    refused: AutoparRefusals = []
    tables = {count: segments(count) for count in counts}
    ways = [(count, stages, schedule) for count in counts for stages, schedule in shapes]
    known: dict[tuple[int, int, str], Proposal] = {}
    if len(ways) > MOST_SOLVED:
        known = {way: rough for way in ways if (rough := _rough(tables[way[0]], line, *way)) is not None}
        ways.sort(key=lambda way: known[way].step_s if way in known else 0.0)
    for way in ways:
        if way in known and len(found) >= MOST_SOLVED:
            found.append(known[way])
            continue
        try:
            found.append(_proposed(tables[way[0]], line, *way))
        except (PlanError, ScheduleError, InfeasibleProblemError, MemoryLimitError) as error:
            refused.append(error)
    if not found:
        raise _reason(refused)
    return sorted(found, key=lambda it: it.step_s)


def _rough(table: Segments, line: Line, count: int, stages: int, schedule: str) -> Proposal | None:
    """Stages of equal time, of which each recomputes that would not fit otherwise; None where that is no cut."""
    try:
        problem = stage_problem(table, line, count, stages, schedule)
        cut = _balanced(table, line, problem, schedule)
        full = evaluate_cut(problem, cut)
        options = [
            option + int(peak > problem.options[option].memory_bytes)  # "recompute" follows "keep"
            for option, peak in zip(cut.options, full.peak_bytes, strict=True)
        ]
        cut = replace(cut, options=tuple(options))
        step_s = simulated_seconds(table, line, problem, cut, schedule)
    except (PlanError, ScheduleError, MemoryLimitError):
        return None
    return Proposal(count, schedule, tuple(table.cuts[end - 1] for end in cut.ends[:-1]), step_s)


AutoparRefusals = list[PlanError | ScheduleError | InfeasibleProblemError | MemoryLimitError]


def _reason(refused: AutoparRefusals) -> PlanError | ScheduleError | MemoryLimitError:
    """What is said of all refusals: the one of one of them that more memory does not cure, if there is."""
    for error in refused:
        if isinstance(error, PlanError | ScheduleError) and not isinstance(error, InfeasibleProblemError):
            return error
    return MemoryLimitError(
        "no cut into stages fits the memory, even where everything is recomputed",
        fix="use more stages, smaller microbatches, or 1f1b, which holds the fewest",
    )


def _proposed(table: Segments, line: Line, count: int, stages: int, schedule: str) -> Proposal:
    if len(table.forward_s) < stages:
        raise PlanError(
            f"the program has {len(table.cuts)} places to cut it, not {stages - 1}",
            fix=f"use stages={len(table.forward_s)} or fewer",
        )
    problem = stage_problem(table, line, count, stages, schedule)
    cut = solve_cut(problem, known=_balanced(table, line, problem, schedule), effort=EFFORT, gap=GAP).cut
    step_s = simulated_seconds(table, line, problem, cut, schedule)
    return Proposal(count, schedule, tuple(table.cuts[end - 1] for end in cut.ends[:-1]), step_s)


def _balanced(table: Segments, line: Line, problem: StageProblem, schedule: str) -> Cut:
    """The cut into stages of equal time, nothing recomputed."""
    stages, placement = problem.stages, _placement(schedule)
    speeds = [line.speeds[rank_of(stage, len(line.speeds), placement)] for stage in range(stages)]
    seconds, readers = table.forward_s + table.backward_s, np.ones(len(table.forward_s), dtype=np.int64)
    cuts = balanced_cuts(Places(table.cuts, seconds, table.crossing_bytes[:-1], readers), stages, speeds)
    ends = (*(table.cuts.index(cut) + 1 for cut in cuts), problem.layers)
    return Cut(ends, tuple(0 if line.alike else 2 * stage for stage in range(stages)))


def stage_problem(table: Segments, line: Line, count: int, stages: int, schedule: str) -> StageProblem:
    """The cut as numbers: a stage keeps what its backward needs, or computes it again from what arrived."""
    ranks, placement = len(line.speeds), _placement(schedule)
    recomputed = np.concatenate([[0.0], table.crossing_bytes[:-1]])  # what arrives is kept
    ways = {"keep": (0.0, table.saved_bytes), "recompute": (1.0, np.minimum(recomputed, table.saved_bytes))}
    latency_s, send_s = send_seconds(line.link, 1), send_seconds(line.link, 1 << 30)
    bytes_per_s = (1 << 30) / max(send_s - latency_s, 1e-30)
    kinds = range(1) if line.alike else range(stages)
    options = []
    for kind in kinds:
        rank = rank_of(kind, ranks, placement)
        for name, (again, saved) in ways.items():
            work_s = ((1 + again) * table.forward_s + table.backward_s) / line.speeds[rank]
            memory = line.memory_bytes[rank] * ranks / stages
            options.append(StageOption(name, f"stage {kind}", 1, memory, work_s, table.fixed_bytes, saved,
                                       table.sync_s, bytes_per_s, latency_s))  # fmt: skip
    devices = (("stage 0", stages),) if line.alike else tuple((f"stage {kind}", 1) for kind in kinds)
    return StageProblem(
        table.crossing_bytes,
        tuple(options),
        devices,
        count,
        IN_FLIGHT[schedule],
        schedule.startswith("pipedream"),
        stages,
        not line.alike,
    )


def simulated_seconds(table: Segments, line: Line, problem: StageProblem, cut: Cut, schedule: str) -> float:
    """The step of a cut under its schedule, by the simulator. Raises where the schedule's rules or memory refuse it."""
    stages, ranks = len(cut.ends), len(line.speeds)
    again = np.array([problem.options[chosen].name == "recompute" for chosen in cut.options], dtype=np.float64)
    forward_s, backward_s = intervals(table.forward_s, cut.ends), intervals(table.backward_s, cut.ends)
    times, memory = {}, {}
    for stage, (first, end, chosen) in enumerate(cut.spans()):
        option = problem.options[chosen]
        weight_s = backward_s[stage] / 2
        send_s = send_seconds(line.link, int(table.crossing_bytes[end - 1]))
        input_s = weight_s + again[stage] * forward_s[stage]
        times[stage] = StageTimes(float(forward_s[stage]), float(input_s), float(weight_s), send_s)
        fixed, saved = option.fixed_bytes[first:end].sum(), option.activation_bytes[first:end].sum()
        memory[stage] = StageMemory(float(fixed), float(saved))
    request = Request(stages, problem.microbatches, stages // ranks, times=times)
    usual = "1f1b" if stages == ranks else "interleaved"
    made = GENERATORS[usual if schedule == "auto" else schedule].make(request)
    check_memory(made, memory, line.memory_bytes)
    step_s = simulate_schedule(made, times, rank_speeds=line.speeds).step_s
    return float(step_s) + float(intervals(table.sync_s, cut.ends).max())


def _placement(schedule: str) -> Placement:
    return "v" if schedule == "zb-v" else "loop"


def shapes(ranks: int, stages: int | None, schedule: str | None) -> Iterator[tuple[int, str]]:
    """The numbers of stages and the schedules to try for what was asked: one stage on each rank if nothing was."""
    if schedule is not None:
        twice = schedule in ("interleaved", "zb-v")
        yield stages or ranks * (2 if twice else 1), schedule
        return
    if stages in (None, ranks):
        yield from ((ranks, name) for name in ("1f1b", "zb-h1", "zb-h2"))
        return
    assert stages is not None
    yield from ((stages, name) for name in ("interleaved", "zb-v") if stages == 2 * ranks or name == "interleaved")
