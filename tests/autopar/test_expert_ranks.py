"""Experts beside data, tensor and pipeline parallelism on four real ranks: what one device computes, and its counts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.nn import Experts, MixtureOfExperts, TopKGate
from tests.gloo import run_on_ranks

WIDTH, HIDDEN = 8, 12
EXPERTS = "*/autopar.experts*"  # the layers, forward and backward
PIPELINE: dict[str, Any] = {"stages": 2, "microbatches": 1, "schedule": "1f1b", "constraints": {EXPERTS: "A"}}


class Blocks(nn.Module):
    """Two layers of experts, for two stages."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(MixtureOfExperts(TopKGate(WIDTH, 4), Experts(4, WIDTH, HIDDEN)) for _ in range(2))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)[0]
        return x.square().mean()


def on_four_ranks() -> dict[str, Any]:
    """Errors beside data and beside tensor parallel; of a pipeline the loss, gradients and load, and one device's."""
    found: dict[str, Any] = {}
    mesh, x = init_device_mesh("cpu", (2, 2)), torch.randn(16, WIDTH, dtype=torch.float64)
    for layout in ("S0,A", "A,I"):
        report = autopar.verify(Blocks(), mesh, example_inputs=x, constraints={EXPERTS: layout})
        found[layout] = report.worst_relative_error
    model = Blocks()
    pmodel = autopar.compile(model, mesh, example_inputs=x, **PIPELINE)
    zeros = pmodel.expert_load.matrix.sum(1).tolist()
    for module in (pmodel, model):
        module(x).backward()
    gradients = {name: item.grad for name, item in model.named_parameters()}
    gaps = [
        float((value - gradients[name]).abs().max() / gradients[name].abs().max())
        for name, value in pmodel.full_gradients().items()
    ]
    load, expected = pmodel.expert_load, [block.expert_load.tolist() for block in model.blocks]
    same = load.matrix.tolist() == expected
    return found | {"zeros": zeros, "gap": max(gaps), "same": same, "spans": [*load.spans.values()]}


def test_on_four_real_ranks_experts_go_beside_data_tensors_and_stages() -> None:
    for found in run_on_ranks(on_four_ranks, 4):
        assert max(found["S0,A"], found["A,I"], found["gap"]) < 1e-10
        assert found["zeros"] == [0, 0] and found["same"]
        assert found["spans"] == [((0, 2), (2, 4))] * 2
