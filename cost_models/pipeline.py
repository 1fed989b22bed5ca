"""Pipeline schedules as closed formulas: seconds of a step from the times of its stages, all of them equal.

Takes in stage times and a schedule's name; gives back seconds and a bubble rate (idle time over the longest rank's
time). `autopar.schedules` has the same schedules as action lists, and simulates them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import sympy

from autopar.cost_models.formula import Formula, symbols
from autopar.errors import UnpricedError

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
