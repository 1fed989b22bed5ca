"""Pipeline schedules as numbers: closed bubble formulas, action lists, and their price by simulation.

Takes in stage times and a schedule's name or its action lists; gives back seconds and a bubble rate (idle time over
the longest rank's time). A stage is virtual: rank `stage % ranks` owns it, chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias

import sympy

from autopar.cost_models.formula import Formula, symbols
from autopar.cost_models.simulator import Simulation, TimedOp, simulate
from autopar.errors import UnpricedError

ActionKind: TypeAlias = Literal["forward", "backward", "backward_input", "backward_weight"]

NARAYANAN = "Narayanan et al., arXiv:2104.04473, section 2.2"
QI = "Qi et al., arXiv:2401.10241, section 2; terms in send_s inferred from its Tables 5 and 6"
_p, _m, _v = symbols("ranks microbatches chunks")
_f, _bi, _w, _c = symbols("forward_s backward_input_s backward_weight_s send_s")
_UNITS = {"ranks": "", "microbatches": "", "chunks": "", "forward_s": "s", "backward_input_s": "s",
          "backward_weight_s": "s", "send_s": "s"}  # fmt: skip


def _step(name: str, expression: sympy.Expr, source: str) -> Formula:
    used = {str(item) for item in expression.free_symbols}
    return Formula(name, expression, {key: unit for key, unit in _UNITS.items() if key in used}, source)


_work = _f + _bi + _w
STEP: Mapping[str, Formula] = MappingProxyType(
    {
        "gpipe": _step("GPipe step", (_m + _p - 1) * _work + 2 * (_p - 1) * _c, NARAYANAN),
        "1f1b": _step(
            "1F1B step", (_m + _p - 1) * _work + (2 * (_p - 1) * _m / _p + 2 * sympy.Max(_p - 2, 0)) * _c, QI
        ),
        "interleaved": _step("interleaved 1F1B step", _m * _work + (_p - 1) / _v * _work, NARAYANAN),
        "zb-h1": _step("ZB-H1 step", _m * _work + (_p - 1) * sympy.Max(_f + _bi - _w + 4 * _c, 0), QI),
        "zb-h2": _step("ZB-H2 step", _m * _work + (_p - 1) * sympy.Max(_f + _bi - 2 * _w + 2 * _c, 0), QI),
    }
)


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of one microbatch on one rank, all its chunks together, and of one send between neighbours."""

    forward_s: float
    backward_input_s: float
    backward_weight_s: float
    send_s: float = 0.0

    @property
    def work_s(self) -> float:
        """Compute of one microbatch on one rank."""
        return self.forward_s + self.backward_input_s + self.backward_weight_s


@dataclass(frozen=True, slots=True)
class Action:
    """One step of a rank: what to do, for which virtual stage and microbatch."""

    kind: ActionKind
    stage: int
    microbatch: int


Schedule: TypeAlias = tuple[tuple[Action, ...], ...]  # by rank, in order


def closed_step_seconds(schedule: str, ranks: int, microbatches: int, times: StageTimes, *, chunks: int = 1) -> float:
    """Seconds of one step by the closed formula of a schedule in `STEP`, for stages of equal times."""
    formula = STEP.get(schedule)
    if formula is None:
        raise UnpricedError(f"schedule {schedule!r} has no closed formula", fix=f"use one of {sorted(STEP)}")
    numbers = {"ranks": ranks, "microbatches": microbatches, "chunks": chunks, "forward_s": times.forward_s,
               "backward_input_s": times.backward_input_s, "backward_weight_s": times.backward_weight_s,
               "send_s": times.send_s}  # fmt: skip
    return float(formula.value(**{name: numbers[name] for name in formula.units}))


def bubble_rate(step_s: float, microbatches: int, times: StageTimes) -> float:
    """The share of a step in which a rank does no work."""
    return 1 - microbatches * times.work_s / step_s


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards."""
    return tuple(
        tuple(Action("forward", rank, item) for item in range(microbatches))
        + tuple(Action("backward", rank, item) for item in range(microbatches))
        for rank in range(ranks)
    )


def one_forward_one_backward(ranks: int, microbatches: int) -> Schedule:
    """1F1B: rank r runs `ranks - r` forwards ahead."""
    return tuple(_one_rank_1f1b(rank, ranks, microbatches) for rank in range(ranks))


def interleaved(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Megatron's interleaved 1F1B; the microbatches must divide by the ranks."""
    if microbatches % ranks:
        raise ValueError(f"{microbatches} microbatches do not divide by {ranks} ranks")
    return tuple(_one_rank_interleaved(rank, ranks, microbatches, chunks) for rank in range(ranks))


