"""What passes from the forward to the backward."""

from __future__ import annotations

from tests.passes.filecheck import check
from tests.passes.hand_plans import S0, R, emitted


def test_parameters_are_saved_as_they_are_stored() -> None:
    local = emitted(S0, {"up.weight": S0, "up.bias": S0, "down.weight": S0})
    assert "down_weight" in local.saved
    placeholders = [node.name for node in local.backward.graph.nodes if node.op == "placeholder"]  # type: ignore[union-attr]
    assert placeholders == [*local.saved, "tangent_output"]


def test_views_are_taken_again_in_the_backward() -> None:
    local = emitted(R, {})
    assert local.backward is not None and "t_1" not in local.saved
    check(local.backward, "CHECK: t_1 = aten.t.default(down_weight)")


def test_boxed_graphs_empty_their_list() -> None:
    assert "arguments.clear()" in emitted(R, {}).forward.code
