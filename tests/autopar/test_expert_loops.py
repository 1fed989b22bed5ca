"""Models of transformers whose experts are Python loops: distributed, they compute what the library computes."""

from __future__ import annotations

import pytest

import autopar
from autopar.capture.trace import capture
from autopar.zoo.checking import make_model

OPS = {  # ops of the forward
    "switch_transformers": ("autopar.experts.default", 2),
    "nllb_moe": ("autopar.experts.default", 2),
    "dbrx": ("autopar.experts.default", 1),
    "jetmoe": ("autopar.grouped_mm.default", 4),
}


@pytest.mark.parametrize("name", OPS)
def test_a_model_with_experts_in_a_loop_is_verified(name: str) -> None:
    model, inputs = make_model(name)
    op, count = OPS[name]
    program = capture(model, (), inputs)
    nodes = [node for node in program.graph_module.graph.nodes if str(node.target) == op]
    assert sum(node.meta["phase"] == "forward" for node in nodes) == count and not program.notes
    report = autopar.verify(model, (2, 2), example_inputs=inputs)
    assert report.ok, report.table


def test_experts_of_dbrx_may_be_cut_over_ranks() -> None:
    model, inputs = make_model("dbrx")
    report = autopar.verify(model, (2, 2), example_inputs=inputs, constraints={"*/autopar.experts*": "S0,A"})
    assert report.ok, report.table
    assert report.plan is not None
    assert any("autopar.experts" in entry.key for entry in report.plan.entries)