def simulate_schedule(
    schedule: Schedule,
    times: StageTimes | Mapping[int, StageTimes],
    *,
    rank_speeds: Sequence[float] = (),
) -> Simulation:
    """Run an action list: forwards flow to the next stage, input gradients back, each send on a stream of its own.

    `times` is of one rank's microbatch (split evenly over its chunks), or of each virtual stage.
    """
    ranks = len(schedule)
    stages = 1 + max(action.stage for actions in schedule for action in actions)
    by_stage = times if isinstance(times, Mapping) else _even(times, stages, ranks)
    return simulate(_timed_ops(schedule, by_stage, stages), rank_speeds=rank_speeds)


def longest_rank_seconds(simulation: Simulation) -> float:
    """From a rank's first op to its last, of the rank for which that is longest: what a step costs when the optimizer
    step needs no barrier (Qi et al., section 4)."""
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for op, start, end in zip(simulation.ops, simulation.starts_s, simulation.ends_s, strict=True):
        if op.kind == "compute":
            first[op.rank] = min(first.get(op.rank, float("inf")), float(start))
            last[op.rank] = max(last.get(op.rank, 0.0), float(end))
    return max(last[rank] - first[rank] for rank in first)


def _one_rank_1f1b(rank: int, ranks: int, microbatches: int) -> tuple[Action, ...]:
    ahead = min(ranks - rank - 1, microbatches)
    actions = [Action("forward", rank, item) for item in range(ahead)]
    for item in range(microbatches):
        if item + ahead < microbatches:
            actions.append(Action("forward", rank, item + ahead))
        actions.append(Action("backward", rank, item))
    return tuple(actions)


def _one_rank_interleaved(rank: int, ranks: int, microbatches: int, chunks: int) -> tuple[Action, ...]:
    def step(count: int, kind: ActionKind) -> Action:
        group, inside = divmod(count, ranks * chunks)
        chunk = inside // ranks
        chunk = chunk if kind == "forward" else chunks - 1 - chunk
        return Action(kind, chunk * ranks + rank, group * ranks + inside % ranks)

    total = microbatches * chunks
    ahead = min(2 * (ranks - rank - 1) + (chunks - 1) * ranks, total)
    actions = [step(count, "forward") for count in range(ahead)]
    for count in range(total):
        if count + ahead < total:
            actions.append(step(count + ahead, "forward"))
        actions.append(step(count, "backward"))
    return tuple(actions)


def _even(times: StageTimes, stages: int, ranks: int) -> Mapping[int, StageTimes]:
    chunks = stages // ranks
    one = StageTimes(times.forward_s / chunks, times.backward_input_s / chunks, times.backward_weight_s / chunks,
                     times.send_s)  # fmt: skip
    return dict.fromkeys(range(stages), one)


def _timed_ops(schedule: Schedule, times: Mapping[int, StageTimes], stages: int) -> list[TimedOp]:
    """Each action, followed by its send where another rank waits for it."""
    seconds: Mapping[ActionKind, Callable[[StageTimes], float]] = {
        "forward": lambda one: one.forward_s,
        "backward": lambda one: one.backward_input_s + one.backward_weight_s,
        "backward_input": lambda one: one.backward_input_s,
        "backward_weight": lambda one: one.backward_weight_s,
    }
    numbered = _numbers(schedule, stages)
    ops: list[TimedOp] = []
    for rank, action in ((rank, action) for rank, actions in enumerate(schedule) for action in actions):
        name, one = f"{action.kind} {action.stage}.{action.microbatch}", times[action.stage]
        needed = _needs(action, stages, numbered)
        ops.append(TimedOp(name, seconds[action.kind](one), "compute", rank, "compute", needed))
        if way := _way(action, stages):
            ops.append(TimedOp(f"send {name}", one.send_s, "communication", rank, way, (len(ops) - 1,)))
    return ops


def _way(action: Action, stages: int) -> str:
    if action.kind == "forward" and action.stage < stages - 1:
        return "send on"
    if action.kind in ("backward", "backward_input") and action.stage > 0:
        return "send back"
    return ""


def _numbers(schedule: Schedule, stages: int) -> dict[tuple[str, int, int], int]:
    """The op index that carries each action's result to its reader: its send, or the action itself."""
    numbered: dict[tuple[str, int, int], int] = {}
    count = 0
    for actions in schedule:
        for action in actions:
            kind = "backward" if action.kind == "backward_input" else action.kind
            numbered[f"own {kind}", action.stage, action.microbatch] = count
            count += 2 if _way(action, stages) else 1
            numbered[kind, action.stage, action.microbatch] = count - 1
    return numbered


def _needs(action: Action, stages: int, numbered: Mapping[tuple[str, int, int], int]) -> tuple[int, ...]:
    stage, item = action.stage, action.microbatch
    if action.kind == "forward":
        return (numbered["forward", stage - 1, item],) if stage else ()
    if action.kind == "backward_weight":
        return (numbered["own backward", stage, item],)
    own = (numbered["own forward", stage, item],)
    return own if stage == stages - 1 else (*own, numbered["backward", stage + 1, item])
