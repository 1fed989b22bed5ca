"""Moves go where the two ends of an edge disagree, and nowhere else."""

from __future__ import annotations

from autopar.passes.insert_moves import insert_moves, moves_of
from tests.passes.filecheck import check
from tests.passes.hand_plans import S0, S1, R, assigned, emitted
from tests.passes.programs import captured


def test_a_replicated_program_has_no_collectives() -> None:
    local = emitted(R, {})
    assert local.backward is not None
    for gm in (local.forward, local.backward):
        check(gm, "CHECK-NOT: _c10d_functional")


def test_moves_are_inserted_nowhere_when_layouts_agree() -> None:
    _, _, program = captured("mlp")
    gm = insert_moves(program.graph_module, assigned(program, R, {}))
    assert list(moves_of(gm)) == []


def test_data_parallelism_sums_each_gradient_once() -> None:
    local = emitted(S0, {})
    assert local.backward is not None
    check(local.backward, "CHECK: all_reduce\nCHECK: all_reduce\nCHECK: all_reduce\nCHECK-NOT: = _c10d_functional.all_")


def test_a_tensor_parallel_mlp_pays_one_all_reduce() -> None:
    local = emitted(R, {"up.weight": S0, "up.bias": S0, "down.weight": S1})
    check(
        local.forward,
        """
        CHECK-NOT: _c10d_functional
        CHECK: aten.addmm
        CHECK-NOT: _c10d_functional
        CHECK: aten.mm
        CHECK-NEXT: all_reduce.default(mm, sum
        CHECK-NEXT: wait_tensor
        CHECK-NOT: all_reduce.default
        """,
    )
    assert local.backward is not None
    check(local.backward, "CHECK-NOT: _c10d_functional")  # the sum is saved, not taken again
