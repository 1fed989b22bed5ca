"""The ops that calibration times: each runs at every size, and is what its name says."""

from __future__ import annotations

import pytest
import torch

import autopar.ops  # noqa: F401 - the table times its ops where they are registered
from autopar.cost_models.kernel_table import KERNELS, ROWS, Shapes, bound_kernel, op_of, tensor_bytes

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_an_op_of_the_table_runs_and_moves_more_for_more_rows(name: str) -> None:
    kernels = [bound_kernel(name, Shapes(rows, CPU)) for rows in ROWS]
    moved = [kernel.moved_bytes for kernel in kernels if kernel is not None]
    assert len(moved) == len(ROWS)
    assert 0 < moved[0] < moved[1] < moved[2]


def test_an_op_of_a_library_that_is_not_there_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "autopar.cost_models.kernel_table.KERNELS", {"nowhere.op": ("default", lambda s: (s.matrix(),))}
    )
    assert op_of("nowhere.op") is None
    assert bound_kernel("nowhere.op", Shapes(1, CPU)) is None


def test_bytes_of_nested_arguments_are_added() -> None:
    four, eight = torch.ones(2, 3), torch.ones(5, dtype=torch.float64)
    assert tensor_bytes((four, [eight, None], 3.0), four) == 2 * 24 + 40
