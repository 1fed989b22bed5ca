"""A price as a sympy expression: named symbols, SI units, a source; evaluated in bulk through numpy.

Takes in numbers by symbol name and gives back seconds or bytes (`Formula.value`), or the formula with its numbers
as text (`Formula.explain`). The expression is compiled once, when the formula is built; no sympy runs at call time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import sympy
from sympy.printing.numpy import NumPyPrinter
from sympy.printing.pycode import PythonCodePrinter

Number: TypeAlias = float | npt.NDArray[np.float64]
Numeric: TypeAlias = float | int | np.number[Any] | npt.NDArray[Any]  # what a caller may pass

_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n"))


class _BroadcastingPrinter(NumPyPrinter):  # type: ignore[misc]  # sympy has no types
    """Prints Max and Min as nested numpy.maximum and numpy.minimum, so that scalars and arrays mix."""

    def _print_Max(self, expr: sympy.Max) -> str:
        return self._nest("maximum", expr.args)

    def _print_Min(self, expr: sympy.Min) -> str:
        return self._nest("minimum", expr.args)

    def _nest(self, name: str, arguments: Iterable[sympy.Expr]) -> str:
        function = self._module_format(f"numpy.{name}")
        nested: str = reduce(lambda left, right: f"{function}({left}, {right})", map(self._print, arguments))
        return nested


@dataclass(frozen=True, slots=True)
class Formula:
    """One closed formula. `units` names every symbol, in the order of the compiled function's arguments.

    Invariant: the symbols of `expression` are exactly the keys of `units`.
    """

    name: str
    expression: sympy.Expr
    units: Mapping[str, str]
    source: str
    result_unit: str = "s"
    leaves_out: str = ""
    _names: tuple[str, ...] = field(init=False, repr=False, compare=False)
    _on_arrays: Callable[..., Any] = field(init=False, repr=False, compare=False)
    _on_floats: Callable[..., Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        used = {str(symbol) for symbol in self.expression.free_symbols}
        if used != set(self.units):
            raise ValueError(f"{self.name}: symbols {sorted(used)} differ from units {sorted(self.units)}")
        arguments = [symbol(name) for name in self.units]
        arrays = _BroadcastingPrinter({"fully_qualified_modules": False, "inline": True})
        floats = PythonCodePrinter({"fully_qualified_modules": False, "inline": True})
        set_ = object.__setattr__
        set_(self, "units", MappingProxyType(dict(self.units)))
        set_(self, "_names", tuple(self.units))
        set_(self, "_on_arrays", sympy.lambdify(arguments, self.expression, "numpy", printer=arrays))
        set_(self, "_on_floats", sympy.lambdify(arguments, self.expression, "math", printer=floats))

    def value(self, **numbers: Numeric) -> Number:
        """The formula at these numbers, in `result_unit`: a float, or an array if any number is an array."""
        values = [numbers[name] for name in self._names]
        if np.ndarray in map(type, values):
            result = self._on_arrays(*(np.asarray(value, dtype=np.float64) for value in values))
            return np.asarray(result, dtype=np.float64)
        return float(self._on_floats(*values))

    seconds = value

    def explain(self, **numbers: Numeric) -> str:
        """The formula, every number in it with its unit, the result, and where the formula comes from."""
        result = self.value(**numbers)
        lines = [f"{self.name} = {self.expression}"]
        lines += [f"  {name} = {quantity(numbers[name], unit)}" for name, unit in self.units.items()]
        lines.append(f"  = {quantity(result, self.result_unit)}")
        lines.append(f"  source: {self.source}")
        if self.leaves_out:
            lines.append(f"  leaves out: {self.leaves_out}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Priced:
    """A formula with its numbers, each a float or an array: the price is `times` its value. `label` says of what."""

    formula: Formula
    numbers: Mapping[str, Numeric]
    times: Numeric = 1.0
    label: str = ""

    @property
    def value(self) -> Number:
        """In the formula's unit; an array if any number is one."""
        once = self.formula.value(**self.numbers)
        return once if isinstance(self.times, (int, float)) and self.times == 1 else np.multiply(self.times, once)

    def at(self, index: int) -> Priced:
        """One price of a bulk."""
        numbers = {name: _at(self.numbers[name], index) for name in self.formula.units}
        return Priced(self.formula, numbers, _at(self.times, index), self.label)

    def explain(self) -> str:
        """The formula, its numbers, the result and the source, in three lines; of one price, not of a bulk."""
        formula = self.formula
        head = f"{self.label}: " if self.label else ""
        many = f"{float(self.times):g} times " if self.times != 1 else ""
        numbers = ", ".join(f"{name} = {quantity(self.numbers[name], unit)}" for name, unit in formula.units.items())
        left_out = f"; leaves out {formula.leaves_out}" if formula.leaves_out else ""
        return (
            f"{head}{many}{formula.name} = {formula.expression}\n"
            f"  = {quantity(self.value, formula.result_unit)}, with {numbers}\n"
            f"  source: {formula.source}{left_out}"
        )


def total(prices: Iterable[Priced]) -> Number:
    """The sum of prices."""
    sums: Number = 0.0
    for priced in prices:
        sums = sums + priced.value
    return sums


def _at(value: Any, index: int) -> float:
    flat = np.asarray(value, dtype=np.float64).reshape(-1)
    return float(flat[index if flat.size > 1 else 0])


def symbol(name: str) -> sympy.Symbol:
    """A symbol of a formula: always a number at or above zero."""
    return sympy.Symbol(name, nonnegative=True)


def symbols(names: str) -> tuple[sympy.Symbol, ...]:
    """Several symbols, by names separated by spaces."""
    return tuple(symbol(name) for name in names.split())


def quantity(value: Numeric, unit: str) -> str:
    """A number with its unit and an SI prefix: `312 TFLOP/s`, `4.5 µs`. An array prints its range."""
    if isinstance(value, np.ndarray) and value.ndim:
        return f"{quantity(value.min(), unit)} to {quantity(value.max(), unit)}"
    number = float(value)
    if not unit:
        return f"{number:g}"
    if number == 0 or not math.isfinite(number):
        return f"{number:g} {unit}"
    scale, prefix = next((pair for pair in _PREFIXES if abs(number) >= pair[0]), _PREFIXES[-1])
    return f"{number / scale:.4g} {prefix}{unit}"
