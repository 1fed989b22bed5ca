"""Formulas: bulk and scalar agree, units are complete, the text shows the numbers."""

from __future__ import annotations

import numpy as np
import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_models.formula import Formula, quantity, symbols

SENT, RATE, LEAST = symbols("sent_bytes bytes_per_s least_s")
TRANSFER = Formula(
    "transfer",
    sympy.Max(SENT / RATE, LEAST),
    {"sent_bytes": "B", "bytes_per_s": "B/s", "least_s": "s"},
    "a test",
    leaves_out="everything else",
)


@given(st.lists(st.floats(0, 1e15), min_size=1, max_size=8), st.floats(1.0, 1e12), st.floats(0, 10))
def test_bulk_evaluation_agrees_with_one_at_a_time(sizes: list[float], rate: float, least: float) -> None:
    bulk = TRANSFER.value(sent_bytes=np.array(sizes), bytes_per_s=rate, least_s=least)
    single = [TRANSFER.value(sent_bytes=size, bytes_per_s=rate, least_s=least) for size in sizes]
    np.testing.assert_allclose(np.asarray(bulk), np.array(single), rtol=1e-12)


def test_integer_arrays_do_not_overflow() -> None:
    square = Formula("square", SENT**4, {"sent_bytes": "B"}, "a test")
    assert square.value(sent_bytes=np.array([2**20])) == pytest.approx(2.0**80)


def test_a_formula_whose_units_miss_a_symbol_is_refused() -> None:
    with pytest.raises(ValueError, match="differ from units"):
        Formula("broken", SENT / RATE, {"sent_bytes": "B"}, "a test")


def test_the_explanation_names_formula_numbers_units_and_source() -> None:
    text = TRANSFER.explain(sent_bytes=1e9, bytes_per_s=4e9, least_s=1e-6)
    for part in ("sent_bytes/bytes_per_s", "1 GB", "4 GB/s", "1 µs", "= 250 ms", "source: a test", "leaves out"):
        assert part in text


def test_a_missing_number_is_an_error_and_not_a_zero() -> None:
    with pytest.raises(KeyError, match="least_s"):
        TRANSFER.value(sent_bytes=1.0, bytes_per_s=1.0)


def test_a_quantity_of_an_array_prints_its_range() -> None:
    assert quantity(np.array([1e3, 2e6]), "B") == "1 kB to 2 MB"
    assert quantity(0.0, "s") == "0 s"
    assert quantity(8, "") == "8"
