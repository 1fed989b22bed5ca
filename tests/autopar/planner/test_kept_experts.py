"""What a layer of experts keeps for its backward: the bytes that a search counts are those of the emitted graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.capture.trace import capture
from autopar.mesh import Mesh
from autopar.nn import Experts, MixtureOfExperts, TopKGate
from autopar.planner.constraints import Constraint
from autopar.planner.kept_experts import kept_bytes, kept_pairs
from autopar.planner.make import Options, plan_program


class Layer(nn.Module):
    """A layer of experts with `choices` a token, and a loss."""

    def __init__(self, choices: int) -> None:
        super().__init__()
        self.experts = MixtureOfExperts(TopKGate(16, 8, choices), Experts(8, 16, 32))

    def forward(self, x: Tensor) -> Tensor:
        moved, auxiliary = self.experts(x)
        loss: Tensor = (x + moved).square().mean() + auxiliary
        return loss


def nbytes(value: Tensor) -> int:
    return value.numel() * value.element_size()


@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize(("mesh", "layout"), [((2,), "A"), ((4,), "A"), ((2, 2), "A,I"), ((4,), "S0"), ((4,), "R")])
def test_the_bytes_that_are_counted_are_those_of_the_emitted_graph(
    mesh: tuple[int, ...], layout: str, choices: int
) -> None:
    """Of one choice a token: as many tokens come as go, and they are kept too."""
    pins = (Constraint("*/autopar.experts*", layout),)
    planned = plan_program(capture(Layer(choices), (torch.ones(64, 16),), {}), Mesh(mesh), Options(constraints=pins))
    ((_, forward),) = kept_pairs(planned.planning.decisions, planned.choice)
    (node,) = [
        node for node in planned.local.forward.graph.nodes if node.target is torch.ops.autopar.experts_keeping.default
    ]
    came = [item.meta["val"] for item in node.args[:3]] if "A" in layout else []
    counted = kept_bytes(planned.planning.decisions[forward], planned.choice[forward], mesh)
    assert counted == sum(map(nbytes, (node.meta["val"][1], *came)))
